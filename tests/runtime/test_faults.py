"""Nothing hangs: whatever dies or lies in the middle of a publish, there is a clear error soon and nothing left over.

Links that are slow, break or lie are built around the real ones in a module of their own, which files in its folder
tell what to do, so that a test knows where in a publish a process is when it kills it.
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

from slipstream.actor import Actor, ActorDied, ActorError
from slipstream.config import SyncConfig, load_config
from slipstream.rollout import Completion, Sampling, VersionSpan
from slipstream.runtime import publish
from slipstream.runtime.generating import GeneratorService
from slipstream.runtime.local import Pools, ProcessTrainer
from slipstream.runtime.pool import GeneratorPool, ProcessGenerator
from slipstream.runtime.publish import PublishError, WeightLink
from slipstream.sync.nccl import NcclSender
from slipstream.sync.nccl_direct import NativeSender
from slipstream.sync.shared import SharedSender
from tests.conftest import in_flight
from tests.processes import descendants, lives, module_for_processes

LIMIT = 60.0  # seconds in which everything has an end
TRAINER = "slipstream.verification:ChangingTrainer"
FAULTY = """
import time
from pathlib import Path
from slipstream.sync.checkpoint import CheckpointReceiver, CheckpointSender
from slipstream.sync.nccl import NcclReceiver, NcclSender
from slipstream.sync.shared import SharedReceiver, SharedSender
from slipstream.verification import ChangingTrainer

HERE = Path(__file__).parent

def told(what):
    return (HERE / what).exists()

def wait_where(where):
    # Say that this place is reached if a test asked for a wait here, and wait until it says go.
    while told(f"hold {where}"):
        (HERE / f"reached {where}").touch()
        time.sleep(0.01)

def slow(base):
    class Slow(base):
        if hasattr(base, "send"):
            def send(self, ticket):
                wait_where("send")
                super().send(ticket)
        else:
            def __init__(self, offer, shapes, rank, device):
                super().__init__(offer, shapes, rank, device)
                self.rank = rank
            def prepare(self, ticket):
                wait_where(f"prepare {self.rank}")
                if told("raise"):
                    raise OSError("the cable is cut")
                weights = dict(super().prepare(ticket))
                if told(f"lie {self.rank}"):
                    name, _, size = (HERE / f"lie {self.rank}").read_text().partition(" by ")
                    weights[name] = weights[name][()].clone()
                    weights[name].view(-1)[3] += float(size or 1e-6)
                return weights
    return Slow

class Trainer(ChangingTrainer):
    def checksums(self, names):
        wait_where("checksums")
        return super().checksums(names)

