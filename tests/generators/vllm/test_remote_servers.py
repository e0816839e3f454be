"""Real `vllm serve` on other hosts (network namespaces), which take new weights and adapters from a trainer here."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import torch

pytest.importorskip("vllm")
from peft import PeftModel
from transformers import AutoModelForCausalLM

from slipstream.cli import main
from slipstream.config.schema import Config, ConfigError
from slipstream.controller.launch import Cluster
from slipstream.generators.base import Interruption
from slipstream.generators.vllm.server_adapters import ServerAdapters
from slipstream.generators.vllm.worker_methods import WorkerMethods
from slipstream.rollout import Completion, Sampling
from tests.conftest import VOCABULARY, build_model, build_tokenizer, random_prompts
from tests.controller.test_engine_supervisor import until
from tests.generators.test_engine import assert_true, reference_logits
from tests.generators.vllm.serving import serving
from tests.generators.vllm.test_servers import attached, configured, keep_busy, trained
from tests.hosts import hosts
from tests.trainers.test_trainer import random_batch

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
BOUND = 1e-4  # of log-probabilities by merged and separate adapters
ADAPTERS = ("--enable-lora", "--max-loras", "4", "--max-lora-rank", "8")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "policy-a"
    build_model(head_dim=32).save_pretrained(path)
    tokenizer = build_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def found() -> Iterator[list[tuple[str, str]]]:
    with hosts(2) as both:
        yield both


@pytest.fixture(scope="module")
def two(found: list[tuple[str, str]], model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """URLs of two servers of adapters, each on its host."""
    with ExitStack() as stack:
        starts = [
            serving(
                model,
                tmp_path_factory.mktemp("server"),
                *ADAPTERS,
                host=host,
                VLLM_ALLOW_RUNTIME_LORA_UPDATING="1",
            )
            for host in found
        ]
        with ThreadPoolExecutor() as threads:
            urls = list(threads.map(stack.enter_context, starts))
        yield urls


def adapters(model: Path, urls: list[str], how: Interruption) -> Config:
    return configured(
        model, *urls, sync__link="lora", lora__rank=4, sync__in_flight=how, sync__verify="full", loop__max_lag=1
    )


def served(pools: Cluster) -> list[int]:
    """The version of each server."""
    return [one.version for one in pools.generator.generators]


@pytest.mark.parametrize("how", ["continue", "retry", "drain"])
def test_adapters_reach_servers_on_other_hosts(how: Interruption, two: list[str], model: Path, tmp_path: Path) -> None:
    """Each version samples by its own adapter; sequences in flight finish on theirs, start again, or end before."""
    base: Any = AutoModelForCausalLM.from_pretrained(model)

    def policy(path: Path) -> Any:
        loaded: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), path)
        return loaded.eval()

    async def step(pools: Cluster, version: int) -> Any:
        await pools.trainer.step(random_batch(VOCABULARY))
        await pools.trainer.export(tmp_path / f"policy {version}")
        return policy(tmp_path / f"policy {version}")

    async def main() -> None:
        models = {0: base.eval()}
        async with attached(adapters(model, two, how), tmp_path) as pools:
            for version in range(1, 6 if how == "continue" else 4):  # 5 versions reuse a slot
                busy = [asyncio.create_task(keep_busy(pools, p, version, 130)) for p in random_prompts(8)]
                await pools.generator.generate([5, 6], Sampling(max_tokens=30))
                models[version] = await step(pools, version)
                stats = await pools.link.publish(version)
                assert not stats.engines_lost
                await until(lambda version=version: served(pools) == [version] * 2)
                drawn = [c for completions in await asyncio.gather(*busy) for c in completions]
                check(drawn, models)
                assert any(c.spans[0].version == version for c in drawn)
            discarded = [(await one.stats())["tokens_discarded"] for one in pools.generator.generators]
            assert how == "retry" or not any(discarded)

    def check(drawn: list[Completion], models: dict[int, Any]) -> None:
        assert all(len(completion.spans) == 1 for completion in drawn)
        for completion in drawn[::3]:
            logits = reference_logits(models[completion.spans[0].version], completion)
            wanted = logits.log_softmax(-1).gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            assert (wanted - torch.tensor(completion.logprobs)).abs().max() < BOUND

    asyncio.run(main())


def test_doctor_tries_the_network_to_each_server(
    two: list[str], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server that can't be reached hides neither the others nor what else is wrong."""
    (tmp_path / "run.toml").write_text("")
    flags = [f"--model.path={model}", "--environment.name=addition", "--generator.engine=vllm", "--loop.max_lag=1",
             "--trainer.device=cpu", "--sampling.max_tokens=8", f"--run.dir={tmp_path}"]  # fmt: skip
    nowhere = "http://nowhere.invalid:8000"
    for urls, rank, faults in (
        ([nowhere, *two], 4, [f"{nowhere}/health did not answer"]),
        (two, 64, [f"{url} runs with --max-lora-rank 8; start it with --max-lora-rank 64" for url in two]),
    ):
        status = main(["doctor", str(tmp_path / "run.toml"), "--json", f"--generator.servers={json.dumps(urls)}",
                       *flags, f"--lora.rank={rank}"])  # fmt: skip
        found = json.loads(capsys.readouterr().out)
        of_servers = [fault["text"] for fault in found["faults"] if fault["check"] == "servers"]
        assert status == 1 and len(of_servers) == len(faults)
        assert all(text.startswith(fault) for text, fault in zip(of_servers, faults, strict=True))
        assert found["checks"]["servers"] == f"{len(faults)} fault{'s' * (len(faults) > 1)}"
        assert [*found["servers"]] == (two if rank == 4 else [])
        assert all(rate > 12.5e6 for rate in found["servers"].values())


