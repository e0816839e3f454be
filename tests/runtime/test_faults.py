"""Every death, hang or wrong value during a publish ends soon, with a clear error and without leftover processes.

The module `faulty` wraps the real links with delays, errors and wrong values. Files in its folder control them, so that
a test knows the phase of the publish in which it kills a process.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from slipstream.config.loading import load_config
from slipstream.config.schema import SyncConfig
from slipstream.controller import weight_publisher as publish
from slipstream.controller.engine_calls import PublishError
from slipstream.controller.launch import Cluster
from slipstream.controller.weight_publisher import WeightPublisher
from slipstream.generators.generator_worker import GeneratorWorker
from slipstream.generators.pool import EngineReplica, GeneratorPool
from slipstream.rollout import Completion, Sampling, VersionSpan
from slipstream.runtime.worker import WorkerDied, WorkerError, handle
from slipstream.runtime.worker_process import WorkerProcess
from slipstream.sync.nccl import NcclSender
from slipstream.sync.nccl_direct import NcclDirectSender
from slipstream.sync.shared import SharedSender
from slipstream.sync.update import RolledBack
from slipstream.trainers.base import TrainerWorker
from tests import warm
from tests.conftest import in_flight
from tests.processes import (
    ENDLESS,
    changing,
    descendants,
    lives,
    module_for_processes,
    output,
)

LIMIT = 120.0  # seconds in which every test must end
TRAINER = "slipstream.tools.verify:PerturbingTrainer"
FAULTY = """
import time
from pathlib import Path
from slipstream.sync.checkpoint import CheckpointReceiver, CheckpointSender
from slipstream.sync.nccl import NcclReceiver, NcclSender
from slipstream.sync.shared import SharedReceiver, SharedSender
from slipstream.tools.verify import PerturbingTrainer

HERE = Path(__file__).parent

def told(what):
    return (HERE / what).exists()

def wait_where(where):
    # If a test asked for a wait here, report that this point is reached, and wait for the test.
    while told(f"hold {where}"):
        (HERE / f"reached {where}").touch()
        time.sleep(0.01)

def slow(base):
    class Slow(base):
        if hasattr(base, "send"):
            def send(self, handle):
                wait_where("send")
                super().send(handle)
        else:
            def __init__(self, connection_info, shapes, rank, device):
                super().__init__(connection_info, shapes, rank, device)
                self.rank = rank
            def prepare(self, handle):
                wait_where(f"prepare {self.rank}")
                if told("raise"):
                    raise OSError("the cable is cut")
                weights = dict(super().prepare(handle))
                if told(f"lie {self.rank}"):
                    name, _, size = (HERE / f"lie {self.rank}").read_text().partition(" by ")
                    weights[name] = weights[name][()].clone()
                    weights[name].view(-1)[3] += float(size or 1e-6)
                return weights
    return Slow

class Trainer(PerturbingTrainer):
    async def checksums(self, names):
        wait_where("checksums")
        return await super().checksums(names)

class Shared: Sender, Receiver = slow(SharedSender), slow(SharedReceiver)
class Nccl: Sender, Receiver = slow(NcclSender), slow(NcclReceiver)
class Checkpoint: Sender, Receiver = slow(CheckpointSender), slow(CheckpointReceiver)
"""


class Orders:
    """The files through which a test and the links of `FAULTY` communicate."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def hold(self, where: str) -> None:
        (self._folder / f"hold {where}").touch()

    def go(self, where: str) -> None:
        (self._folder / f"hold {where}").unlink()

    async def reached(self, where: str) -> None:
        while not (self._folder / f"reached {where}").exists():
            await asyncio.sleep(0.01)

    def give(self, order: str, text: str = "") -> None:
        (self._folder / order).write_text(text)

    def withdraw(self, order: str) -> None:
        (self._folder / order).unlink()


@pytest.fixture
def orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Orders]:
    """Write the module `faulty`, which processes can import. Returns the controls of its links."""
    with module_for_processes("faulty_links", FAULTY, tmp_path / "faulty", monkeypatch) as folder:
        yield Orders(folder)


def pid_of(process: Any) -> int:
    pid: int = process.process.pid
    return pid


@asynccontextmanager
async def started(
    model: Path, folder: Path, link: str, *flags: str, close: float = 20.0, trainer: str = TRAINER
) -> AsyncIterator[Cluster]:
    """The processes of a run. Asserts that closing takes less than `close` seconds and leaves no process."""
    named = ["--environment.name=addition", f"--trainer.kind={trainer}", f"--sync.link={link}"]
    threads = ["--trainer.threads=1", "--generator.threads=1"]
    config = load_config(None, [f"--model.path={model}", *named, *threads, *flags])
    others = descendants(os.getpid())  # such as servers shared with other tests
    async with asyncio.timeout(LIMIT):
        pools = await Cluster.start(config, folder)
    processes = descendants(os.getpid()) - others
    try:
        trainers = getattr(pools.trainer_process, "processes", [pools.trainer_process])
        assert {
            pid_of(process) for process in (*trainers, *(g.process for g in pools.generator.generators))
        } <= processes
        async with asyncio.timeout(LIMIT):
            yield pools
    finally:
        processes |= descendants(os.getpid()) - others
        async with asyncio.timeout(LIMIT):
            began = time.monotonic()
            await pools.close()
            took = time.monotonic() - began
    while time.monotonic() < began + took + 5 and any(map(lives, processes)):
        await asyncio.sleep(0.01)  # a killed process ends a little later
    assert not {process for process in processes if lives(process)}
    assert took < close, f"closing took {took:.1f} s"