class Shared: Sender, Receiver = slow(SharedSender), slow(SharedReceiver)
class Nccl: Sender, Receiver = slow(NcclSender), slow(NcclReceiver)
class Checkpoint: Sender, Receiver = slow(CheckpointSender), slow(CheckpointReceiver)
"""


class Orders:
    """The files by which a test and the links of `FAULTY` talk."""

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
    """What the links of the module `faulty`, which processes can import from now on, are told."""
    with module_for_processes("faulty_links", FAULTY, tmp_path / "faulty", monkeypatch) as folder:
        yield Orders(folder)


def pid_of(actor: Any) -> int:
    pid: int = actor._process.pid
    return pid


@asynccontextmanager
async def started(
    model: Path, folder: Path, link: str, *flags: str, close: float = 20.0, trainer: str = TRAINER
) -> AsyncIterator[Pools]:
    """The processes of a run; when they are closed, within `close` seconds, none of them nor of theirs is left."""
    named = ["--environment.name=addition", f"--trainer.kind={trainer}", f"--sync.link={link}"]
    threads = ["--trainer.threads=1", "--generator.threads=1"]
    config = load_config(None, [f"--model.path={model}", *named, *threads, *flags])
    others = descendants(os.getpid())  # such as servers that other tests share
    async with asyncio.timeout(LIMIT):
        pools = await Pools.start(config, folder)
    processes = descendants(os.getpid()) - others
    try:
        trainers = getattr(pools.trainer.actor, "actors", [pools.trainer.actor])
        assert {pid_of(actor) for actor in (*trainers, *(g.actor for g in pools.generator.generators))} <= processes
        async with asyncio.timeout(LIMIT):
            yield pools
    finally:
        processes |= descendants(os.getpid()) - others
        async with asyncio.timeout(LIMIT):
            began = time.monotonic()
            await pools.close()
            took = time.monotonic() - began
    while time.monotonic() < began + took + 5 and any(map(lives, processes)):
        await asyncio.sleep(0.01)  # what is killed is gone a little later
    assert not {process for process in processes if lives(process)}
    assert took < close, f"closing took {took:.1f} s"


@pytest.mark.parametrize(
    ("link", "generators", "joined"),
    [("Shared", 1, True), ("Nccl", 2, False)],
    ids=["shared", "nccl, one of two before it joins"],
)
def test_a_generator_that_dies_fails_the_publish_by_its_name(
    link: str, generators: int, joined: bool, tiny: Path, tmp_path: Path, orders: Orders
) -> None:
    """Killed while it prepares, when the trainer, and the other generator, wait for it in a collective."""
    last = generators - 1

    async def main() -> None:
        async with started(tiny, tmp_path, f"faulty_links:{link}", f"--generator.count={generators}") as pools:
            if joined:
                await pools.link.connect(0)
                await pools.trainer.actor.call("change", 1)
            orders.hold(f"prepare {generators}")
            publishing = asyncio.ensure_future(pools.link.publish(1) if joined else pools.link.connect(0))
            await orders.reached(f"prepare {generators}")
            await asyncio.sleep(0.2)  # the others get to where they wait for it
            os.kill(pid_of(pools.generator.generators[last].actor), signal.SIGKILL)
            with pytest.raises(ActorDied, match=rf"^generator {last} died \(log: .*generator_{last}.log\)"):
                await publishing
            if not joined:  # the trainer waits for a generator that will not come, and would have 10 seconds to end
                await pools.trainer.actor.stop(grace=1.0)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("link", "where"), [("Shared", "prepare 2"), ("Checkpoint", "prepare 1"), ("Nccl", "prepare 2")]
)
def test_the_others_go_on_where_one_dies_in_a_publish(
    link: str, where: str, tiny: Path, tmp_path: Path, orders: Orders
) -> None:
    """It is told who is gone; what it drew others draw; they all serve the version that was published."""
    victim = int(where[-1]) - 1

    async def main() -> None:
        async with started(tiny, tmp_path, f"faulty_links:{link}", "--generator.count=3") as pools:
            draw, sampling = pools.generator.generate, Sampling(max_tokens=30)
            await pools.link.connect(0)
            before = await draw([5, 6, 7], sampling)
            running = [asyncio.ensure_future(draw([5, 6, 7 + i], Sampling(max_tokens=200))) for i in range(12)]
            await pools.trainer.actor.call("change", 1)
            orders.hold(where)
            publishing = asyncio.ensure_future(pools.link.publish(1))
            await orders.reached(where)
            os.kill(pid_of(pools.generator.generators[victim].actor), signal.SIGKILL)
            orders.go(where)
            (lost,) = (await publishing).lost
            assert re.match(rf"generator {victim} died \(log: .*\); 2 of 3 generators are left$", lost)
            assert [len(c.token_ids) > 0 for c in await asyncio.gather(*running)] == [True] * 12
            await pools.trainer.actor.call("change", 2)
            assert (await pools.link.publish(2, "full")).lost == ()
            after = {tuple((await g.generate([5, 6, 7], sampling)).logprobs) for g in pools.generator.living}
            assert len(after) == 1 and tuple(before.logprobs) not in after and len(pools.generator.living) == 2
            assert pools.generator.version == 2

    asyncio.run(main())


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process is found in 2 to 3 seconds."""
    monkeypatch.setattr("slipstream.actor.HEARTBEAT_S", 0.1)
    monkeypatch.setattr("slipstream.actor.HEARTBEAT_TIMEOUT_S", 2.0)
    monkeypatch.setattr("slipstream.actor.ENDS", 0.5)


