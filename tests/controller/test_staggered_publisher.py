"""Publishes that leave slow engines behind: with doubles of engines, and with processes that a test holds up."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream.config.schema import SyncConfig
from slipstream.controller import staggered_publisher
from slipstream.controller.finish import close
from slipstream.controller.staggered_publisher import StaggeredPublisher
from slipstream.generators.pool import EngineReplica, GeneratorPool
from slipstream.rollout import Completion, Sampling
from slipstream.run import training_loop
from slipstream.runtime.worker import WorkerDied, WorkerError
from tests.controller.test_engine_supervisor import Warned, balanced, play, run_of, send, step, until
from tests.processes import changing, module_for_processes
from tests.runtime.test_faults import Recorded, pid_of, started

SUMS = {"w": 1}
SLOW = """
import time
from pathlib import Path
from slipstream.sync.delta import DeltaReceiver, DeltaSender

HERE = Path(__file__).parent

def wait_while(order):
    while (HERE / order).exists():
        (HERE / f"reached {order}").touch()
        time.sleep(0.005)

class Receiver(DeltaReceiver):
    def prepare(self, handle):
        wait_while(f"hold {self._rank}")
        weights = super().prepare(handle)
        wait_while(f"keep {self._rank}")
        return weights

class Link: Sender, Receiver = DeltaSender, Receiver
"""


class Trainer(Recorded):
    """A trainer whose sender returns checksums with its handles."""

    def call(self, method: str, arguments: tuple[Any, ...], large: bool = False) -> asyncio.Future[Any]:
        future = super().call(method, arguments, large)
        if method == "stage":
            future = asyncio.get_running_loop().create_future()
            future.set_result({"version": arguments[0], "sums": {"w": "1"}})
        return future


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A publish waits for 50 ms for other engines than the first, or twice as long as the first took."""
    monkeypatch.setattr(staggered_publisher, "MIN_PATIENCE_S", 0.05)
    monkeypatch.setattr(staggered_publisher, "RETRY_S", 0.01)


def publisher(*engines: Recorded, max_lag: int = 2, trainer: Any = None) -> StaggeredPublisher:
    """A connected publisher of these engines."""
    trainer = trainer or Trainer("trainer", [], {"checksums": SUMS}.get)
    ends: Any = [EngineReplica(engine) for engine in engines]  # type: ignore[arg-type]
    sync = SyncConfig(link="delta", verify="full")
    link = StaggeredPublisher(trainer, GeneratorPool(ends), sync, max_lag=max_lag)
    link._names, link._joined, link._connected = ["w"], list(link._members), True
    return link


def engine(name: str, prepare: Callable[[], Any] = lambda: "", sums: Any = SUMS) -> Recorded:
    return Recorded(name, [], lambda method: prepare() if method == "prepare" else {"checksums": sums}.get(method))


def versions(link: StaggeredPublisher) -> list[int]:
    return [g.version for g in link._pool.generators]


def test_a_slow_engine_is_left_behind_and_brought_to_the_newest_version() -> None:
    async def main() -> None:
        received: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        replies = iter([received])
        link = publisher(engine("fast"), engine("slow", lambda: next(replies, "")))
        pool = link._pool
        for version in (1, 2, 3):
            stats = await link.publish(version)
            assert (stats.late, stats.engines_lost, versions(link)) == (1, (), [version, 0])
            assert len(pool.alive) == (2 if version <= 2 else 1), "in service while its lag is at most 2"
        assert pool.version == 3 and pool.choose(pool.generators[1]) is pool.generators[0]
        served: list[int] = []
        pool.on_serve = lambda: served.append(pool.generators[1].version)
        received.set_result("")
        while link._updates:
            await asyncio.sleep(0)
        assert served == [1, 3] and versions(link) == [3, 3] and len(pool.alive) == 2

    asyncio.run(main())


