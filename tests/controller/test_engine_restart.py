"""Engines that are restarted on the files of each version."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.config.loading import load_config
from slipstream.config.schema import Config, ConfigError
from slipstream.controller import engine_restart as restart
from slipstream.controller.engine_restart import RestartPublisher
from slipstream.controller.launch import Cluster
from slipstream.generators import pool
from slipstream.generators.base import EngineWorker
from slipstream.generators.pool import EngineReplica
from slipstream.rollout import Sampling
from slipstream.runtime.worker import WorkerDied
from slipstream.runtime.worker_process import WorkerProcess
from tests.conftest import in_flight
from tests.processes import changing, lives, module_for_processes

TRAINER = "slipstream.tools.verify:PerturbingTrainer"


@pytest.mark.parametrize(("how", "keep"), [("retry", 0), ("drain", 2)])
def test_engines_restart_on_each_version(how: str, keep: int, patient: Path, tmp_path: Path) -> None:
    """Sequences in flight are sampled again or finished first, with the version that sampled them; the newest
    `sync.keep_versions` versions are kept."""
    from transformers import AutoModelForCausalLM

    flags = [f"--sync.in_flight={how}", f"--sync.keep_versions={keep}", "--trainer.threads=1", "--generator.threads=1"]
    named = [f"--model.path={patient}", "--environment.name=addition", f"--trainer.kind={TRAINER}"]
    config = load_config(None, [*named, *flags, "--sync.link=checkpoint", "--sync.restart=true"])

    async def main() -> None:
        pools = await Cluster.start(config, tmp_path)
        trainer, sampling = changing(pools), Sampling(max_tokens=600)
        try:
            await pools.link.connect(0)
            prompts, longer = [[5, 6, 7 + i] for i in range(4)], Sampling(max_tokens=1800 if how == "retry" else 600)
            running = await in_flight(pools.generator, prompts, longer, tokens=5)
            tokens = (await pools.generator.stats())["tokens"]
            await trainer.change(1)
            await pools.link.publish(1)
            await trainer.store(tmp_path / "1")
            for c in await asyncio.gather(*running):
                assert c.versions == ((1, 1) if how == "retry" else (0, 0))
            drawn = await pools.generator.generate([5, 6, 7], sampling)
            assert drawn.versions == (1, 1) and pools.generator.version == 1
            assert (await pools.generator.stats())["tokens"] > tokens
            model = AutoModelForCausalLM.from_pretrained(tmp_path / "1")
            with torch.no_grad():
                logits = model(torch.tensor([drawn.prompt_ids + drawn.token_ids[:-1]])).logits[0, 2:]
            wanted = logits.log_softmax(-1).gather(-1, torch.tensor(drawn.token_ids)[:, None])[:, 0]
            assert (wanted - torch.tensor(drawn.logprobs)).abs().max() < 1e-4
            files = sorted(path.name for path in (tmp_path / "weights").iterdir())
            assert files == ["version_0", "version_1"][-max(1, keep) :]
        finally:
            await pools.close()
        assert (tmp_path / "weights").exists() == bool(keep)

    asyncio.run(main())


def test_kept_versions_remain_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two versions before that of the checkpoint; later versions and incomplete files are removed.
    Files of a link that does not restart engines count as versions, too."""
    flags = ["--sync.link=checkpoint", "--sync.restart=true", "--sync.in_flight=retry", "--sync.keep_versions=3"]
    config = load_config(None, ["--model.path=m", "--environment.name=e", *flags])
    monkeypatch.setattr(restart, "save_tokenizer", lambda path, target: None)

    class Trainer:
        async def export(self, path: Path) -> None:
            path.mkdir(parents=True)
            (path / "model").write_text(f"of the resumed run, {path.name}")

    class Generator:
        process, pending_requests, version, track = SimpleNamespace(), 0, 0, "engine 0"
        serving = asyncio.Event()

        async def replace(self, config: Config) -> Any:
            self.worker = SimpleNamespace(set_version=lambda version: asyncio.sleep(0))
            return lambda: asyncio.sleep(0)

        async def wait_for(self, call: Any, doing: str, limit: float) -> Any:
            return await call

    def left() -> list[str]:
        return sorted(path.name for path in (tmp_path / "weights").iterdir())

    async def main() -> None:
        generators: Any = [Generator()]
        trainer: Any = Trainer()
        link = RestartPublisher(trainer, pool.GeneratorPool(generators), config, tmp_path)
        for name in ("version_4", "version_9", "version_10", "version_11", "version_12", "version_12.partial"):
            (tmp_path / "weights" / name).mkdir(parents=True)
            (tmp_path / "weights" / name / "model").write_text("of the earlier run")
        for name in ("version_8.safetensors", "version_11.safetensors", "version_11.partial"):
            (tmp_path / "weights" / name).write_bytes(b"")
        await link.connect(11)
        assert left() == ["version_10", "version_11", "version_9"]
        texts = [(tmp_path / "weights" / name / "model").read_text() for name in left()]
        assert texts == ["of the earlier run", "of the resumed run, version_11.partial", "of the earlier run"]
        await link.publish(12)
        assert left() == ["version_10", "version_11", "version_12"]
        (tmp_path / "weights" / "version_9.safetensors").write_bytes(b"")
        await link.publish(13)
        assert left() == ["version_11", "version_12", "version_13"]

    asyncio.run(main())