@pytest.mark.parametrize(
    ("link", "generators", "joined"),
    [("Shared", 1, True), ("Nccl", 2, False)],
    ids=["shared", "nccl, one of two before it joins"],
)
def test_a_dead_generator_is_named_in_the_error_of_the_publish(
    link: str, generators: int, joined: bool, tiny: Path, tmp_path: Path, orders: Orders
) -> None:
    """It is killed while it prepares, when trainer and other generator wait for it in a collective operation."""
    last = generators - 1

    async def main() -> None:
        async with started(tiny, tmp_path, f"faulty_links:{link}", f"--generator.replicas={generators}") as pools:
            if joined:
                await pools.link.connect(0)
                await changing(pools).change(1)
            orders.hold(f"prepare {generators}")
            publishing = asyncio.ensure_future(pools.link.publish(1) if joined else pools.link.connect(0))
            await orders.reached(f"prepare {generators}")
            await asyncio.sleep(0.2)  # until the others wait for it
            os.kill(pid_of(pools.generator.generators[last].process), signal.SIGKILL)
            with pytest.raises(WorkerDied, match=rf"^generator {last} died \(log: .*generator_{last}.log\)"):
                await publishing
            if not joined:  # the trainer waits for the dead generator, and would have 10 seconds to end
                await pools.trainer_process.stop(grace=1.0)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("link", "where"), [("Shared", "prepare 2"), ("Checkpoint", "prepare 1"), ("Nccl", "prepare 2")]
)
def test_a_publish_succeeds_on_the_other_generators_if_one_dies(
    link: str, where: str, tiny: Path, tmp_path: Path, orders: Orders
) -> None:
    """The publish names the dead generator. The others sample its requests and serve the published version."""
    victim = int(where[-1]) - 1

    async def main() -> None:
        async with started(tiny, tmp_path, f"faulty_links:{link}", "--generator.replicas=3") as pools:
            draw, sampling = pools.generator.generate, Sampling(max_tokens=30)
            await pools.link.connect(0)
            before = await draw([5, 6, 7], sampling)
            running = [asyncio.ensure_future(draw([5, 6, 7 + i], Sampling(max_tokens=200))) for i in range(12)]
            await changing(pools).change(1)
            orders.hold(where)
            publishing = asyncio.ensure_future(pools.link.publish(1))
            await orders.reached(where)
            os.kill(pid_of(pools.generator.generators[victim].process), signal.SIGKILL)
            orders.go(where)
            (lost,) = (await publishing).engines_lost
            assert re.match(rf"generator {victim} died \(log: .*\); 2 of 3 generators are left$", lost)
            assert [len(c.token_ids) > 0 for c in await asyncio.gather(*running)] == [True] * 12
            await changing(pools).change(2)
            assert (await pools.link.publish(2, "full")).engines_lost == ()
            after = {tuple((await g.generate([5, 6, 7], sampling)).logprobs) for g in pools.generator.alive}
            assert len(after) == 1 and tuple(before.logprobs) not in after and len(pools.generator.alive) == 2
            assert pools.generator.version == 2

    asyncio.run(main())


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process is detected within 2 to 3 seconds."""
    monkeypatch.setattr("slipstream.runtime.worker_process.HEARTBEAT_S", 0.1)
    monkeypatch.setattr("slipstream.runtime.worker_process.HEARTBEAT_TIMEOUT_S", 2.0)
    monkeypatch.setattr("slipstream.runtime.process.TERMINATION_GRACE_S", 0.5)


@pytest.mark.parametrize("link", ["shared", "nccl"])
def test_a_hung_generator_is_named_and_terminated(link: str, tiny: Path, tmp_path: Path, impatient: None) -> None:
    """A stopped process is alive and silent. In a collective transfer no other generator is blamed."""

    async def main() -> None:
        async with started(tiny, tmp_path, link, "--generator.replicas=2") as pools:
            await pools.link.connect(0)
            await changing(pools).change(1)
            pid = pid_of(pools.generator.generators[1].process)
            os.kill(pid, signal.SIGSTOP)
            (lost,) = (await pools.link.publish(1)).engines_lost
            said = (
                r"generator {} has been silent for [\d.]+ s, as if it were stopped, with pending calls: prepare for .*"
            )
            assert re.match(said.format(1) + "; 1 of 2 generators are left$", lost)
            completion = await pools.generator.generate([5, 6, 7], Sampling(max_tokens=8))
            assert completion.versions == (1, 1)
            os.kill(pid_of(pools.generator.generators[0].process), signal.SIGSTOP)
            with pytest.raises(WorkerDied, match=said.format(0)):
                await pools.link.publish(2)

    asyncio.run(main())


def test_a_trainer_that_waits_for_a_slow_generator_does_not_count_as_hung(
    tiny: Path, tmp_path: Path, orders: Orders, impatient: None
) -> None:
    """In a collective transfer it makes no progress until the generator, which has a time limit, takes part."""

    async def main() -> None:
        flags = ["--runtime.progress_timeout=5"]
        async with started(tiny, tmp_path, "faulty_links:Nccl", *flags, trainer="faulty_links:Trainer") as pools:
            await pools.link.connect(0)
            trainer = pools.trainer_process
            assert isinstance(trainer, WorkerProcess)
            orders.hold("prepare 1")
            publishing = asyncio.ensure_future(pools.link.publish(1))
            await orders.reached("prepare 1")
            last = trainer.heartbeats + 80
            while not trainer.dead and trainer.heartbeats < last:
                await asyncio.sleep(0.01)
            orders.go("prepare 1")
            assert (await publishing).engines_lost == ()
            # Calls without a transfer keep the time limit.
            orders.hold("checksums")
            with pytest.raises(
                WorkerDied,
                match=r"trainer has made no progress for .* with pending calls: (send, )?checksums(, release)? for",
            ):
                await pools.link.publish(2)

    asyncio.run(main())


def test_requests_of_a_hung_generator_move_to_another(patient: Path, tmp_path: Path, impatient: None) -> None:
    """Also outside of a publish: other generators sample its requests."""

    async def main() -> None:
        async with started(patient, tmp_path, "shared", "--generator.replicas=2") as pools:
            await pools.link.connect(0)
            drawing = await in_flight(pools.generator, [[5, 6, 7 + i] for i in range(4)], Sampling(max_tokens=400))
            still = pools.generator.generators[1]
            os.kill(pid_of(still.process), signal.SIGSTOP)
            assert [len(c.token_ids) for c in await asyncio.gather(*drawing)] == [400] * 4
            said = r"generator 1 has been silent for 2 s, .*, with pending calls: 2 x generate for .* \(log"
            assert re.match(said, str(still.process.dead)) and len(pools.generator.alive) == 1

    asyncio.run(main())


def test_a_generator_that_hangs_in_a_transfer_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the trainer's end the hang appears as an error of the trainer."""
    monkeypatch.setattr(publish, "find_link", lambda name: (NcclSender, None))
    monkeypatch.setattr(publish, "PROGRESS_TIMEOUT_S", 0.1)

    async def main(others: bool) -> None:
        called: list[str] = []
        loop, sent = asyncio.get_running_loop(), itertools.count()
        timed_out = WorkerError("Timed out waiting 60000ms", "RuntimeError", "")
        first = {"open_link": {"shapes": {}}}.get
        trainer = Recorded("trainer", called, lambda a: timed_out if a == "send" and not next(sent) else first(a))
        still = Recorded(
            "still", called, lambda a: loop.create_future() if a in ("prepare", "longest_in_flight") else None
        )
        slow = Recorded("slow", called, lambda a: loop.create_future() if a == "longest_in_flight" else None)
        well = Recorded("well", called)
        link, _ = link_of(trainer, still, *([well, slow] if others else []))
        link._connected, link._joined = True, list(link._members)
        slow.ticks = itertools.count()
        said = "still was silent in a transfer, which failed"
        async with asyncio.timeout(5):
            if others:
                assert (await link.publish(1)).engines_lost == (f"{said}; 2 of 3 generators are left",)
                assert "well swap" in called and not well.dead and not slow.dead
            else:
                with pytest.raises(WorkerDied, match=f"^{said}$"):
                    await link.publish(1)

    asyncio.run(main(others=True))
    asyncio.run(main(others=False))