async def publish_waits(link: StaggeredPublisher, version: int, received: asyncio.Future[str]) -> None:
    """Publish to two engines, and assert that the publish ends only after one of them has received the version."""
    publishing = asyncio.ensure_future(link.publish(version))
    await asyncio.sleep(0.3)
    assert not publishing.done()
    received.set_result("")
    assert (await publishing).late == 0 and versions(link) == [version, version]


def test_without_lag_a_publish_waits_for_all_engines() -> None:
    async def main() -> None:
        received: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        link = publisher(engine("fast"), engine("slow", lambda: received), max_lag=0)
        await publish_waits(link, 1, received)

    asyncio.run(main())


def test_without_lag_a_publish_waits_for_an_engine_that_joined_and_serves() -> None:
    async def main() -> None:
        received: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        replies = iter(["", received])
        link = publisher(engine("old"), max_lag=0)
        await link.publish(1)
        joined: Any = EngineReplica(engine("new", lambda: next(replies)))  # type: ignore[arg-type]
        link._pool.change(add=[joined])
        await link.join(joined)
        while not joined.serving.is_set():
            await asyncio.sleep(0)
        await publish_waits(link, 2, received)

    asyncio.run(main())


@pytest.mark.parametrize("method", ["prepare", "swap"])
def test_an_engine_that_serves_the_version_before_tries_again(method: str) -> None:
    """A version did not arrive, or its swap was rolled back. None of its completions is withheld."""

    async def main() -> None:
        tries = iter(range(2))

        def answer(asked: str) -> Any:
            if asked == method and next(tries, None) is not None:
                return "not now" if asked == "prepare" else undone()
            return {"checksums": SUMS, "prepare": ""}.get(asked)

        def undone() -> asyncio.Future[None]:
            assert link._pool.generators[0].version == 0
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            future.set_result(None)
            return future

        link = publisher(Recorded("one", [], answer))
        assert (await link.publish(1)).engines_lost == () and versions(link) == [1]
        assert link._pool.generators[0].quarantined is None and next(tries, None) is None

    asyncio.run(main())


def test_an_engine_that_reaches_no_version_in_time_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staggered_publisher, "CALL_TIMEOUT_S", 0.2)

    async def main() -> None:
        never = engine("never", lambda: "a newer version is published")
        still = engine("still", lambda: asyncio.get_running_loop().create_future())
        link = publisher(engine("fast"), never, still)
        await link.publish(1)
        while not (never.dead and still.dead):
            await asyncio.sleep(0.01)
        lost = (await link.publish(2)).engines_lost
        assert [re.split(";| within", line)[0] for line in sorted(lost)] == [
            "never: a newer version is published", "still did not receive version 1",
        ]  # fmt: skip

    asyncio.run(main())


@pytest.mark.parametrize(
    ("prepare", "sums", "why"),
    [(WorkerError("no space", "RuntimeError", ""), SUMS, "no space"), (WorkerDied("killed"), SUMS, "killed"),
     ("", {"w": 2}, "serves w with other values")],
)  # fmt: skip
def test_an_engine_that_fails_is_removed(prepare: Any, sums: Any, why: str) -> None:
    """Also one that serves other values than were published, whose completions are withheld until then."""

    async def main() -> None:
        bad = engine("bad", lambda: prepare, sums)
        link = publisher(engine("good"), bad)
        (lost,) = (await link.publish(1)).engines_lost
        assert why in lost and "1 of 2 generators are left" in lost
        assert bad.dead and (await link.publish(2)).engines_lost == ()

    asyncio.run(main())


def test_a_publish_waits_for_a_late_engine_if_all_others_fail() -> None:
    async def main() -> None:
        received: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        answers = iter(["", WorkerDied("killed")])
        link = publisher(engine("fails", lambda: next(answers)), engine("late", lambda: received))
        assert (await link.publish(1)).late == 1
        publishing = asyncio.ensure_future(link.publish(2))
        await asyncio.sleep(0.2)
        assert not publishing.done()
        received.set_result("")
        assert (await publishing).late == 0 and versions(link) == [1, 2]

    asyncio.run(main())