ENDING = """
import asyncio
import time
from pathlib import Path

from slipstream.generators.generator_worker import GeneratorWorker

class Engine(GeneratorWorker):
    def __init__(self, seconds):
        self.seconds = seconds
    async def run(self):
        pass
    async def generate(self, prompt_ids, sampling):
        await asyncio.sleep(600)
    async def stats(self):
        return {}
    def close(self):
        time.sleep(self.seconds)
        (Path(__file__).parent / "ended").touch()
"""


def test_a_hung_engine_is_restarted(patient: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.runtime.worker_process.HEARTBEAT_S", 0.1)
    monkeypatch.setattr("slipstream.runtime.worker_process.HEARTBEAT_TIMEOUT_S", 2.0)
    monkeypatch.setattr("slipstream.runtime.process.TERMINATION_GRACE_S", 0.5)
    named = [f"--model.path={patient}", "--environment.name=addition", f"--trainer.kind={TRAINER}"]
    flags = ["--sync.in_flight=retry", "--trainer.threads=1", "--generator.threads=1"]
    config = load_config(None, [*named, *flags, "--sync.link=checkpoint", "--sync.restart=true"])

    async def main() -> None:
        pools = await Cluster.start(config, tmp_path)
        try:
            await pools.link.connect(0)
            (generator,) = pools.generator.generators
            await pools.generator.generate([5, 6, 7], Sampling(max_tokens=9))
            assert (await pools.generator.stats())["tokens"] == 9
            assert isinstance(generator.process, WorkerProcess) and generator.process.process
            os.kill(generator.process.process.pid, signal.SIGSTOP)
            async with asyncio.timeout(60):
                await pools.link.publish(1)
            drawn = await pools.generator.generate([5, 6, 7], Sampling(max_tokens=5))
            assert drawn.versions == (1, 1) and (await pools.generator.stats())["tokens"] == 14
        finally:
            await pools.close()

    asyncio.run(main())


@pytest.mark.parametrize("hangs", [False, True])
def test_an_engine_exits_or_is_killed(hangs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its child processes, before its successor starts; pending calls fail at once."""
    monkeypatch.setattr(pool, "STOP_TIMEOUT_S", 1.0 if hangs else 60.0)

    async def main(folder: Path) -> None:
        began: list[bool] = []

        def begin(config: Config) -> tuple[WorkerProcess, Any]:
            process = WorkerProcess("engine")

            async def start() -> None:
                began.append(lives(first))
                await process.start(EngineWorker, "ending:Engine", 0.0)

            return process, start

        config: Any = None
        process = WorkerProcess("engine")
        await process.start(EngineWorker, "ending:Engine", 600.0 if hangs else 0.0)
        generator = EngineReplica(process, begin=begin)
        first = process.process.pid  # type: ignore[union-attr]
        waits = asyncio.ensure_future(generator.generate([5], Sampling()))
        await generator.stats()
        await (await generator.replace(config))()
        assert began == [False] and (folder / "ended").exists() != hangs
        with pytest.raises(WorkerDied):
            await waits
        assert generator.process is not process and await generator.stats() == {}
        generator.process.kill()

    with module_for_processes("ending", ENDING, tmp_path / "ending", monkeypatch) as folder:
        asyncio.run(main(folder))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--sync.in_flight=retry", "--sync.link=shared"],
            'sync.restart = true does not go with sync.link = "shared"; set it to "check',
        ),
        (
            ["--sync.link=checkpoint"],
            'sync.in_flight = "continue": sequences end with their engine; set it to "retry',
        ),
        (
            ["--sync.link=checkpoint", "--sync.in_flight=retry", "--sync.verify=full"],
            'sync.verify = "full": engines serve the files that they load, and no checksums are compared; leave it out',
        ),
    ],
)
def test_incompatible_options_are_refused(flags: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["--model.path=m", "--environment.name=e", "--sync.restart=true", *flags])
    assert said in str(caught.value)
