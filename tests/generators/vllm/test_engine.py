"""Real vLLM on a CPU: its samples, before and after weights change, against transformers' own forward pass."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slipstream.config.loading import load_config
from slipstream.config.schema import Config
from slipstream.controller.launch import Cluster
from slipstream.errors import UserError
from slipstream.generators.base import GenerationError, Interruption
from slipstream.generators.pool import EngineReplica
from slipstream.generators.vllm import compat, weights
from slipstream.generators.vllm.compat import call_workers
from slipstream.generators.vllm.worker_methods import TokenCounter, WorkerMethods
from slipstream.rollout import Completion, Sampling
from slipstream.runtime.worker import WorkerDied
from slipstream.runtime.worker_process import WorkerProcess
from slipstream.sync import nccl_direct
from slipstream.sync.frames import Superseded
from slipstream.sync.nccl_direct import import_transfer, packed_options
from slipstream.sync.update import RolledBack
from tests.conftest import build_model, build_tokenizer, drawn_until, in_flight, save_model
from tests.processes import changing, command_line, descendants, lives

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.timeout(240),
]
BOUND = 1e-5
LONG = 300
NUMBERS = '{"enum": [12, 345, 3456, 7]}'
REFUSED_LATE = '{"type": "object", "patternProperties": {"(": {}}}'
DIGITS = Sampling(max_tokens=200, top_k=20, record_sampling_mask=True, json_schema='{"type": "integer", "minimum": 0}')
TRAINER = "slipstream.tools.verify:PerturbingTrainer"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vllm") / "model"
    save_model(path, head_dim=32)
    return path


def config_of(model: Path, *flags: str) -> Config:
    named = [
        "--environment.name=addition",
        "--generator.engine=vllm",
        "--generator.max_num_seqs=16",
        "--generator.threads=1",
        "--trainer.threads=1",
        f"--trainer.kind={TRAINER}",
    ]
    return load_config(None, [f"--model.path={model}", *named, *flags])


@lru_cache(8)
def reference_at(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")


def logprobs_of(path: Path, completion: Completion) -> torch.Tensor:
    """Log-probabilities of the tokens by a plain forward pass, under the distribution that sampled them."""
    reference = reference_at(path)
    ids = torch.tensor([completion.prompt_ids + completion.token_ids[:-1]])
    with torch.no_grad():
        logits = reference(ids).logits[0, len(completion.prompt_ids) - 1 :] / (completion.temperature or 1.0)
    for row, kept in enumerate(completion.sampling_mask or ()):
        mask = torch.full_like(logits[row], -torch.inf)
        mask[torch.tensor(list(kept))] = 0
        logits[row] += mask
    return logits.log_softmax(-1).gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]


def assert_drawn_by(path: Path, completion: Completion, start: int = 0, end: int | None = None) -> None:
    wanted, got = logprobs_of(path, completion)[start:end], torch.tensor(completion.logprobs)[start:end]
    if completion.temperature == 0:
        assert (got == 0).all()
    else:
        assert (wanted - got).abs().max() < BOUND


def test_log_probabilities_and_versions_are_exact(model: Path, tmp_path: Path) -> None:
    """All sampling options, all ends of a completion, and invalid requests."""

    async def main() -> None:
        pools = await Cluster.start(config_of(model, "--sampling.top_k=20"), tmp_path)
        try:
            await pools.link.connect(3)
            draw = pools.generator.generate
            kinds = [
                Sampling(max_tokens=24),
                Sampling(temperature=0.7, max_tokens=24),
                Sampling(temperature=1.3, top_k=5, max_tokens=24, record_sampling_mask=True),
                Sampling(top_k=20, top_p=0.8, max_tokens=24, record_sampling_mask=True),
                Sampling(temperature=0.0, max_tokens=24),
                Sampling(temperature=0.9, top_k=20, max_tokens=24, record_sampling_mask=True, json_schema=NUMBERS),
            ]
            for sampling, completions in zip(
                kinds, [await asyncio.gather(*(draw([5, 6, 7 + i], s) for i in range(4))) for s in kinds], strict=True
            ):
                for c in completions:
                    assert c.spans == ((3, 0, len(c.token_ids)),) and c.temperature == sampling.temperature
                    assert c.finish_reason == ("stop" if c.token_ids[-1] == 1 else "length")
                    assert_drawn_by(model, c)
                    if sampling.top_k:
                        assert all(
                            t in k and len(k) <= sampling.top_k
                            for t, k in zip(c.token_ids, c.sampling_mask, strict=True)
                        )
                    if sampling.json_schema and c.finish_reason == "stop":
                        json.loads(build_tokenizer().decode(c.token_ids[:-1]))
            plain = await draw([5, 6, 7], Sampling(temperature=0.0, max_tokens=24))
            stop = plain.token_ids[4]
            ended = await draw([5, 6, 7], Sampling(temperature=0.0, max_tokens=24, stop_tokens=(stop,)))
            assert ended.token_ids == plain.token_ids[: plain.token_ids.index(stop) + 1]
            assert ended.finish_reason == "stop"
            stops = tuple("0123456789abcdefgh")
            sampling = Sampling(temperature=2.0, max_tokens=60, stop_strings=stops)
            texts = []
            for c in await asyncio.gather(*(draw([5, 6, 7], sampling) for _ in range(8))):
                texts.append(build_tokenizer().decode(c.token_ids))
                assert not set(build_tokenizer().decode(c.token_ids[:-1])) & set(stops)
                assert c.finish_reason == ("stop" if set(texts[-1]) & set(stops) or c.token_ids[-1] == 1 else "length")
            assert any(set(text) & set(stops) for text in texts)
            for prompt, changes, said in (
                ([], {}, "empty"),
                ([5] * 256, {}, "context of 256"),
                ([5, 97], {}, "token id 97, and the model has ids from 0 to 96"),
                ([5], {"top_p": 0.5, "record_sampling_mask": True}, "top_k"),
                ([5], {"temperature": 3.0}, "temperature must be in"),
                ([5], {"json_schema": NUMBERS, "record_sampling_mask": True}, "schema kept; set sampling.top_k too"),
                ([5], {"json_schema": "{"}, "vLLM refuses the request: Invalid JSON grammar"),
                ([5], {"json_schema": '{"type": "nothing"}'}, "vLLM refuses the request: Grammar error"),
                ([5], {"json_schema": REFUSED_LATE}, "it can't follow this JSON schema"),
            ):
                with pytest.raises(GenerationError, match=said):
                    await draw(prompt, Sampling(max_tokens=4, **changes))
        finally:
            await pools.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("link", "how"),
    [
        ("shared", "continue"),
        ("nccl", "recompute"),
        ("checkpoint", "retry"),
        ("shared", "drain"),
        ("delta", "recompute"),
    ],
)
def test_completions_are_exact_across_a_swap(link: str, how: str, model: Path, tmp_path: Path) -> None:
    """Versions are exact at the boundary token in every mode; an abort in between leaves other requests unaffected."""

    async def main() -> None:
        flags = [f"--sync.link={link}", f"--sync.in_flight={how}", "--sync.verify=full"]
        pools = await Cluster.start(config_of(model, *flags), tmp_path)
        trainer, draw = changing(pools), pools.generator.generate

        try:
            await pools.link.connect(0)
            await trainer.store(tmp_path / "0")
            for version in (1, 2):
                sampling = Sampling(max_tokens=200)
                prompts = [[5, 6, 7 + i] for i in range(12)]
                digits = [asyncio.ensure_future(draw([5, 6, 7 + i], DIGITS)) for i in range(4)]
                running = await in_flight(pools.generator, prompts, sampling)
                running.pop().cancel()
                await trainer.change(version)
                publishing = asyncio.ensure_future(pools.link.publish(version))
                more = asyncio.ensure_future(drawn_until(publishing, pools.generator, prompts[:4], 200))
                waiting = [asyncio.ensure_future(draw([5, 6, 7 + i], sampling)) for i in range(8)]
                with pytest.raises(GenerationError, match="temperature"):  # refused now, not when an engine has drained
                    await draw([5], Sampling(temperature=3.0))
                await publishing
                await trainer.store(tmp_path / str(version))
                later = await asyncio.gather(*(draw([5, 6, 7 + i], sampling) for i in range(8)))
                numbers = await asyncio.gather(*digits)  # the schema holds across the swap
                assert all(build_tokenizer().decode(c.token_ids).removesuffix("<eos>").isdigit() for c in numbers)
                first = [*numbers, *await asyncio.gather(*running), *await more]
                check(version, how, tmp_path, first, await asyncio.gather(*waiting), later)
            discarded = (await pools.generator.generators[0].stats())["tokens_discarded"]
            # A request without a token at the swap restarts in every mode, and drops a first token that came after it.
            publishes, waiting = 2, 8
            assert (discarded > publishes * waiting) == (how == "retry"), "only sequences in flight are sampled again"
        finally:
            await pools.close()

    def check(version: int, how: str, folder: Path, first: Any, waiting: Any, later: Any) -> None:
        old, new = folder / str(version - 1), folder / str(version)
        for c in (*first, *waiting, *later):
            assert [s.start for s in c.spans] == [0, *(s.end for s in c.spans[:-1])] and c.spans[-1].end == len(
                c.token_ids
            )
            for span in c.spans:
                if span.start and how == "continue":
                    continue  # drawn by new weights that look at old keys: no plain forward pass says the same
                assert_drawn_by({version - 1: old, version: new}[span.version], c, span.start, span.end)
        assert all(c.versions == (version, version) for c in later), "a new sequence is of the new version alone"
        before, both, after = (version - 1, version - 1), (version - 1, version), (version, version)
        met = {"continue": both, "recompute": both, "retry": after, "drain": before}[how]  # those in flight
        seen = {c.versions for c in first}
        assert met in seen and seen <= {before, met, after}, (how, seen)

    asyncio.run(main())


def test_new_sequences_read_no_cached_keys_of_old_weights(model: Path, tmp_path: Path) -> None:
    """vLLM caches the keys of prompts of several blocks; old keys are still cached when weights change."""

    async def main() -> None:
        flags = ["--sync.in_flight=continue", "--sync.verify=full", "--generator.engine_args.block_size=32"]
        pools = await Cluster.start(config_of(model, *flags), tmp_path)
        trainer, draw = changing(pools), pools.generator.generate
        prompts = [[5 + (i + n) % 80 for n in range(150)] for i in range(4)]

        async def drawn() -> list[Completion]:
            return await asyncio.gather(*(draw(prompt, Sampling(max_tokens=20)) for prompt in prompts))

        try:
            await pools.link.connect(0)
            for version in (0, 1):
                await trainer.store(tmp_path / str(version))
                for c in (*await drawn(), *await drawn()):  # the second time by the keys of the first
                    assert c.versions == (version, version)
                    assert_drawn_by(tmp_path / str(version), c)
                if not version:
                    await trainer.change(1)
                    await pools.link.publish(1)
        finally:
            await pools.close()

    asyncio.run(main())


async def check_death_of_core(engine: EngineReplica) -> None:
    """Kill vLLM's core, which never answers pending requests then. The generator ends and leaves no process."""
    assert isinstance(engine.process, WorkerProcess) and engine.process.process
    processes = {engine.process.process.pid} | descendants(engine.process.process.pid)
    cores = {process for process in processes if b"EngineCore" in command_line(process)}

    async def on_and_on() -> None:  # on a busy host the core often ends before it is found
        while True:
            await engine.generate([5, 6, 7], Sampling(max_tokens=1500))

    drawing = asyncio.ensure_future(on_and_on())
    await asyncio.wait([drawing], timeout=1.0)
    assert cores and not drawing.done()
    for core in cores:
        os.kill(core, signal.SIGKILL)
    async with asyncio.timeout(20):
        with pytest.raises(WorkerDied, match=r"(?s)^generator 0 died \(log: .*vLLM's engine core died"):
            await drawing
        while any(map(lives, processes)):
            await asyncio.sleep(0.01)