def test_the_death_of_all_engines_is_one_that_engines_can_be_replaced_after() -> None:
    """`WorkerDied`, whatever each engine failed with: the run then waits for other engines. The first one to join gets
    the version, with all checksums compared."""

    async def main() -> None:
        link = publisher(engine("only", lambda: WorkerError("no space", "RuntimeError", "")))
        link._pool.supervised = True
        with pytest.raises(WorkerDied, match="no engine received version 1"):
            await link.publish(1)
        process: Any = engine("next")
        successor = EngineReplica(process, started=False)
        link._pool.change(add=[successor])
        await link.join(successor)
        await asyncio.wait_for(successor.serving.wait(), 5)
        assert successor.version == 1 and await link.publish_again(1) is None
        assert process._called == ["next connect", "next prepare", "next swap", "next checksums"]

    asyncio.run(main())


def test_an_engine_joins_in_the_middle_of_a_publish_and_serves_the_newest_version_first() -> None:
    async def main() -> None:
        received: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        link = publisher(engine("fast"), max_lag=2)
        await link.publish(1)
        process: Any = engine("new", lambda: received)
        new = EngineReplica(process, started=False)
        link._pool.change(add=[new])
        publishing = asyncio.ensure_future(link.publish(2))
        await link.join(new)
        assert (await publishing).version == 2
        await link.publish(3)
        assert not new.alive
        process._answer = {"checksums": SUMS, "prepare": ""}.get
        received.set_result("")
        await asyncio.wait_for(new.serving.wait(), 5)
        assert new.version == 3 and process._called.count("new swap") == 2

    asyncio.run(main())


def test_an_engine_that_leaves_is_not_waited_for() -> None:
    async def main() -> None:
        never: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        link = publisher(engine("fast"), engine("gone", lambda: never))
        await link.publish(1)
        await link.leave(link._pool.generators[1])
        assert not link._updates and (await link.publish(2)).late == 0 and never.cancelled()

    asyncio.run(main())


def test_engines_receive_while_the_trainer_sends() -> None:
    """The trainer calculates checksums after it has sent, and is free once it has sent."""

    async def main() -> None:
        called: list[str] = []
        sent: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        one, free = engine("one"), asyncio.Event()
        trainer = Trainer("trainer", called, {"checksums": SUMS, "send": sent}.get)
        publishing = asyncio.ensure_future(publisher(one, trainer=trainer).publish(1, free=free))
        await until(lambda: "one checksums" in one._called)
        assert not (free.is_set() or publishing.done()) and called == [
            "trainer stage",
            "trainer send",
            "trainer checksums",
        ]
        sent.set_result({"bytes": 7})
        await free.wait()
        assert (await publishing).bytes == 7

    asyncio.run(main())


@pytest.mark.parametrize("method", ["send", "checksums"])
def test_an_error_of_the_trainer_ends_the_publish_and_removes_no_engine(method: str) -> None:
    async def main() -> None:
        broken = WorkerError("out of memory", "RuntimeError", "")
        trainer = Trainer("trainer", [], {"checksums": SUMS, method: broken}.get)
        waits = engine("two", lambda: asyncio.get_running_loop().create_future())
        link = publisher(engine("one", lambda: "the version was not sent"), waits, trainer=trainer)
        with pytest.raises(WorkerError, match="out of memory"):
            await asyncio.wait_for(link.publish(1), 5)
        assert not link._lost

    asyncio.run(main())