@pytest.mark.parametrize("link", ["shared", "nccl"])
def test_a_generator_that_hangs_is_ended_by_its_name(link: str, tiny: Path, tmp_path: Path, impatient: None) -> None:
    """Stopped, it lives and says nothing; where they receive together, it is not another that is blamed."""

    async def main() -> None:
        async with started(tiny, tmp_path, link, "--generator.count=2") as pools:
            await pools.link.connect(0)
            await pools.trainer.actor.call("change", 1)
            pid = pid_of(pools.generator.generators[1].actor)
            os.kill(pid, signal.SIGSTOP)
            (lost,) = (await pools.link.publish(1)).lost
            said = r"generator {} has been silent for [\d.]+ s, as if it were stopped, and has owed prepare for .*"
            assert re.match(said.format(1) + "; 1 of 2 generators are left$", lost)
            completion = await pools.generator.generate([5, 6, 7], Sampling(max_tokens=8))
            assert completion.versions == (1, 1)
            os.kill(pid_of(pools.generator.generators[0].actor), signal.SIGSTOP)
            with pytest.raises(ActorDied, match=said.format(0)):
                await pools.link.publish(2)

    asyncio.run(main())


def test_a_generator_that_stands_still_is_left_for_another(patient: Path, tmp_path: Path, impatient: None) -> None:
    """Outside of any publish, too: what it was drawing others draw."""

    async def main() -> None:
        async with started(patient, tmp_path, "shared", "--generator.count=2") as pools:
            await pools.link.connect(0)
            drawing = await in_flight(pools.generator, [[5, 6, 7 + i] for i in range(4)], Sampling(max_tokens=400))
            still = pools.generator.generators[1]
            os.kill(pid_of(still.actor), signal.SIGSTOP)
            assert [len(c.token_ids) for c in await asyncio.gather(*drawing)] == [400] * 4
            said = r"generator 1 has been silent for 2 s, as if it were stopped, and has owed 2 x generate for .* \(log"
            assert re.match(said, str(still.actor.dead)) and len(pools.generator.living) == 1

    asyncio.run(main())


def test_a_generator_is_found_that_stands_still_in_a_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the trainer's end that looks like a failure of its own."""
    monkeypatch.setattr(publish, "find_link", lambda name: (NcclSender, None))
    monkeypatch.setattr(publish, "ANSWERS", 0.1)

    async def main(others: bool) -> None:
        called: list[str] = []
        loop, sent = asyncio.get_running_loop(), itertools.count()
        timed_out = ActorError("Timed out waiting 60000ms", "RuntimeError", "")
        first = {"open_link": {"shapes": {}}}.get
        trainer = Recorded("trainer", called, lambda a: timed_out if a == "send" and not next(sent) else first(a))
        still = Recorded("still", called, lambda a: loop.create_future() if a in ("prepare", "drawn") else None)
        slow = Recorded("slow", called, lambda a: loop.create_future() if a == "drawn" else None)
        well = Recorded("well", called)
        link, _ = link_of(trainer, still, *([well, slow] if others else []))
        link._connected, link._joined = True, list(link._members)
        for member in link._members:
            ticks = itertools.count() if member.actor is slow else itertools.repeat(7)
            monkeypatch.setattr(member, "_heartbeats", lambda ticks=ticks: next(ticks))
        said = "still was silent in a transfer, which failed"
        async with asyncio.timeout(5):
            if others:
                assert (await link.publish(1)).lost == (f"{said}; 2 of 3 generators are left",)
                assert "well swap" in called and not well.dead and not slow.dead
            else:
                with pytest.raises(ActorDied, match=f"^{said}$"):
                    await link.publish(1)

    asyncio.run(main(others=True))
    asyncio.run(main(others=False))