def test_completions_are_exact_across_a_swap_with_the_core_in_a_process(
    patient: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on GPUs: calls to workers are asynchronous, and steps continue until they have answered."""
    from vllm.v1.engine.core_client import SyncMPClient

    assert hasattr(SyncMPClient, "_send_input"), "of this vLLM's core everything is waited for"
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")

    async def main() -> None:
        flags = ["--sync.link=nccl", "--sync.in_flight=recompute", "--sync.verify=full"]
        pools = await Cluster.start(config_of(patient, *flags), tmp_path)
        trainer, draw = changing(pools), pools.generator.generate
        try:
            (engine,) = pools.generator.generators
            assert isinstance(engine.process, WorkerProcess) and engine.process.process
            assert descendants(engine.process.process.pid), "vLLM's core has no process of its own"
            await pools.link.connect(0)
            await trainer.store(tmp_path / "0")
            prompts, sampling = [[5, 6, 7 + i] for i in range(12)], Sampling(max_tokens=LONG)
            completions: list[Completion] = []
            for version in range(1, 9):  # on a crowded machine vLLM may have drawn all of them when it hears of a swap
                running = await in_flight(pools.generator, prompts, sampling)
                await trainer.change(version)
                publishing = asyncio.ensure_future(pools.link.publish(version))
                more = await drawn_until(publishing, pools.generator, prompts[:4], LONG)
                published = await publishing
                assert 0 < published.ready < published.total
                await trainer.store(tmp_path / str(version))
                completions += [*await asyncio.gather(*running), *more]
                if version > 1 and (met := [c for c in completions if len(c.spans) > 1]):
                    break
            assert met, "none was in flight at any swap"
            for c in [*met, *completions[:: 1 + len(completions) // 40]]:
                assert [s.start for s in c.spans] == [0, *(s.end for s in c.spans[:-1])]
                for span in c.spans:
                    assert_drawn_by(tmp_path / str(span.version), c, span.start, span.end)
            before, start = (await engine.stats())["busy_s"], time.perf_counter()
            (given_up,) = await in_flight(pools.generator, [[5, 6, 7]], Sampling(max_tokens=LONG))
            given_up.cancel()
            await asyncio.sleep(2)
            await draw([5, 6, 7], Sampling(max_tokens=2))
            busy, passed = (await engine.stats())["busy_s"] - before, time.perf_counter() - start
            assert 0 < busy < passed - 1, "an engine without sequences is not busy"
            await check_death_of_core(engine)
        finally:
            await pools.close()

    asyncio.run(main())


@pytest.fixture(scope="module")
def small(patient: Path) -> Iterator[Any]:
    """An engine in this process, with few slots and too little memory for as many long sequences."""
    from slipstream.generators.vllm.engine import VllmEngine

    blocks = ["--generator.engine_args.block_size=32", "--generator.engine_args.num_gpu_blocks_override=12"]
    yield VllmEngine(config_of(patient, "--generator.max_num_seqs=4", "--generator.max_model_len=256", *blocks))


@pytest.mark.parametrize("died", [True, False])
def test_a_request_to_a_dead_core_ends_the_process(small: Any, monkeypatch: pytest.MonkeyPatch, died: bool) -> None:
    """It may arrive before the thread that waits for the death of the core."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("the core is dead")

    def exit_process(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr(small._llm, "add_request", refuse)
    monkeypatch.setattr(compat, "core_died", lambda llm: died)
    monkeypatch.setattr(os, "_exit", exit_process)
    with pytest.raises(SystemExit if died else OSError):
        small.submit(0, [5, 6, 7], Sampling(max_tokens=2))
    assert small.running == 0


def test_a_drain_excludes_requests_waiting_in_vllm(small: Any) -> None:
    """Only sequences in flight are finished; requests that wait in vLLM begin after the swap."""
    engine = small
    engine.version = 0
    for number in range(12):
        engine.submit(number, [5, 6, 7 + number], Sampling(max_tokens=40))
    while engine.longest_in_flight() < 5:
        assert not engine.step()
    engine.draining = True
    drained = []
    while engine.running:
        drained += [key for key, _ in engine.step()]
    assert len(drained) == 4 and engine.busy
    engine.swap(1, lambda: dict)
    found: dict[Any, Completion] = {}
    while engine.busy:
        found.update(engine.step())
    assert {*found, *drained} == set(range(12)) and len(found) == 8
    assert all(c.versions == (1, 1) and len(c.token_ids) == 40 for c in found.values())
    engine.submit(12, [5, 6, 7], Sampling(max_tokens=40))
    assert engine.longest_in_flight() == 0, "those before have ended"
    engine.abort(12)


def test_log_probabilities_are_nan_unless_they_are_recorded(small: Any) -> None:
    for key, options in (("recorded", {}), ("not", {"record_logprobs": False})):
        small.submit(key, [5, 6, 7], Sampling(max_tokens=9, **options))
    small.submit("greedy", [5, 6, 7], Sampling(0.0, max_tokens=9, record_logprobs=False))
    small.submit("mask", [5, 6, 7], Sampling(top_k=4, max_tokens=9, record_logprobs=False, record_sampling_mask=True))
    found: dict[Any, Completion] = {}
    while small.busy:
        found |= dict(small.step())
    assert all(math.isfinite(p) for key in ("recorded", "mask") for p in found[key].logprobs)
    assert len(found["mask"].sampling_mask or ()) == len(found["mask"].token_ids)
    assert len(found["not"].logprobs) == len(found["not"].token_ids) and all(map(math.isnan, found["not"].logprobs))
    assert set(found["greedy"].logprobs) == {0.0} and found["not"].spans[0].start == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_weights_fail_each_request_and_the_engine_continues(small: Any, temperature: float) -> None:
    """Completions are valid again when the weights are finite again."""

    def fill(worker: Any, value: float) -> None:
        with torch.no_grad():
            worker.model_runner.model.model.norm.weight.fill_(value)

    for value, key in ((1.0, "before"), (torch.nan, "during"), (1.0, "after")):
        small._llm.collective_rpc(fill, args=(value,))
        small.submit(key, [5, 6, 7], Sampling(temperature, max_tokens=4))
        outcomes = dict(small.step())
        while small.busy:
            outcomes |= dict(small.step())
        if key == "during":
            assert isinstance(outcomes[key], GenerationError) and "logits are not finite" in str(outcomes[key])
        else:
            assert len(outcomes[key].token_ids) == 4 and not small.busy


def test_a_preempted_sequence_keeps_its_tokens(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the model runner forgets it until it is resumed, as vLLM's second one does, too."""
    from slipstream.generators.vllm import worker_methods as vllm_worker

    engine, runner = small, small._llm.model_executor.driver_worker.worker.model_runner

    def counts(names: Any) -> dict[str, int]:
        return {name: len(runner.requests[name].output_token_ids) for name in names}

    def known(runner: Any) -> Any:
        now = counts(runner.requests.keys() & runner.input_batch.req_id_to_index.keys())
        return lambda: now

    monkeypatch.setattr(vllm_worker, "count_tokens", known)
    engine.version = 0
    for number in range(4):
        engine.submit(number, [5, 6, 7 + number], Sampling(max_tokens=200))
    found: dict[Any, Completion] = {}
    while not counts(runner.requests.keys() - runner.input_batch.req_id_to_index.keys()):
        found.update(engine.step())
    before = {r.key: counts([r.worker_name])[r.worker_name] for r in engine._requests.values()}
    engine.draining = True
    assert engine.running == len(before) > 1, "sequences with tokens continue"
    drawn = call_workers(engine._llm, WorkerMethods.slipstream_count_tokens)[0]
    engine.swap(1, lambda: lambda: drawn, "continue")
    while engine.busy:
        found.update(engine.step())
    assert {key: found[key].spans for key in before} == {k: ((0, 0, n), (1, n, 200)) for k, n in before.items()}
    assert engine.tokens_discarded == 0


def test_a_worker_counts_tokens_of_finished_and_preempted_requests() -> None:
    class Runner:
        """A model runner that also deletes preempted requests."""

        def __init__(self) -> None:
            self.requests: dict[str, Any] = {}

        def execute_model(self, scheduler_output: Any) -> None:
            for name in scheduler_output.finished_req_ids | (scheduler_output.preempted_req_ids or set()):
                self.requests.pop(name, None)
            for name, tokens in scheduler_output.drawn.items():
                self.requests[name] = SimpleNamespace(output_token_ids=[7] * tokens)

    runner = Runner()
    tokens = TokenCounter(runner)

    def step(ended: set[str], preempted: set[str] | None, **drawn: int) -> None:
        done = SimpleNamespace(finished_req_ids=ended, preempted_req_ids=preempted, drawn=drawn)
        runner.execute_model(done)

    step(set(), None, a=0, b=3, c=4)
    assert tokens.count()() == {"a": 0, "b": 3, "c": 4}
    step(set(), {"b", "c"}, a=1)
    earlier = tokens.count()
    step({"c"}, None, a=2, b=4)
    assert earlier() == {"a": 1, "b": 3, "c": 4}
    assert tokens.count()() == {"a": 2, "b": 4, "c": None}
    tokens.forget_finished()
    step({"b"}, {"a", "b"})
    assert tokens.count()() == {"a": 2, "b": None}


class Core:
    """An `LLMEngine` without a model: a test sets its workers' counts, finished requests and refused requests."""

    def __init__(self) -> None:
        self.engine_core, self.refuses = object(), False
        self.drawn: dict[str, int | None] = {}
        self.model_config = SimpleNamespace(
            hf_config=SimpleNamespace(eos_token_id=None), max_logprobs=20, max_model_len=256, get_vocab_size=lambda: 97
        )
        self._finished: list[Any] = []

    def collective_rpc(self, method: str, args: Any = ()) -> list[Any]:
        return [self.drawn]

    def reset_prefix_cache(self, reset_running_requests: bool) -> bool:
        return True

    def add_request(self, name: str, prompt: Any, parameters: Any, lora_request: Any) -> str:
        if self.refuses:
            raise ValueError("too much of something")
        return name

    def abort_request(self, names: list[str]) -> None: ...

    def finish(self, name: str, tokens: int) -> None:
        places = list(range(tokens + 1))
        flat = SimpleNamespace(start_indices=places[:-1], end_indices=places[1:], token_ids=places, logprobs=places)
        output = SimpleNamespace(token_ids=[7] * tokens, logprobs=flat, finish_reason="length")
        self._finished.append(SimpleNamespace(finished=True, request_id=name, outputs=[output]))

    def step(self) -> list[Any]:
        finished, self._finished = self._finished, []
        return finished


@pytest.fixture
def core(patient: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Core]:
    """An engine, and its replacement of vLLM."""
    from slipstream.generators.vllm import engine as vllm

    core = Core()
    monkeypatch.setattr(vllm, "start_vllm", lambda *_: core)
    return vllm.VllmEngine(config_of(patient)), core


@pytest.mark.parametrize("how", ["continue", "recompute", "retry"])
def test_completions_finished_before_a_swap_are_not_sampled_again(how: Interruption, core: tuple[Any, Core]) -> None:
    """Also if they are not yet read, at that swap and at the next. A request without a token is sampled again."""
    engine, llm = core
    for key in ("ended", "running", "new"):
        engine.submit(key, [5, 6, 7], Sampling(max_tokens=9))
    engine.swap(1, lambda: lambda: {"1": None, "2": 5}, how)
    assert engine.step() == [] and engine.versions_known and engine.tokens_discarded == (5 if how == "retry" else 0)
    engine.step()
    names = {request.key: name for name, request in engine._requests.items()}
    assert (
        names["ended"] == "1" and names["new"] not in ("1", "2", "3") and (names["running"] != "2") == (how == "retry")
    )
    engine.swap(2, lambda: lambda: {names["running"]: 7, names["new"]: 2}, "continue")
    llm.drawn = {names["running"]: 7}
    engine.draining = True
    assert engine.running == 2, "what has drawn nothing waits"
    llm.finish("1", 8)
    llm.finish(names["running"], 9)
    found = dict(engine.step())
    assert found["ended"].spans == ((0, 0, 8),)
    assert found["running"].spans == (((1, 0, 7), (2, 7, 9)) if how == "retry" else ((0, 0, 5), (1, 5, 7), (2, 7, 9)))
    assert engine.tokens_discarded == (5 if how == "retry" else 0) and engine.tokens_generated == 17


def test_completions_that_finish_during_a_swap_are_discarded_or_kept_whole(core: tuple[Any, Core]) -> None:
    engine, llm = core
    for key in ("ended", "went on", "begun since"):
        engine.submit(key, [5, 6, 7], Sampling(max_tokens=9))
    counts: list[Any] = [None]
    engine.swap(1, lambda: lambda: counts[-1], "retry")
    for name, tokens in (("1", 6), ("2", 8), ("3", 2)):
        llm.finish(name, tokens)
    assert engine.step() == [] and not engine.versions_known
    counts.append({"1": 6, "2": 6})
    ((key, completion),) = engine.step()
    assert key == "ended" and completion.spans == ((0, 0, 6),)
    assert engine.tokens_discarded == 8 + 2
    engine.step()
    assert sorted(request.key for request in engine._requests.values()) == ["begun since", "went on"]


def test_a_swap_that_is_rolled_back_leaves_the_version_before(core: tuple[Any, Core]) -> None:
    """Also of requests that began after the swap, and of those that finished meanwhile."""
    engine, llm = core
    rolled_back: list[bool] = []

    def counts_before() -> Any:
        if rolled_back:
            raise RolledBack("every worker has the old values again")
        return None

    for key in ("ended", "went on"):
        engine.submit(key, [5, 6, 7], Sampling(max_tokens=9))
    engine.swap(1, lambda: counts_before)
    engine.submit("begun since", [5, 6, 7], Sampling(max_tokens=9))
    llm.finish("1", 6)
    assert engine.step() == [] and not engine.versions_known
    rolled_back.append(True)
    found = dict(engine.step())
    assert engine.versions_known and engine.version == 0
    for name in ("2", "3"):
        llm.finish(name, 6)
    found |= dict(engine.step())
    assert {key: found[key].spans for key in found} == dict.fromkeys(("ended", "went on", "begun since"), ((0, 0, 6),))


@pytest.mark.parametrize("rolled_back", [(False, False), (True, True), (True, False), (False, True)])
def test_workers_of_an_engine_that_rolled_back_are_told_apart(
    rolled_back: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them: the engine serves the version before. Some: it serves a mixture."""
    replies = {
        WorkerMethods.slipstream_apply: [None, None],
        WorkerMethods.slipstream_swapped: [[0.5, {"1": 3}, undone] for undone in rolled_back],
        WorkerMethods.slipstream_prepare: [None, None],
        WorkerMethods.slipstream_prepared: ["", "a newer version is published"],
    }

    def call(llm: Any, method: Any, *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(["done" if reply is None else reply for reply in replies[method]])
        return future

    monkeypatch.setattr(weights, "call_workers_nowait", call)
    served = object.__new__(weights.VllmWeights)
    served._llm, served._blocking = None, False
    served.prepare({"version": 1})
    with pytest.raises(Superseded, match="a newer version is published"):
        served.prepared()
    counts = served.apply()
    if not any(rolled_back):
        assert counts() == {"1": 3} and served.pause_s() == 0.5
        return
    with pytest.raises(RolledBack if all(rolled_back) else UserError) as caught:
        counts()
    assert isinstance(caught.value, RolledBack) == all(rolled_back)


def test_a_worker_returns_as_data_that_it_serves_the_version_before() -> None:
    """vLLM turns exceptions of its workers into text."""

    def fail(error: Exception) -> Any:
        raise error

    worker: Any = WorkerMethods()
    worker._slipstream_tokens = SimpleNamespace(count=lambda: lambda: {"1": 3}, forget_finished=lambda: None)
    worker._slipstream = SimpleNamespace(
        prepared=lambda: fail(Superseded("a newer version is published")), applied=lambda: True, pause_s=lambda: 0.5,
        apply=lambda: fail(RolledBack("other values")),
    )  # fmt: skip
    assert worker.slipstream_prepared() == "a newer version is published"
    worker.slipstream_apply()
    assert worker.slipstream_swapped() == [0.5, {"1": 3}, True]
    worker._slipstream.prepared, worker._slipstream.apply = lambda: False, lambda: None
    assert worker.slipstream_prepared() is None
    worker.slipstream_apply()
    assert worker.slipstream_swapped() == [0.5, {"1": 3}, False]


def test_a_request_that_vllm_refuses_fails_alone(core: tuple[Any, Core]) -> None:
    engine, llm = core
    too_many = Sampling(max_tokens=9, top_k=21, record_sampling_mask=True)
    for draining in (False, True):
        with pytest.raises(
            GenerationError, match=r"at most 20 tokens .* top_k is 21; .* generator.engine_args.max_logprobs"
        ):
            engine.submit("refused", [5, 6, 7], too_many)
        engine.submit(draining, [5, 6, 7], Sampling(max_tokens=9, top_k=21))
        engine.draining = True
    llm.refuses = True
    with pytest.raises(GenerationError, match="refuses the request: too much of something"):
        engine._start(engine._waiting[0])
    engine.draining = False
    answers = dict(engine.step())
    assert answers.keys() == {False, True} and all(isinstance(a, GenerationError) for a in answers.values())
    llm.refuses = False
    engine.submit("next", [5, 6, 7], Sampling(max_tokens=9))
    llm.finish(next(iter(engine._requests)), 9)
    assert dict(engine.step())["next"].spans == ((0, 0, 9),) and not engine.busy


def test_any_seed_is_mapped_to_a_valid_seed_of_vllm() -> None:
    from slipstream.generators.vllm.requests import VllmRequest

    def seed(asked: int) -> int:
        request = VllmRequest("key", (5, 6), Sampling(seed=asked))
        return int(request.parameters(256, [], seeded=True)["seed"])

    assert seed(2**70 + 3) == seed(3) == 3 and seed(2**63 - 1) == 2**63 - 1 and 0 <= seed(-5) < 2**63


@pytest.mark.parametrize(
    ("how", "fits", "own_process"),
    [
        ("recompute", False, False),
        ("continue", False, False),
        ("retry", False, False),
        ("continue", True, False),
        ("recompute", True, True),
        ("retry", True, False),
    ],
)
def test_completions_are_exact_across_sleep(
    how: str, fits: bool, own_process: bool, patient: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences have exact records after two turns of the trainer, one without and one with new weights.

    If the trainer's steps fit beside the engine, the engine only pauses to receive the weights, and sequences that
    `continue` keep keys and values of the old ones. Once vLLM's core has its own process, as on a GPU. Each such start
    imports vLLM in two processes.
    """
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", str(int(own_process)))

    async def main() -> None:
        flags = ["--sync.placement=colocated", f"--sync.in_flight={how}", "--sync.verify=full"]
        pools = await Cluster.start(config_of(patient, *flags), tmp_path)
        trainer, draw = changing(pools), pools.generator.generate
        try:
            await pools.link.connect(0)
            assert pools._colocation
            pools._colocation._fits = fits
            if fits:
                await trainer.onload()
            await trainer.store(tmp_path / "0")
            prompts = [[5, 6, 7 + i] for i in range(8)]
            running: list[Any] = await in_flight(pools.generator, prompts, Sampling(max_tokens=LONG))
            async with pools.trainer_turn(publishes=False):
                drawn = await pools.generator.longest_in_flight()
            async with pools.trainer_turn(publishes=True):
                await trainer.change(1)
                published = asyncio.get_running_loop().create_future()
                if fits:  # those in flight may have ended by now
                    running += [asyncio.ensure_future(drawn_until(published, pools.generator, prompts[:2], LONG))]
                    while not await pools.generator.longest_in_flight():
                        await asyncio.sleep(0.001)
                await pools.link.publish(1)
                published.set_result(None)
                await trainer.store(tmp_path / "1")
            completions = [*await asyncio.gather(*running[:8]), *itertools.chain(*await asyncio.gather(*running[8:]))]
            drawn = 0 if fits else drawn
            assert any(c.versions[1] == 1 and len(c.token_ids) > drawn for c in completions)
            assert any(c.versions == (0, 1) for c in completions) == (how != "retry")
            differences = []
            for c in completions:
                for span in c.spans:
                    if fits and how == "continue" and span.start:
                        wanted = logprobs_of(tmp_path / str(span.version), c) - torch.tensor(c.logprobs)
                        differences.append(float(wanted[span.start : span.end].abs().max()))
                    else:
                        assert_drawn_by(tmp_path / str(span.version), c, span.start, span.end)
            assert not differences or max(differences) > 10 * BOUND, "keys and values were recomputed"
            assert (await draw([5, 6, 7], Sampling(max_tokens=20))).versions == (1, 1)
        finally:
            await pools.close()

    asyncio.run(main())


def test_packed_experts_of_vllm_are_refused_by_name(tmp_path: Path) -> None:
    """As on CPUs; a plain stack of experts is written in place."""
    moe = tmp_path / "moe"
    build_model("qwen3_moe", head_dim=32, eos_token_id=1, pad_token_id=0).save_pretrained(moe)
    build_tokenizer().save_pretrained(moe)

    async def main() -> None:
        pools = await Cluster.start(config_of(moe, "--sync.verify=full", "--algorithm.replay_routing=false"), tmp_path)
        try:
            with pytest.raises(Exception, match=r"experts.* different layout|mlp.experts.gate_up_proj is"):
                await pools.link.connect(0)
        finally:
            await pools.close()

    asyncio.run(main())


REWARDED = """
from slipstream.environments.base import Task

class Sums:
    train = test = [Task(str(i), f"{i % 10} + 1 =") for i in range(20)]

    async def rollout(self, task, policy):
        completion = await policy.sample(task.prompt)
        return float(sum(completion.token_ids) % 7)
"""


def test_a_run_learns_with_vllm_from_the_command_line(model: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    (tmp_path / "rewarded.py").write_text(REWARDED)
    (tmp_path / "run.toml").write_text(
        f"model.path = {json.dumps(str(model))}\ngenerator.engine = 'vllm'\n"
        f"environment.name = {json.dumps(str(tmp_path / 'rewarded.py') + ':Sums')}\n"
        "loop = { steps = 4, max_lag = 2 }\nsampling.max_tokens = 8\nevaluation.tasks = 8\ncheckpoint.every = 2\n"
        "sync.in_flight = 'recompute'\ntrainer.learning_rate = 1e-3\n"
    )
    command = [sys.executable, "-m", "slipstream.cli", "train", str(tmp_path / "run.toml"), "--run.dir", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["steps"] == 4 and summary["sync"]["publishes"] == 4 and summary["lag"]["max"] <= 2
    metrics = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert metrics[0]["policy/mismatch_kl"] < 1e-9, "vLLM's log-probabilities are the trainer's"
    start, end = (load_file(path / "model.safetensors") for path in (model, directory / "policy"))
    assert any(not torch.equal(end[name], start[name]) for name in start)


def test_a_failed_start_of_vllm_is_an_error_of_one_line(model: Path, tmp_path: Path) -> None:
    for flags, said in (
        (["--generator.max_model_len=100000"], "does not start.*100000"),
        (['--generator.engine_args.hf_overrides="text"'], "does not start.*hf_overrides"),
        (["--generator.tensor_parallel_size=2"], "tensor_parallel_size = 2, but there are 0 GPUs"),
    ):
        with pytest.raises(Exception, match=said):
            asyncio.run(Cluster.start(config_of(model, *flags), tmp_path))


def test_the_transfer_description_matches_the_vllm_release() -> None:
    """For the installed vLLM and for 0.25; a release with other fields is refused."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    class Told:
        def __init__(self, *names: str) -> None:
            self.__dataclass_fields__ = dict.fromkeys(names)

    address = {"master_address": "here", "master_port": 1, "world_size": 2, "rank_offset": 1}
    update = {"names": ["w"], "shapes": [[2, 3]], "dtype_names": ["bfloat16"]}
    engine = NCCLWeightTransferEngine
    first, later = packed_options(engine, address, update)
    infos = engine.init_info_cls(**first), engine.update_info_cls(**later)
    assert [getattr(info, "packed", None) for info in infos] in ([True, None], [None, True])
    assert packed_options(SimpleNamespace(init_info_cls=Told(), update_info_cls=Told("packed")), {}, {"names": []}) == [
        {}, {"names": [], "packed": True}
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r'use sync.link = "nccl"$'):
        packed_options(SimpleNamespace(init_info_cls=Told(), update_info_cls=Told()), {}, {})
    opened, send = import_transfer()
    assert callable(opened) and callable(send)


def test_vllm_opens_the_port_reserved_for_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By vLLM's own rendezvous, the port is reserved until then, and a receiver meets the trainer through its gate."""
    from vllm.distributed.utils import StatelessProcessGroup

    def opened(address: dict[str, Any], rank: int = 0) -> Any:
        return StatelessProcessGroup.create(address["master_address"], address["master_port"], rank, 2)

    def join(worker: SimpleNamespace, address: dict[str, Any]) -> None:
        worker.group = opened(address, address["rank_offset"])

    monkeypatch.setattr(nccl_direct, "import_transfer", lambda: (opened, None))
    monkeypatch.setattr(nccl_direct, "packed_options", lambda engine, *options: options)
    config = load_config(None, ["--model.path=m", "--environment.name=e"])
    sender = nccl_direct.NcclDirectSender({}, config, tmp_path, 1)
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((nccl_direct.LOOPBACK, sender._port))
    info, worker = sender.connection_info(), SimpleNamespace(weight_transfer_engine=None)
    worker.init_weight_transfer_engine = partial(join, worker)
    receiver = nccl_direct.NcclDirectReceiver(info, worker, 1)
    trainer = sender._group.result(60)
    assert trainer.store.port == sender._port != worker.group.store.port
    trainer.send_obj({"met": True}, 1)
    assert worker.group.recv_obj(0) == {"met": True}
    sender.check_connection()
    receiver.close()
    sender.close()