def test_the_death_of_the_trainer_after_its_calls_ends_the_publish(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines still receive from it, and notice only after a minute of silence."""
    monkeypatch.setattr(staggered_publisher, "TRAINER_POLL_S", 0.01)

    async def main() -> None:
        trainer = Trainer("trainer", [], {"checksums": SUMS}.get)
        link = publisher(engine("one", lambda: asyncio.get_running_loop().create_future()), trainer=trainer)
        publishing = asyncio.ensure_future(link.publish(1))
        await asyncio.sleep(0.05)
        assert not publishing.done()
        trainer.dead = WorkerDied("killed")
        with pytest.raises(WorkerDied, match="killed"):
            await asyncio.wait_for(publishing, 5)
        assert not link._lost
        await link.close()

    asyncio.run(main())


class Orders:
    """The files by which a test holds up the receivers of `SLOW`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def give(self, order: str) -> None:
        (self._folder / order).touch()

    def withdraw(self, order: str) -> None:
        (self._folder / order).unlink(missing_ok=True)
        (self._folder / f"reached {order}").unlink(missing_ok=True)

    async def reached(self, order: str) -> None:
        await until((self._folder / f"reached {order}").exists)


@pytest.fixture
def orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Orders]:
    with module_for_processes("slow_links", SLOW, tmp_path / "slow", monkeypatch) as folder:
        yield Orders(folder)


@pytest.mark.parametrize("order", ["hold 1", "keep 1"])
def test_the_others_do_not_wait_for_a_slow_receiver(order: str, tiny: Path, tmp_path: Path, orders: Orders) -> None:
    """It still receives version 1, or has it, while later ones are published; then it gets the newest."""

    async def main() -> None:
        flags = ["--generator.replicas=3", "--loop.max_lag=2"]
        async with started(tiny, tmp_path, "slow_links:Link", *flags) as cluster:
            link, pool = cluster.link, cluster.generator
            await link.connect(0)
            orders.give(order)
            for version in (1, 2, 3):
                await changing(cluster).change(version)
                assert (await link.publish(version)).late == 1
                assert [g.version for g in pool.generators] == [0, version, version]
            sampled = await asyncio.gather(*(pool.generate([5, 6, 7], Sampling(max_tokens=4)) for _ in range(9)))
            assert {v for completion in sampled for v in completion.versions} == {3}
            orders.withdraw(order)
            await until(lambda: not link._updates)  # type: ignore[union-attr]
            assert [g.version for g in pool.alive] == [3, 3, 3]
            await changing(cluster).change(4)
            stats = await link.publish(4, "full")
            await until(lambda: not link._updates)  # type: ignore[union-attr]
            assert stats.engines_lost == () and [g.version for g in pool.alive] == [4, 4, 4]

    asyncio.run(main())


def test_a_receiver_that_is_killed_in_a_publish_is_removed(tiny: Path, tmp_path: Path, orders: Orders) -> None:
    async def main() -> None:
        flags = ["--generator.replicas=3", "--loop.max_lag=2"]
        async with started(tiny, tmp_path, "slow_links:Link", *flags) as cluster:
            await cluster.link.connect(0)
            orders.give("hold 1")
            await changing(cluster).change(1)
            publishing = asyncio.ensure_future(cluster.link.publish(1))
            await orders.reached("hold 1")
            os.kill(pid_of(cluster.generator.generators[0].process), signal.SIGKILL)
            lost = (await publishing).engines_lost
            await changing(cluster).change(2)
            lost += (await cluster.link.publish(2, "full")).engines_lost
            assert len(lost) == 1 and lost[0].startswith("generator 0 died")
            assert [g.version for g in cluster.generator.alive] == [2, 2]

    asyncio.run(main())