@pytest.mark.parametrize("phase", ["connect", "prepare", "swap", "checksums"])
def test_every_phase_of_a_publish_has_an_end(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For generators that seem to work, too. One that is drained has the time of a sequence besides."""
    for name in ("CONNECT", "PASS"):
        monkeypatch.setattr(publish, name, 0.1)
    said = {
        "connect": "connect", "prepare": "receive version 1", "swap": "swap in version 1",
        "checksums": "tell the checksums of version 1",
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
            loop.call_later(0.5, answers[phase].set_result, (0.001, {"tokens": 0, "busy": 0}))
            assert (await publishing).lost == ()
            return
        async with asyncio.timeout(10):
            with pytest.raises(ActorDied, match=f"^engine did not {said[phase]} within 0.1 s$"):
                await publishing

    asyncio.run(main(drained=False))
    if phase == "swap":
        asyncio.run(main(drained=True))


def test_who_fails_in_a_publish_or_dies_before_it_leaves_the_pool(tmp_path: Path) -> None:
    """Failing to swap, above all: nobody knows what such an engine serves. The trainer's failure is everybody's."""

    async def main() -> None:
        broken = ActorError("out of memory", "RuntimeError", "")
        for method in ("prepare", "swap"):
            called: list[str] = []
            bad = Recorded("bad", called, lambda asked, method=method: broken if asked == method else None)
            good, trainer = Recorded("good", called), Recorded("trainer", called)
            link, _ = link_of(trainer, good, bad)
            assert (await link.publish(1)).lost == ("bad failed: out of memory; 1 of 2 generators are left",)
            assert bad.dead and not good.dead and "good swap" in called
            assert ("bad swap" in called) == (method == "swap")
            assert (await link.publish(2)).lost == ()
            good.dead = ActorDied("good died (log: x)\nwith its log")
            with pytest.raises(ActorDied, match="good died"):
                await link.publish(3)

    asyncio.run(main())


def test_an_engine_whose_swap_fails_draws_no_more(tiny: Path) -> None:
    """Some of the new weights may be in place: it answers nothing until it is taken out of the pool."""

    class Cut:
        """Weights of which a part arrives."""

        def apply(self) -> None:
            next(service._engine.model.parameters()).data.zero_()  # type: ignore[attr-defined]
            raise RuntimeError("the cable is cut")

    config = load_config(None, [f"--model.path={tiny}", "--environment.name=addition", "--generator.threads=1"])
    service, answers = GeneratorService(config), list[Any]()
    service._open_weights = lambda link, offer, rank: Cut()  # type: ignore[assignment, return-value]
    service.connect({}, 1)
    service.handle("generate", (0, [5, 6, 7], Sampling(max_tokens=200)), answers.append)
    for _ in range(3):
        service.tick()
    service.handle("swap", (1,), answers.append)
    service.tick()
    assert str(answers.pop()) == "the cable is cut"
    service.handle("generate", (1, [5, 6, 7], Sampling(max_tokens=1)), answers.append)
    drawn = service.stats()["tokens"]
    for _ in range(250):
        service.tick()
    assert not answers and not service.busy and service.stats()["tokens"] == drawn == 3


@pytest.mark.parametrize("dies", [False, True])
def test_no_engine_stays_that_has_a_part_of_a_transfer(dies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One fails; another, which waits for it in the transfer, has as much of it as came. They leave the pool at once,
    and nothing is asked of a trainer that is still in it."""
    monkeypatch.setattr(publish, "find_link", lambda name: (NativeSender, None))

    async def main() -> None:
        called: list[str] = []
        broken, loop = ActorError("NCCL error", "RuntimeError", ""), asyncio.get_running_loop()
        trainer = Recorded("trainer", called, lambda asked: loop.create_future() if asked == "send" else None)
        waits = Recorded("waits", called, lambda asked: loop.create_future() if asked == "swap" else None)
        fails = Recorded("fails", called, lambda asked: broken if asked == "swap" else None)
        done = Recorded("done", called)
        link, _ = link_of(trainer, done, waits, fails)
        link._connected, link._joined = True, list(link._members)
        if dies:
            loop.call_later(0.1, fails.give_up, "fails died")
        async with asyncio.timeout(5):
            with pytest.raises(ActorDied if dies else ActorError, match="fails died" if dies else "NCCL error"):
                await link.publish(1)
        assert done.dead and waits.dead and fails.dead and "trainer open_link" not in called

    asyncio.run(main())


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.timeout(150)
def test_a_vllm_generator_that_dies_fails_the_publish_by_its_name(tmp_path: Path, orders: Orders) -> None:
    from tests.conftest import build_model, build_tokenizer

    model = tmp_path / "model"
    build_model("qwen3", head_dim=32, eos_token_id=1, pad_token_id=0).save_pretrained(model)
    build_tokenizer().save_pretrained(model)

    async def main() -> None:
        async with started(model, tmp_path, "faulty_links:Nccl", "--generator.kind=vllm") as pools:
            await pools.link.connect(0)
            await pools.trainer.actor.call("change", 1)
            orders.hold("prepare 1")
            publishing = asyncio.ensure_future(pools.link.publish(1))
            await orders.reached("prepare 1")
            os.killpg(pid_of(pools.generator.generators[0].actor), signal.SIGKILL)
            with pytest.raises(ActorDied, match=r"^generator 0 died \(log: "):
                await publishing

    asyncio.run(main())


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_a_vllm_core_that_dies_takes_its_generator_along(
    patient: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is a process of its own, as on GPUs, vLLM lets those who wait for its tokens wait for ever."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")

    async def main() -> None:
        async with started(patient, tmp_path, "shared", "--generator.kind=vllm") as pools:
            await pools.link.connect(0)
            actor = pools.generator.generators[0].actor
            assert isinstance(actor, Actor)

            async def on_and_on() -> None:  # where processors are crowded the core is often done before anybody sees it
                while True:
                    await pools.generator.generate([5, 6, 7], Sampling(max_tokens=1500))

            drawing = asyncio.ensure_future(on_and_on())
            await asyncio.wait([drawing], timeout=1.0)
            cores = {p for p in descendants(pid_of(actor)) if b"EngineCore" in Path(f"/proc/{p}/cmdline").read_bytes()}
            began = time.monotonic()
            for core in cores:
                os.kill(core, signal.SIGKILL)
            with pytest.raises(ActorDied, match=r"(?s)^generator 0 died \(log: .*vLLM's engine core died"):
                await drawing
            assert cores and time.monotonic() - began < 20

    asyncio.run(main())


@pytest.mark.parametrize("joined", [True, False], ids=["in the transfer", "before the generator looks for it"])
def test_a_trainer_that_dies_leaves_generators_that_serve_and_end(
    joined: bool, tiny: Path, tmp_path: Path, orders: Orders
) -> None:
    """The old version goes on being served, and a thread that looks for the trainer keeps no process from its end."""
    held = "send" if joined else "prepare 1"

    async def main() -> None:
        async with started(tiny, tmp_path, "faulty_links:Nccl", close=8.0) as pools:
            draw, sampling = pools.generator.generate, Sampling(max_tokens=120)
            if joined:
                await pools.link.connect(0)
                await pools.trainer.actor.call("change", 1)
            orders.hold(held)
            publishing = asyncio.ensure_future(pools.link.publish(1) if joined else pools.link.connect(0))
            await orders.reached(held)
            running = await in_flight(pools.generator, [[5, 6, 7 + i] for i in range(4)], sampling, tokens=1)
            began = time.monotonic()
            pools.trainer.actor._process.kill()  # type: ignore[union-attr]
            orders.go(held)
            with pytest.raises(ActorDied, match=r"^trainer died \(log: .*trainer.log\)"):
                await publishing
            assert time.monotonic() - began < 10
            later = await asyncio.gather(*(draw([5, 6, 7 + i], sampling) for i in range(4)))
            for completion in (*await asyncio.gather(*running), *later):
                assert completion.versions == (0, 0) and completion.token_ids

    asyncio.run(main())


def test_a_link_that_breaks_or_lies_is_told_and_can_be_used_again(tiny: Path, tmp_path: Path, orders: Orders) -> None:
    """What a receiver raises is what the publish raises, and the old version stays; a wrong value is named."""

    async def main() -> None:
        flags = ["--generator.count=2", "--sync.verify=full"]
        async with started(tiny, tmp_path, "faulty_links:Checkpoint", *flags) as pools:
            greedy = Sampling(temperature=0.0, max_tokens=30)

            async def drawn() -> list[tuple[tuple[int, int], tuple[int, ...]]]:
                """By each generator."""
                both = await asyncio.gather(*(g.generate([5, 6, 7], greedy) for g in pools.generator.generators))
                return [(c.versions, c.token_ids) for c in both]

            await pools.link.connect(0)
            before = await drawn()
            await pools.trainer.actor.call("change", 1)
            orders.give("raise")
            with pytest.raises(ActorError, match=r"^the cable is cut\n"):
                await pools.link.publish(1)
            assert await drawn() == before and pools.generator.version == 0
            orders.withdraw("raise")
            await pools.trainer.actor.call("change", 2)
            await pools.link.publish(1)
            after = await drawn()
            assert {versions for versions, _ in after} == {(1, 1)} and after[0] == after[1] != before[0]
            orders.give("lie 2", "model.layers.1.mlp.up_proj.weight")
            said = r"generator 1 serves model.layers.1.mlp.up_proj.weight with other values .* version 2; .*sync.link"
            (lost,) = (await pools.link.publish(2)).lost
            assert re.match(f"{said}; 1 of 2 generators are left$", lost)
            with pytest.raises(ActorDied, match=said):
                await pools.generator.generators[1].generate([5, 6, 7], greedy)
            assert (await pools.generator.generate([5, 6, 7], greedy)).versions == (2, 2)
            orders.give("lie 1", "model.layers.1.mlp.up_proj.weight")
            with pytest.raises(PublishError, match=said.replace("1 serves", "0 serves").replace("2;", "3;") + "$"):
                await pools.link.publish(3)

    asyncio.run(main())


def test_what_a_wrong_version_draws_reaches_nobody(tiny: Path, tmp_path: Path, orders: Orders) -> None:
    """Engines draw on while checksums are compared, and what they finish meanwhile waits for the outcome."""

    async def main() -> None:
        flags = ["--generator.count=2", "--sync.verify=full", "--sync.interruption=retry"]
        async with started(tiny, tmp_path, "faulty_links:Checkpoint", *flags, trainer="faulty_links:Trainer") as pools:
            good, bad = pools.generator.generators
            await pools.link.connect(0)
            await pools.trainer.actor.call("change", 1)
            orders.give("lie 2", "model.layers.1.mlp.up_proj.weight by 99")
            orders.hold("checksums")
            publishing = asyncio.ensure_future(pools.link.publish(1))
            await orders.reached("checksums")
            before, sampling = [await g.stats() for g in (good, bad)], Sampling(max_tokens=8)
            drawing = [asyncio.ensure_future(pools.generator.generate([5, 6, 7 + i], sampling)) for i in range(8)]
            while not all(
                [
                    (await g.actor.call("stats"))["tokens"] >= b["tokens"] + 20
                    for g, b in zip((good, bad), before, strict=True)
                ]
            ):
                await asyncio.sleep(0.001)
            assert not any(one.done() for one in drawing), "drawn, and not yet known to be right"
            orders.go("checksums")
            assert len((await publishing).lost) == 1 and bad.actor.dead and not good.actor.dead
            completions = await asyncio.gather(*drawing)
            for completion, scores in zip(completions, await pools.trainer.score(completions), strict=True):
                assert completion.versions == (1, 1) and completion.logprobs == pytest.approx(scores, abs=1e-5)

    asyncio.run(main())


def test_a_publish_that_ends_without_an_answer_hands_out_nothing(tmp_path: Path) -> None:
    """The trainer fails to say what it published: nobody knows whether what was drawn since is right."""

    async def main() -> None:
        called: list[str] = []
        broken = ActorError("out of memory", "RuntimeError", "")
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
        with pytest.raises(ActorError, match="out of memory"):
            await publishing
        with pytest.raises(ActorDied, match=r"^engine was taken out of the pool: out of memory$"):
            await drawing

    asyncio.run(main())


def test_a_group_is_joined_anew_whoever_left_it_and_why(tiny: Path, tmp_path: Path, orders: Orders) -> None:
    """A wrong value, found when the transfer is over; then the others publish as before."""

    async def main() -> None:
        flags = ["--generator.count=3", "--sync.verify=full"]
        async with started(tiny, tmp_path, "faulty_links:Nccl", *flags) as pools:
            await pools.link.connect(0)
            orders.give("lie 2", "model.layers.1.mlp.up_proj.weight")
            (lost,) = (await pools.link.publish(1)).lost
            assert lost.startswith("generator 1 serves model.layers.1.mlp.up_proj.weight with other values")
            orders.withdraw("lie 2")
            await pools.trainer.actor.call("change", 1)
            async with asyncio.timeout(30):  # nobody waits for the one that has left
                assert (await pools.link.publish(2)).lost == ()
            drawn = [await g.generate([5, 6, 7], Sampling(max_tokens=30)) for g in pools.generator.living]
            assert [c.versions for c in drawn] == [(2, 2)] * 2 and drawn[0].logprobs == drawn[1].logprobs

    asyncio.run(main())


def test_a_group_that_broke_is_joined_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the next publish, though all are there that joined it; and one that works stays as it is."""
    monkeypatch.setattr(publish, "find_link", lambda name: (NcclSender, None))

    async def main() -> None:
        called: list[str] = []
        answers: dict[str, Any] = {"open_link": {"shapes": {}}}
        link, _ = link_of(Recorded("trainer", called, answers.get), Recorded("one", called, answers.get))
        await link.connect(0)
        await link.publish(1)
        assert called.count("one connect") == 1
        answers["prepare"] = ActorError("the cable is cut", "OSError", "")
        with pytest.raises(ActorError, match="the cable is cut"):
            await link.publish(2)
        del answers["prepare"]
        called.clear()
        await link.publish(2)
        assert called[:3] == ["trainer open_link", "one connect", "trainer stage"]

    asyncio.run(main())


@pytest.mark.parametrize("sender", [NativeSender, NcclSender])
def test_generators_do_not_wait_for_a_trainer_that_can_not_connect(
    monkeypatch: pytest.MonkeyPatch, sender: type[Any]
) -> None:
    """Its reason is told in seconds, and one that can is waited for."""
    monkeypatch.setattr(publish, "find_link", lambda name: (sender, None))
    monkeypatch.setattr(publish, "ASKED", 0.1)

    async def main() -> None:
        called: list[str] = []
        waits: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        answers: dict[str, Any] = {"open_link": {"shapes": {}}, "connect": waits}
        link, _ = link_of(Recorded("trainer", called, answers.get), Recorded("one", called, answers.get))
        connecting = asyncio.ensure_future(link.connect(0))
        await asyncio.sleep(0.5)
        assert not connecting.done() and called.count("trainer connecting") > 1
        answers["connecting"] = ActorError("address already in use", "RuntimeError", "")
        with pytest.raises(ActorError, match="address already in use"):
            await asyncio.wait_for(connecting, 5)
        assert "trainer stage" not in called

    asyncio.run(main())


class Recorded:
    """An actor that answers at once, and keeps in what order it was called; `answer` may return a future instead."""

    def __init__(self, name: str, called: list[str], answer: Callable[[str], Any] = lambda method: None) -> None:
        self.name, self._called, self._answer = name, called, answer
        self.dead: ActorDied | None = None

    def give_up(self, why: str) -> ActorDied:
        self.dead = self.dead or ActorDied(why)
        return self.dead

    def call(self, method: str, *arguments: Any) -> asyncio.Future[Any]:
        self._called.append(f"{self.name} {method}")
        answer = self._answer(method)
        if isinstance(answer, asyncio.Future):
            return answer
        future = asyncio.get_running_loop().create_future()
        if isinstance(answer, Exception):
            future.set_exception(answer)
        elif method == "swap":
            future.set_result((0.001, {"tokens": 0, "busy": 0}))
        else:
            future.set_result({"version": 1} if method == "stage" else answer)
        return future

    call_large = call


def link_of(trainer: Recorded, *generators: Recorded, verify: Any = "off") -> tuple[WeightLink, ProcessTrainer]:
    ends: Any = [ProcessGenerator(generator) for generator in generators]  # type: ignore[arg-type]
    trained = ProcessTrainer(trainer)  # type: ignore[arg-type]
    return WeightLink(trained.actor, GeneratorPool(ends), SyncConfig(link="shared", verify=verify)), trained


@pytest.mark.parametrize("lets_go", [True, False])
def test_the_trainer_goes_on_as_soon_as_it_may(monkeypatch: pytest.MonkeyPatch, lets_go: bool) -> None:
    """When all is sent, if the link holds no more of it; else when all have swapped. It has said by then what it sent,
    so that a step on its way changes no checksum; and what has been sent can't be sent again."""
    monkeypatch.setattr(publish, "find_link", lambda name: (NcclSender if lets_go else SharedSender, None))

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
        assert free.is_set() is lets_go
        assert called[:3] == ["trainer stage", "trainer send", "trainer checksums"] and not publishing.done()
        if not lets_go:
            swapped.set_result((0.001, {"tokens": 0, "busy": 0}))
            assert (await publishing).lost == () and free.is_set()
            return
        swapped.set_exception(ActorError("out of memory", "RuntimeError", ""))
        with pytest.raises(ActorError, match="out of memory"):
            await publishing
        assert called.count("trainer stage") == 1

    asyncio.run(main())


def test_a_publish_calls_its_ends_in_order() -> None:
    """All have prepared before one swaps, and a step made right after a publish reaches the trainer after `release`."""

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


def test_a_send_that_fails_fails_the_publish() -> None:
    """Though the receivers wait for it, prepare or swap, and though its failure be noticed before a death elsewhere."""

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
        send.set_exception(ActorError("connection reset by peer", "RuntimeError", ""))
        await asyncio.sleep(0.05)
        waiting.dead = ActorDied("generator 0 died") if dies else None
        with pytest.raises(RuntimeError, match="generator 0 died" if dies else "connection reset by peer"):
            async with asyncio.timeout(5):
                await publishing
        assert "trainer release" not in called

    for waits_in, dies in (("prepare", False), ("swap", False), ("prepare", True)):
        asyncio.run(main(waits_in, dies))


ENDLESS = """
from slipstream.environments.base import Task

class Endless:
    def __init__(self):
        self.train = self.test = [Task(str(i), f"{i % 10} + 1 =") for i in range(20)]

    async def rollout(self, task, policy):
        completion = await policy.sample(task.prompt)
        return float(sum(completion.token_ids) % 7)
"""


@pytest.mark.e2e
def test_a_run_whose_generator_dies_says_so_and_ends(tiny: Path, tmp_path: Path) -> None:
    """As a user sees it: one line with its name and its log, no traceback, and no blame on the environment."""
    directory, config, environment = tmp_path / "run", tmp_path / "run.toml", tmp_path / "endless.py"
    environment.write_text(ENDLESS)
    config.write_text(
        f"model.path = {json.dumps(str(tiny))}\nenvironment.name = {json.dumps(f'{environment}:Endless')}\n"
        f"run.dir = {json.dumps(str(directory))}\nloop = {{ steps = 100000, groups_per_step = 2, group_size = 4 }}\n"
        "sampling.max_tokens = 24\nevaluation.every = 0\ntrainer.threads = 1\ngenerator.threads = 1\n"
    )
    command = [sys.executable, "-m", "slipstream.cli", "train", str(config)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics, last = directory / "metrics.jsonl", time.monotonic() + LIMIT
    while process.poll() is None and not (metrics.exists() and metrics.read_bytes().count(b"\n") > 2):
        assert time.monotonic() < last, "no step is taken"
        time.sleep(0.05)
    processes = descendants(process.pid)
    (generator,) = {
        p for p in processes if f"{directory}/logs/generator_0.log" == str(Path(f"/proc/{p}/fd/1").readlink())
    }
    os.kill(generator, signal.SIGKILL)
    out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 1, out + err
    shown = [line for line in err.splitlines() if line.startswith("slipstream: ")]
    assert len(shown) == 1 and shown[0].startswith(f"slipstream: generator 0 died (log: {directory}/logs/generator_0.")
    assert "Traceback" not in err and "environment" not in err
    assert not {p for p in processes if lives(p)}


@pytest.mark.e2e
def test_a_run_goes_on_while_one_generator_lives(tiny: Path, tmp_path: Path) -> None:
    directory, environment = tmp_path / "run", tmp_path / "endless.py"
    environment.write_text(ENDLESS)
    flags = {
        "model.path": tiny, "environment.name": f"{environment}:Endless", "run.dir": directory, "loop.steps": 60,
        "loop.groups_per_step": 2, "loop.group_size": 4, "sampling.max_tokens": 24, "generator.count": 2,
        "trainer.threads": 1, "generator.threads": 1,
    }  # fmt: skip
    config = tmp_path / "empty.toml"
    config.write_text("")
    command = [sys.executable, "-m", "slipstream.cli", "train", str(config), *(f"--{k}={v}" for k, v in flags.items())]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics, last = directory / "metrics.jsonl", time.monotonic() + LIMIT
    while process.poll() is None and not (metrics.exists() and metrics.read_bytes().count(b"\n") > 2):
        assert time.monotonic() < last, "no step is taken"
        time.sleep(0.02)
    log = directory / "logs" / "generator_1.log"
    (victim,) = {p for p in descendants(process.pid) if Path(f"/proc/{p}/fd/1").readlink() == log}
    os.kill(victim, signal.SIGKILL)
    _, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, err
    said = f"warning: generator 1 died (log: {log}); 1 of 2 generators are left"
    assert " ".join(err.split()).count(said) == 1
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["steps"] == 60 and [said.endswith(lost) for lost in summary["lost"]] == [True]
    counted = [json.loads(line)["generators"] for line in metrics.read_text().splitlines()]
    assert counted[0] == 2 and counted[-1] == 1 and not summary["failures"]