@contextmanager
def stopped(host: str) -> Iterator[None]:
    """Stop all processes of a host."""
    pids = [int(pid) for pid in subprocess.check_output(["ip", "netns", "pids", host]).split()]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def test_no_publish_waits_for_a_server_that_does_not_receive(
    two: list[str], found: list[tuple[str, str]], model: Path, tmp_path: Path
) -> None:
    """The other one gets each adapter at once; the late one gets the newest when it can."""

    async def main() -> None:
        async with attached(adapters(model, two, "continue"), tmp_path) as pools:
            with stopped(found[1][0]):
                for version in (1, 2, 3):
                    await pools.trainer.step(random_batch(VOCABULARY))
                    assert (await pools.link.publish(version)).late == 1
                    assert served(pools) == [version, 0]
            await until(lambda: served(pools) == [3, 3])
            drawn = await pools.generator.generate([5, 6], Sampling(max_tokens=3))
            assert set(drawn.versions) == {3}

    asyncio.run(main())


def test_a_second_run_brings_its_own_adapters(
    two: list[str], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters of the first one are gone from the slots, also if it was killed, and a server without room for them is
    refused. Each name that a server lists can be sampled, and after a run only its newest version is listed."""

    def post(path: str, body: dict[str, Any]) -> str:
        sent = Request(two[0] + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urlopen(sent, timeout=30) as response:
            text: str = response.read().decode()
        return text

    def complete(name: str) -> list[int]:
        asked = {"model": name, "prompt": [5, 6], "max_tokens": 8, "temperature": 0, "ignore_eos": True,
                 "return_token_ids": True}  # fmt: skip
        tokens: list[int] = json.loads(post("/v1/completions", asked))["choices"][0]["token_ids"]
        return tokens

    def listed() -> list[str]:
        """Names of adapters, each of which completes."""
        with urlopen(f"{two[0]}/v1/models", timeout=30) as response:
            names = [model["id"] for model in json.load(response)["data"] if model["parent"]]
        for name in names:
            complete(name)
        return names

    async def main(loop_lag: int) -> None:
        config = configured(model, *two, sync__link="lora", lora__rank=4, loop__max_lag=loop_lag)
        async with attached(config, tmp_path) as pools:
            for version in range(1, 7):
                await pools.trainer.step(random_batch(VOCABULARY))
                await pools.link.publish(version)
                await until(lambda version=version: served(pools) == [version] * 2)
                drawn = await pools.generator.generate([5, 6], Sampling(max_tokens=3))
                assert [span.version for span in drawn.spans] == [version]
            drawn = await pools.generator.generate([5, 6], Sampling(max_tokens=8, temperature=0, ignore_eos=True))
            newest[:] = [*drawn.token_ids]
            await pools.trainer.export(tmp_path / "own")

    newest: list[int] = []
    asyncio.run(main(1))
    for number in range(4):  # as many as there are slots, and yet the newest version keeps its own
        post("/v1/load_lora_adapter", {"lora_name": f"own-{number}", "lora_path": str(tmp_path / "own")})
    [left, *own] = listed()
    assert left.startswith("policy-v6-") and len(own) == 4
    assert complete(left) == complete("own-0") == newest != complete(str(model))
    with monkeypatch.context() as killed:  # a run that is killed closes nothing
        killed.setattr(WorkerMethods, "slipstream_close", WorkerMethods.slipstream_describe)
        killed.setattr(ServerAdapters, "older", [])
        asyncio.run(main(1))
        assert "policy-v5-" in str(killed_names := listed()) and not {left, *own} & {*killed_names}
    asyncio.run(main(1))
    [name] = listed()
    assert complete(name) == newest
    with pytest.raises(ConfigError, match=r"room for 4 adapters .* --max-loras 5 --max-lora-rank 4"):
        asyncio.run(main(2))


def test_changed_elements_reach_a_server_on_another_host(
    model: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The server's worker has a process of its own."""

    async def main(url: str) -> None:
        models = {0: AutoModelForCausalLM.from_pretrained(model).eval()}
        config = configured(model, url, sync__link="delta", sync__verify="full", sync__in_flight="recompute")
        async with attached(config, tmp_path) as pools:
            for version in (1, 2):
                busy = asyncio.create_task(keep_busy(pools, [5, 6, 7], version))
                models[version] = await trained(pools, tmp_path / f"policy {version}")
                await pools.link.publish(version)
                for completion in await busy:
                    assert_true(completion, Sampling(), models)

    directory = tmp_path_factory.mktemp("server")
    with hosts(1) as [host], serving(model, directory, host=host, executor="mp") as url:
        asyncio.run(main(url))