def test_an_engine_that_joins_in_the_middle_of_a_publish_gets_its_version(
    tiny: Path, tmp_path: Path, orders: Orders
) -> None:
    async def main() -> None:
        flags = ["--generator.replicas=3", "--loop.max_lag=2"]
        async with started(tiny, tmp_path, "slow_links:Link", *flags) as cluster:
            link, pool = cluster.link, cluster.generator
            await link.connect(0)
            gone = pool.generators[2]
            os.kill(pid_of(gone.process), signal.SIGKILL)
            await until(lambda: gone.process.dead is not None)
            for order in ("hold 1", "hold 2"):
                orders.give(order)
            await changing(cluster).change(1)
            publishing = asyncio.ensure_future(link.publish(1))
            await orders.reached("hold 1")
            successor, start = gone.create_successor(cluster._config)
            pool.change(add=[successor], remove=[gone])
            await start()
            successor.started = True
            await link.join(successor)
            assert not publishing.done()
            for order in ("hold 1", "hold 2"):
                orders.withdraw(order)
            await publishing
            await until(lambda: not link._updates)  # type: ignore[union-attr]
            assert [g.version for g in pool.alive] == [1, 1, 1]
            await changing(cluster).change(2)
            stats = await link.publish(2, "full")
            await until(lambda: not link._updates)  # type: ignore[union-attr]  # on a crowded machine one may be late
            assert stats.engines_lost == () and [g.version for g in pool.alive] == [2, 2, 2]
            await gone.process.stop(5)

    asyncio.run(main())


def test_no_token_is_sampled_by_another_than_a_published_version(tiny: Path, tmp_path: Path, orders: Orders) -> None:
    """Engines are held up at random, before and after they receive a version, so that publishes overlap. Each token has
    the log-probability that the weights of its version give it, and each request begins within the lag bound."""
    draw, sampled = random.Random(0), list[tuple[int, Completion]]()

    async def requests(cluster: Any, seed: int, done: asyncio.Event) -> None:
        while not done.is_set():
            oldest, sampling = cluster.generator.oldest, Sampling(max_tokens=40, seed=len(sampled), ignore_eos=True)
            sampled.append((oldest, await cluster.generator.generate([5, 6, 2 + seed], sampling)))

    async def main() -> int:
        flags = ["--generator.replicas=3", "--loop.max_lag=1", "--sync.in_flight=recompute"]
        late, done = 0, asyncio.Event()
        async with started(tiny, tmp_path, "slow_links:Link", *flags) as cluster:
            trainer = changing(cluster)
            for version in range(9):
                if version:
                    await trainer.change(version)
                await trainer.store(tmp_path / f"version {version}")
                if not version:
                    await cluster.link.connect(0)
                    asking = [asyncio.create_task(requests(cluster, seed, done)) for seed in range(6)]
                    continue
                for rank in (1, 2):
                    for order in (f"hold {rank}", f"keep {rank}"):
                        (orders.give if draw.random() < 0.4 else orders.withdraw)(order)
                late += (await cluster.link.publish(version)).late
            for order in ("hold 1", "keep 1", "hold 2", "keep 2"):
                orders.withdraw(order)
            await until(lambda: not cluster.link._updates)  # type: ignore[union-attr]
            assert [g.version for g in cluster.generator.alive] == [8, 8, 8]
            done.set()
            await asyncio.gather(*asking)
        return late

    assert asyncio.run(main()) > 4
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / f"version {v}") for v in range(9)]
    versions = {v for _, completion in sampled for v in completion.versions}
    assert versions <= set(range(9)) and len(versions) > 4  # some may be replaced before a token is sampled
    for oldest, completion in sampled:
        assert completion.versions[0] >= oldest
        ids = torch.tensor([[*completion.prompt_ids, *completion.token_ids]])
        for span in completion.spans:
            first = len(completion.prompt_ids) - 1
            with torch.no_grad():
                logits = models[span.version](ids).logits[0, first + span.start : first + span.end]
            found = logits.log_softmax(-1).gather(1, ids[0, 1 + first + span.start : 1 + first + span.end, None])[:, 0]
            assert found.tolist() == pytest.approx(list(completion.logprobs)[span.start : span.end], abs=2e-4)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_run_goes_on_without_a_slow_engine_until_it_is_back(
    replicas: int, tiny: Path, tmp_path: Path, orders: Orders
) -> None:
    """With `generator.min_replicas` engines that are not late it waits for no other, else for the slow engine."""
    minimum = f"--generator.min_replicas={replicas}"
    run = run_of(tiny, tmp_path, "--generator.replicas=2", minimum, "--sync.link=slow_links:Link", "--loop.max_lag=2")

    async def script(run: Warned) -> None:
        pool = run.cluster.generator
        orders.give("hold 1")
        if replicas == 1:
            await step(run, 8)
            assert len(pool.alive) == 1 and pool.generators[0].version < run.state.version - 2
        await until(lambda: len(pool.alive) == 1)
        if replicas == 2:
            await until(lambda: run.waits_for_engines)
        orders.withdraw("hold 1")
        await until(lambda: len(pool.alive) == 2)
        await step(run, 3)
        assert pool.generators[0].version > 8 or replicas == 2

    summary = asyncio.run(play(run, script))
    records = balanced(summary, tmp_path / "run" / "metrics.jsonl")
    assert max(record["lag/max"] for record in records) <= 2 and not summary["engines_lost"]
    assert 1 in {record["sync/engines_late"] for record in records}