@pytest.mark.parametrize("phase", ["connect", "prepare", "swap", "checksums"])
def test_every_phase_of_a_publish_has_a_time_limit(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for generators that make progress. Draining adds the time limit of a sequence."""
    for name in ("CONNECT_TIMEOUT_S", "CALL_TIMEOUT_S"):
        monkeypatch.setattr(publish, name, 0.1)
    said = {
        "connect": "connect", "prepare": "receive version 1", "swap": "swap in version 1",
        "checksums": "return the checksums of version 1",
    }  # fmt: skip

    async def main(drained: bool) -> None:
        called: list[str] = []
        loop = asyncio.get_running_loop()
        answers: dict[str, Any] = {"open_link": {"shapes": {}}, "checksums": {"w": 1}, phase: loop.create_future()}
        trainer = Recorded("trainer", called, {"checksums": {"w": 1}, "open_link": {"shapes": {}}}.get)
        link, _ = link_of(trainer, Recorded("engine", called, answers.get), verify="full")
        link._names, link._drain = ["w"], 600.0 * drained
        publishing = asyncio.ensure_future(link.connect(1) if phase == "connect" else link.publish(1))
        if drained:
            loop.call_later(0.5, answers[phase].set_result, (0.001, {"tokens": 0, "busy_s": 0}))
            assert (await publishing).engines_lost == ()
            return
        async with asyncio.timeout(10):
            with pytest.raises(WorkerDied, match=f"^engine did not {said[phase]} within 0.1 s$"):
                await publishing

    asyncio.run(main(drained=False))
    if phase == "swap":
        asyncio.run(main(drained=True))


def test_generators_that_fail_in_a_publish_or_died_before_it_are_removed_from_the_pool(tmp_path: Path) -> None:
    """After a failed swap the served weights are unknown. A failure of the trainer fails the publish."""

    async def main() -> None:
        broken = WorkerError("out of memory", "RuntimeError", "")
        for method in ("prepare", "swap"):
            called: list[str] = []
            bad = Recorded("bad", called, lambda asked, method=method: broken if asked == method else None)
            good, trainer = Recorded("good", called), Recorded("trainer", called)
            link, _ = link_of(trainer, good, bad)
            assert (await link.publish(1)).engines_lost == ("bad failed: out of memory; 1 of 2 generators are left",)
            assert bad.dead and not good.dead and "good swap" in called
            assert ("bad swap" in called) == (method == "swap")
            assert (await link.publish(2)).engines_lost == ()
            good.dead = WorkerDied("good died (log: x)\nwith its log")
            with pytest.raises(WorkerDied, match="good died"):
                await link.publish(3)

    asyncio.run(main())


def test_an_engine_whose_swap_fails_samples_no_more_tokens(tiny: Path) -> None:
    """Part of the new weights may be in place: the engine returns nothing until it is removed from the pool."""

    class Cut:
        """Weights that arrive in part."""

        def apply(self) -> None:
            next(service._engine.model.parameters()).data.zero_()
            raise RuntimeError("the cable is cut")

    async def main() -> None:
        config = load_config(None, [f"--model.path={tiny}", "--environment.name=addition", "--generator.threads=1"])
        nonlocal service
        service = GeneratorWorker(config)
        service._open_weights = lambda link, connection_info, rank: Cut()  # type: ignore[assignment, return-value]
        await service.connect({}, 1)
        running = asyncio.ensure_future(service.run())
        first = asyncio.ensure_future(service.generate([5, 6, 7], Sampling(max_tokens=200)))
        while service.progress < 3:
            await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="the cable is cut"):
            await service.swap(1)
        drawn = (await service.stats())["tokens"]
        second = asyncio.ensure_future(service.generate([5, 6, 7], Sampling(max_tokens=1)))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not first.done() and not second.done() and (await service.stats())["tokens"] == drawn
        for task in (first, second, running):
            task.cancel()

    service: Any = None
    asyncio.run(main())


def test_an_engine_whose_swap_is_rolled_back_goes_on_with_the_version_before(tiny: Path) -> None:
    class Undone:
        def apply(self) -> None:
            raise RolledBack("a tensor had other values")

    async def main() -> None:
        config = load_config(None, [f"--model.path={tiny}", "--environment.name=addition", "--generator.threads=1"])
        service = GeneratorWorker(config)
        service._open_weights = lambda link, connection_info, rank: Undone()  # type: ignore[assignment, return-value]
        await service.connect({}, 1)
        running = asyncio.ensure_future(service.run())
        first = asyncio.ensure_future(service.generate([5, 6, 7], Sampling(max_tokens=40, ignore_eos=True)))
        while service.progress < 3:
            await asyncio.sleep(0)
        assert await service.swap(1) is None
        assert (await first).spans == ((0, 0, 40),)
        running.cancel()

    asyncio.run(main())


@pytest.mark.parametrize("dies", [False, True])
def test_engines_with_a_partial_transfer_are_removed(dies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One engine fails; another waits for it in the transfer and holds part of the version. Both are removed from the
    pool at once, and the trainer, which is still in the transfer, receives no call."""
    monkeypatch.setattr(publish, "find_link", lambda name: (NcclDirectSender, None))

    async def main() -> None:
        called: list[str] = []
        broken, loop = WorkerError("NCCL error", "RuntimeError", ""), asyncio.get_running_loop()
        trainer = Recorded("trainer", called, lambda asked: loop.create_future() if asked == "send" else None)
        waits = Recorded("waits", called, lambda asked: loop.create_future() if asked == "swap" else None)
        fails = Recorded("fails", called, lambda asked: broken if asked == "swap" else None)
        done = Recorded("done", called)
        link, _ = link_of(trainer, done, waits, fails)
        link._connected, link._joined = True, list(link._members)
        if dies:
            loop.call_later(0.1, fails.terminate, "fails died")
        async with asyncio.timeout(5):
            with pytest.raises(WorkerDied if dies else WorkerError, match="fails died" if dies else "NCCL error"):
                await link.publish(1)
        assert done.dead and waits.dead and fails.dead and "trainer open_link" not in called

    asyncio.run(main())


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.timeout(150)
def test_a_dead_vllm_generator_is_named_in_the_error_of_the_publish(tmp_path: Path, orders: Orders) -> None:
    from tests.conftest import build_model, build_tokenizer

    model = tmp_path / "model"
    build_model("qwen3", head_dim=32, eos_token_id=1, pad_token_id=0).save_pretrained(model)
    build_tokenizer().save_pretrained(model)

    async def main() -> None:
        async with started(model, tmp_path, "faulty_links:Nccl", "--generator.engine=vllm") as pools:
            await pools.link.connect(0)
            await changing(pools).change(1)
            orders.hold("prepare 1")
            publishing = asyncio.ensure_future(pools.link.publish(1))
            await orders.reached("prepare 1")
            os.killpg(pid_of(pools.generator.generators[0].process), signal.SIGKILL)
            with pytest.raises(WorkerDied, match=r"^generator 0 died \(log: "):
                await publishing

    asyncio.run(main())


@pytest.mark.parametrize("joined", [True, False], ids=["in the transfer", "before the generator looks for it"])
def test_generators_serve_and_close_after_the_trainer_died(
    joined: bool, tiny: Path, tmp_path: Path, orders: Orders
) -> None:
    """The old version is still served; a thread that waits for the trainer does not delay the end of its process."""
    held = "send" if joined else "prepare 1"

    async def main() -> None:
        async with started(tiny, tmp_path, "faulty_links:Nccl", close=8.0) as pools:
            draw, sampling = pools.generator.generate, Sampling(max_tokens=120)
            if joined:
                await pools.link.connect(0)
                await changing(pools).change(1)
            orders.hold(held)
            publishing = asyncio.ensure_future(pools.link.publish(1) if joined else pools.link.connect(0))
            await orders.reached(held)
            running = await in_flight(pools.generator, [[5, 6, 7 + i] for i in range(4)], sampling, tokens=1)
            began = time.monotonic()
            pools.trainer_process.process.kill()  # type: ignore[union-attr]
            orders.go(held)
            with pytest.raises(WorkerDied, match=r"^trainer died \(log: .*trainer.log\)"):
                await publishing
            assert time.monotonic() - began < 10
            later = await asyncio.gather(*(draw([5, 6, 7 + i], sampling) for i in range(4)))
            for completion in (*await asyncio.gather(*running), *later):
                assert completion.versions == (0, 0) and completion.token_ids

    asyncio.run(main())


def test_a_link_error_or_wrong_checksum_fails_the_publish_and_the_next_one_succeeds(
    tiny: Path, tmp_path: Path, orders: Orders
) -> None:
    """The publish raises the receiver's error and the old version stays; a wrong value is named."""

    async def main() -> None:
        flags = ["--generator.replicas=2", "--sync.verify=full"]
        async with started(tiny, tmp_path, "faulty_links:Checkpoint", *flags) as pools:
            greedy = Sampling(temperature=0.0, max_tokens=30)

            async def drawn() -> list[tuple[tuple[int, int], tuple[int, ...]]]:
                """One completion of each generator."""
                both = await asyncio.gather(*(g.generate([5, 6, 7], greedy) for g in pools.generator.generators))
                return [(c.versions, c.token_ids) for c in both]

            await pools.link.connect(0)
            before = await drawn()
            await changing(pools).change(1)
            orders.give("raise")
            with pytest.raises(WorkerError, match=r"^the cable is cut\n"):
                await pools.link.publish(1)
            assert await drawn() == before and pools.generator.version == 0
            orders.withdraw("raise")
            await changing(pools).change(2)
            await pools.link.publish(1)
            after = await drawn()
            assert {versions for versions, _ in after} == {(1, 1)} and after[0] == after[1] != before[0]
            orders.give("lie 2", "model.layers.1.mlp.up_proj.weight")
            said = r"generator 1 serves model.layers.1.mlp.up_proj.weight with other values .* version 2; .*sync.link"
            (lost,) = (await pools.link.publish(2)).engines_lost
            assert re.match(f"{said}; 1 of 2 generators are left$", lost)
            with pytest.raises(WorkerDied, match=said):
                await pools.generator.generators[1].generate([5, 6, 7], greedy)
            assert (await pools.generator.generate([5, 6, 7], greedy)).versions == (2, 2)
            orders.give("lie 1", "model.layers.1.mlp.up_proj.weight")
            with pytest.raises(PublishError, match=said.replace("1 serves", "0 serves").replace("2;", "3;") + "$"):
                await pools.link.publish(3)

    asyncio.run(main())


def test_completions_of_wrong_weights_are_discarded(tiny: Path, tmp_path: Path, orders: Orders) -> None:
    """Engines sample while checksums are compared; completions finished meanwhile are held until the result."""

    async def main() -> None:
        flags = ["--generator.replicas=2", "--sync.verify=full", "--sync.in_flight=retry"]
        async with started(tiny, tmp_path, "faulty_links:Checkpoint", *flags, trainer="faulty_links:Trainer") as pools:
            good, bad = pools.generator.generators
            await pools.link.connect(0)
            await changing(pools).change(1)
            orders.give("lie 2", "model.layers.1.mlp.up_proj.weight by 99")
            orders.hold("checksums")
            publishing = asyncio.ensure_future(pools.link.publish(1))
            await orders.reached("checksums")
            before, sampling = [await g.stats() for g in (good, bad)], Sampling(max_tokens=8)
            drawing = [asyncio.ensure_future(pools.generator.generate([5, 6, 7 + i], sampling)) for i in range(8)]
            while not all(
                [
                    (await g.worker.stats())["tokens"] >= b["tokens"] + 20
                    for g, b in zip((good, bad), before, strict=True)
                ]
            ):
                await asyncio.sleep(0.001)
            assert not any(one.done() for one in drawing), "drawn, and not yet known to be right"
            orders.go("checksums")
            assert len((await publishing).engines_lost) == 1 and bad.process.dead and not good.process.dead
            completions = await asyncio.gather(*drawing)
            for completion, scores in zip(completions, await pools.trainer.score(completions), strict=True):
                assert completion.versions == (1, 1) and completion.logprobs == pytest.approx(scores, abs=1e-5)

    asyncio.run(main())


def test_completions_are_discarded_if_published_checksums_are_unknown(tmp_path: Path) -> None:
    """The trainer fails to return its checksums, so tokens sampled since the swap can't be verified."""

    async def main() -> None:
        called: list[str] = []
        broken = WorkerError("out of memory", "RuntimeError", "")
        drawn = {v: Completion((5,), (6,), (0.0,), (VersionSpan(v, 0, 1),), "length") for v in (0, 1)}
        sums: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        trainer = Recorded("trainer", called, lambda asked: sums if asked == "checksums" else None)
        answers: dict[str, Any] = {"generate": drawn[0], "checksums": {"w": 1}}
        engine = Recorded("engine", called, answers.get)
        link, _ = link_of(trainer, engine, verify="full")
        link._names = ["w"]
        pool = link._pool
        publishing = asyncio.ensure_future(link.publish(1))
        while "engine checksums" not in called:
            await asyncio.sleep(0)
        assert await pool.generate([5], Sampling()) is drawn[0], "an older version was found to be right long ago"
        answers["generate"] = drawn[1]
        drawing = asyncio.ensure_future(pool.generate([5], Sampling()))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not drawing.done()
        sums.set_exception(broken)
        with pytest.raises(WorkerError, match="out of memory"):
            await publishing
        with pytest.raises(WorkerDied, match=r"^engine was removed from the pool: out of memory$"):
            await drawing

    asyncio.run(main())


def test_remaining_members_reconnect_after_a_member_left_the_group(tiny: Path, tmp_path: Path, orders: Orders) -> None:
    """A wrong value is found after the transfer; the other generators receive the next publish."""

    async def main() -> None:
        flags = ["--generator.replicas=3", "--sync.verify=full"]
        async with started(tiny, tmp_path, "faulty_links:Nccl", *flags) as pools:
            await pools.link.connect(0)
            orders.give("lie 2", "model.layers.1.mlp.up_proj.weight")
            (lost,) = (await pools.link.publish(1)).engines_lost
            assert lost.startswith("generator 1 serves model.layers.1.mlp.up_proj.weight with other values")
            orders.withdraw("lie 2")
            await changing(pools).change(1)
            async with asyncio.timeout(30):  # the removed member is not waited for
                assert (await pools.link.publish(2)).engines_lost == ()
            drawn = [await g.generate([5, 6, 7], Sampling(max_tokens=30)) for g in pools.generator.alive]
            assert [c.versions for c in drawn] == [(2, 2)] * 2 and drawn[0].logprobs == drawn[1].logprobs

    asyncio.run(main())


def test_the_next_publish_reconnects_a_broken_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although all members are alive; an intact group is kept."""
    monkeypatch.setattr(publish, "find_link", lambda name: (NcclSender, None))

    async def main() -> None:
        called: list[str] = []
        answers: dict[str, Any] = {"open_link": {"shapes": {}}}
        link, _ = link_of(Recorded("trainer", called, answers.get), Recorded("one", called, answers.get))
        await link.connect(0)
        await link.publish(1)
        assert called.count("one connect") == 1
        answers["prepare"] = WorkerError("the cable is cut", "OSError", "")
        with pytest.raises(WorkerError, match="the cable is cut"):
            await link.publish(2)
        del answers["prepare"]
        called.clear()
        await link.publish(2)
        assert called[:3] == ["trainer open_link", "one connect", "trainer stage"]

    asyncio.run(main())


def test_a_late_error_of_an_interrupted_transfer_does_not_fail_the_next_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """The transfer to the survivor may fail while the next one runs, after the trainer has closed the connection."""
    monkeypatch.setattr(publish, "find_link", lambda name: (NcclSender, None))

    async def main() -> None:
        called: list[str] = []
        sending, receiving = (asyncio.get_running_loop().create_future() for _ in range(2))  # of the first try

        def trainer(method: str) -> Any:
            first = called.count("trainer send") == 1
            return {"open_link": {"shapes": {}}, "send": sending if first else None}.get(method)

        def one(method: str) -> Any:
            if method != "prepare" or called.count("one prepare") == 1:
                return receiving if method == "prepare" else None
            if not receiving.done():
                receiving.set_exception(WorkerError("Connection closed by peer", "RuntimeError", ""))
            return None

        two = Recorded("two", called, lambda method: two.terminate("two died") if method == "prepare" else None)
        link, _ = link_of(Recorded("trainer", called, trainer), Recorded("one", called, one), two)
        link._connected = True
        stats = await link.publish(1)
        assert called.count("one prepare") == 2 and [lost.split(";")[0] for lost in stats.engines_lost] == ["two died"]

    asyncio.run(asyncio.wait_for(main(), 20))


@pytest.mark.parametrize("sender", [NcclDirectSender, NcclSender])
def test_generators_do_not_wait_for_a_trainer_that_fails_to_connect(
    monkeypatch: pytest.MonkeyPatch, sender: type[Any]
) -> None:
    """The trainer's error is raised within seconds; generators wait for a trainer that connects."""
    monkeypatch.setattr(publish, "find_link", lambda name: (sender, None))
    monkeypatch.setattr(publish, "CONNECT_POLL_S", 0.1)

    async def main() -> None:
        called: list[str] = []
        waits: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        answers: dict[str, Any] = {"open_link": {"shapes": {}}, "connect": waits}
        link, _ = link_of(Recorded("trainer", called, answers.get), Recorded("one", called, answers.get))
        connecting = asyncio.ensure_future(link.connect(0))
        await asyncio.sleep(0.5)
        assert not connecting.done() and called.count("trainer check_connection") > 1
        answers["check_connection"] = WorkerError("address already in use", "RuntimeError", "")
        with pytest.raises(WorkerError, match="address already in use"):
            await asyncio.wait_for(connecting, 5)
        assert "trainer stage" not in called

    asyncio.run(main())


class Recorded:
    """A transport that answers at once and records the order of calls; `answer` may return a future instead."""

    def __init__(self, name: str, called: list[str], answer: Callable[[str], Any] = lambda method: None) -> None:
        self.name, self._called, self._answer = name, called, answer
        self.dead: WorkerDied | None = None
        self.dying = False
        self.ticks: Iterator[int] = itertools.repeat(7)

    @property
    def heartbeats(self) -> int:
        return next(self.ticks)

    def terminate(self, why: str) -> WorkerDied:
        self.dead = self.dead or WorkerDied(why)
        return self.dead

    def call(self, method: str, arguments: tuple[Any, ...], large: bool = False) -> asyncio.Future[Any]:
        self._called.append(f"{self.name} {method}")
        answer = self._answer(method)
        if isinstance(answer, asyncio.Future):
            return answer
        future = asyncio.get_running_loop().create_future()
        if isinstance(answer, Exception):
            future.set_exception(answer)
        elif method == "swap":
            future.set_result((0.001, {"tokens": 0, "busy_s": 0}))
        else:
            future.set_result({"version": 1} if method == "stage" else answer)
        return future


def link_of(trainer: Recorded, *generators: Recorded, verify: Any = "off") -> tuple[WeightPublisher, TrainerWorker]:
    ends: Any = [EngineReplica(generator) for generator in generators]  # type: ignore[arg-type]
    process: Any = trainer
    link = WeightPublisher(process, GeneratorPool(ends), SyncConfig(link="shared", verify=verify))
    return link, handle(TrainerWorker, trainer)


@pytest.mark.parametrize("trainer_free_after_send", [True, False])
def test_the_trainer_is_freed_after_the_send_or_after_the_swap(
    monkeypatch: pytest.MonkeyPatch, trainer_free_after_send: bool
) -> None:
    """After the send if the link needs the weights no longer, else after all swaps. Its checksums are computed before
    that, so the next step can't change them; a version can't be sent again."""
    monkeypatch.setattr(
        publish, "find_link", lambda name: (NcclSender if trainer_free_after_send else SharedSender, None)
    )

    async def main() -> None:
        called: list[str] = []
        swapped: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        trainer = Recorded("trainer", called, {"checksums": {"w": 1}}.get)
        engine = Recorded("engine", called, {"swap": swapped, "checksums": {"w": 1}}.get)
        link, _ = link_of(trainer, engine, verify="full")
        link._names, link._joined = ["w"], list(link._members)
        free = asyncio.Event()
        publishing = asyncio.ensure_future(link.publish(1, free=free))
        while "engine swap" not in called:
            await asyncio.sleep(0)
        assert free.is_set() is trainer_free_after_send
        assert called[:3] == ["trainer stage", "trainer send", "trainer checksums"] and not publishing.done()
        if not trainer_free_after_send:
            swapped.set_result((0.001, {"tokens": 0, "busy_s": 0}))
            assert (await publishing).engines_lost == () and free.is_set()
            return
        swapped.set_exception(WorkerError("out of memory", "RuntimeError", ""))
        with pytest.raises(WorkerError, match="out of memory"):
            await publishing
        assert called.count("trainer stage") == 1

    asyncio.run(main())


def test_a_publish_calls_trainer_and_engines_in_order() -> None:
    """All engines prepare before the first one swaps, and a later step reaches the trainer after `release`."""

    async def main() -> None:
        called: list[str] = []
        slow: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        first = Recorded("one", called, lambda method: slow if method == "prepare" else None)
        link, trainer = link_of(Recorded("trainer", called), first, Recorded("two", called))
        publishing = asyncio.ensure_future(link.publish(1))
        for _ in range(10):
            await asyncio.sleep(0)
        assert called == ["trainer stage", "trainer send", "one prepare", "two prepare"]
        slow.set_result(None)
        await publishing
        await trainer.step([])  # type: ignore[arg-type]
        assert called[4:] == ["one swap", "two swap", "trainer release", "trainer step"]

    asyncio.run(main())


def test_a_failed_send_fails_the_publish() -> None:
    """Also while receivers prepare or swap, and also if the failure is noticed before the death of another process."""

    async def main(waits_in: str, dies: bool) -> None:
        called: list[str] = []
        loop = asyncio.get_running_loop()
        send: asyncio.Future[Any] = loop.create_future()
        trainer = Recorded("trainer", called, lambda method: send if method == "send" else None)
        waiting = Recorded("one", called, lambda method: loop.create_future() if method == waits_in else None)
        link, _ = link_of(trainer, waiting)
        publishing = asyncio.ensure_future(link.publish(1))
        while f"one {waits_in}" not in called:
            await asyncio.sleep(0)
        send.set_exception(WorkerError("connection reset by peer", "RuntimeError", ""))
        await asyncio.sleep(0.05)
        waiting.dead = WorkerDied("generator 0 died") if dies else None
        with pytest.raises(RuntimeError, match="generator 0 died" if dies else "connection reset by peer"):
            async with asyncio.timeout(5):
                await publishing
        assert "trainer release" not in called

    for waits_in, dies in (("prepare", False), ("swap", False), ("prepare", True)):
        asyncio.run(main(waits_in, dies))


@pytest.mark.e2e
def test_a_run_whose_only_generator_dies_ends_with_its_name(tiny: Path, tmp_path: Path) -> None:
    """The error is one line with the generator's name and log, without a traceback and without the environment."""
    directory, config, environment = tmp_path / "run", tmp_path / "run.toml", tmp_path / "endless.py"
    environment.write_text(ENDLESS)
    config.write_text(
        f"model.path = {json.dumps(str(tiny))}\nenvironment.name = {json.dumps(f'{environment}:Endless')}\n"
        f"run.dir = {json.dumps(str(directory))}\nloop = {{ steps = 100000, groups_per_step = 2, group_size = 4 }}\n"
        "sampling.max_tokens = 24\nevaluation.every = 0\ntrainer.threads = 1\n"
        "generator = { threads = 1, max_restarts = 0 }\n"
    )
    command = [sys.executable, "-m", "slipstream.cli", "train", str(config)]
    process = warm.Command(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics, last = directory / "metrics.jsonl", time.monotonic() + LIMIT
    while process.poll() is None and not (metrics.exists() and metrics.read_bytes().count(b"\n") > 2):
        assert time.monotonic() < last, "no step is taken"
        time.sleep(0.05)
    processes = descendants(process.pid)
    (generator,) = {p for p in processes if output(p) == f"{directory}/logs/generator_0.log"}
    os.kill(generator, signal.SIGKILL)
    out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 1, out + err
    shown = [line for line in err.splitlines() if line.startswith("slipstream: ")]
    assert len(shown) == 1 and shown[0].startswith(f"slipstream: generator 0 died (log: {directory}/logs/generator_0.")
    assert "Traceback" not in err and "environment" not in err
    assert not {p for p in processes if lives(p)}


@pytest.mark.e2e
def test_a_run_continues_while_one_generator_is_alive(tiny: Path, tmp_path: Path) -> None:
    directory, environment = tmp_path / "run", tmp_path / "endless.py"
    environment.write_text(ENDLESS)
    flags = {
        "model.path": tiny, "environment.name": f"{environment}:Endless", "run.dir": directory, "loop.steps": 60,
        "loop.groups_per_step": 2, "loop.group_size": 4, "sampling.max_tokens": 24, "generator.replicas": 2,
        "generator.max_restarts": 0, "trainer.threads": 1, "generator.threads": 1,
    }  # fmt: skip
    config = tmp_path / "empty.toml"
    config.write_text("")
    command = [sys.executable, "-m", "slipstream.cli", "train", str(config), *(f"--{k}={v}" for k, v in flags.items())]
    process = warm.Command(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics, last = directory / "metrics.jsonl", time.monotonic() + LIMIT
    while process.poll() is None and not (metrics.exists() and metrics.read_bytes().count(b"\n") > 2):
        assert time.monotonic() < last, "no step is taken"
        time.sleep(0.02)
    log = directory / "logs" / "generator_1.log"
    (victim,) = {p for p in descendants(process.pid) if output(p) == str(log)}
    os.kill(victim, signal.SIGKILL)
    _, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, err
    said = f"warning: generator 1 died (log: {log}); 1 of 2 generators are left"
    assert " ".join(err.split()).count(said) == 1
    summary = json.loads((directory / "summary.json").read_text())
    (lost,) = summary["engines_lost"]
    assert summary["steps"] == 60 and f"(log: {log}): It was killed by SIGKILL" in lost
    counted = [json.loads(line)["engines/alive"] for line in metrics.read_text().splitlines()]
    assert counted[0] == 2 and counted[-1] == 1 and not summary["failures"]