def test_a_late_engine_that_dies_is_replaced_in_a_run(tiny: Path, tmp_path: Path, orders: Orders) -> None:
    run = run_of(tiny, tmp_path, "--generator.replicas=2", "--sync.link=slow_links:Link", "--loop.max_lag=2")

    async def script(run: Warned) -> None:
        pool = run.cluster.generator
        orders.give("hold 1")
        await step(run, 5)
        send(pool.generators[0], signal.SIGKILL)
        await until(lambda: run.totals.engine_restarts)
        orders.withdraw("hold 1")
        await until(lambda: len(pool.alive) == 2)
        await step(run, 3)

    summary = asyncio.run(play(run, script))
    balanced(summary, tmp_path / "run" / "metrics.jsonl")
    assert summary["engine_restarts"] == 1


def test_a_trainer_that_dies_while_an_engine_is_late(tiny: Path, tmp_path: Path, orders: Orders) -> None:
    """The next trainer's first publish brings the late engine, too, to the version of the checkpoint."""
    flags = ["--generator.replicas=2", "--sync.link=slow_links:Link", "--loop.max_lag=2", "--checkpoint.every=2"]
    run = run_of(tiny, tmp_path, *flags)

    async def script(run: Warned) -> None:
        orders.give("hold 1")
        await step(run, 5)
        os.kill(run.cluster.trainer_process.process.pid, signal.SIGKILL)  # type: ignore[union-attr]
        await until(lambda: run.trainer_restarts)
        orders.withdraw("hold 1")
        await step(run, 3)
        await until(lambda: len(run.cluster.generator.alive) == 2)

    summary = asyncio.run(play(run, script))
    assert summary["trainer_restarts"] == 1 and not summary["engines_lost"] and not summary["failures"]


def test_the_final_evaluation_leaves_late_engines_out(tiny: Path, tmp_path: Path, orders: Orders) -> None:
    flags = ["--generator.replicas=2", "--sync.link=slow_links:Link", "--loop.max_lag=8", "--loop.steps=5"]
    run = run_of(tiny, tmp_path, *flags, "--evaluation.tasks=12")

    async def main() -> dict[str, Any]:
        training = asyncio.ensure_future(training_loop(run))
        try:
            await until(lambda: run.state.version or training.done())
            orders.give("hold 1")
            return await training
        finally:
            await close(run)

    assert asyncio.run(main())["version"] == 5
    *_, record = [json.loads(line) for line in (tmp_path / "run" / "evaluations.jsonl").read_text().splitlines()]
    assert record["versions"] == [5, 5] and record["eval/failed"] == 0
    assert [g.version == 5 for g in run.cluster.generator.generators] == [False, True]
