"""Publishes to engines that take a version at their own pace."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from slipstream.config.schema import SyncConfig
from slipstream.controller import staggered_publisher
from slipstream.controller.staggered_publisher import StaggeredPublisher
from slipstream.generators.pool import EngineReplica, GeneratorPool
from slipstream.runtime.worker import WorkerDied, WorkerError
from tests.runtime.test_faults import Recorded

SUMS = {"w": 1}


def publisher(monkeypatch: pytest.MonkeyPatch, *engines: Recorded) -> StaggeredPublisher:
    """A connected publisher of these engines, which waits 50 ms for others than the first."""
    monkeypatch.setattr(staggered_publisher, "MIN_PATIENCE_S", 0.05)
    trainer: Any = Recorded("trainer", [], {"checksums": SUMS}.get)
    ends: Any = [EngineReplica(engine) for engine in engines]  # type: ignore[arg-type]
    link = StaggeredPublisher(trainer, GeneratorPool(ends), SyncConfig(link="checkpoint", verify="full"))
    link._names, link._joined, link._connected = ["w"], list(link._members), True
    return link


def engine(name: str, prepare: Callable[[], Any] = lambda: None, sums: Any = SUMS) -> Recorded:
    return Recorded(name, [], lambda method: prepare() if method == "prepare" else {"checksums": sums}.get(method))


def test_a_slow_engine_is_left_behind_and_takes_part_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        received = asyncio.get_running_loop().create_future()
        replies = iter([received, None])
        slow = engine("slow", lambda: next(replies))
        fast = engine("fast")
        link = publisher(monkeypatch, fast, slow)
        for version in (1, 2):  # the second while the slow engine still receives the first
            stats = await link.publish(version)
            assert stats.engines_lost == () and [g.version for g in link._pool.generators] == [version, 0]
        received.set_result(None)
        while link._pool.generators[1].version != 1:
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        assert len((await link.publish(3)).pauses) == 2
        assert [g.version for g in link._pool.generators] == [3, 3] and not slow.dead

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["RolledBack", "Superseded"])
def test_an_engine_that_still_serves_a_whole_version_stays(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    async def main() -> None:
        replies = iter([WorkerError("not now", kind, ""), None])
        other = engine("other", lambda: next(replies))
        link = publisher(monkeypatch, engine("one"), other)
        assert (await link.publish(1)).engines_lost == ()
        assert not other.dead and link._pool.generators[1].quarantined is None
        assert len((await link.publish(2)).pauses) == 2

    asyncio.run(main())


@pytest.mark.parametrize(
    ("prepare", "sums", "why"),
    [(WorkerError("no space", "RuntimeError", ""), SUMS, "no space"), (WorkerDied("killed"), SUMS, "killed"),
     (None, {"w": 2}, "serves w with other values")],
)  # fmt: skip
def test_an_engine_that_fails_is_removed(monkeypatch: pytest.MonkeyPatch, prepare: Any, sums: Any, why: str) -> None:
    """Also one that serves other values than were published, whose completions are withheld until then."""

    async def main() -> None:
        bad = engine("bad", lambda: prepare, sums)
        link = publisher(monkeypatch, engine("good"), bad)
        lost = (await link.publish(1)).engines_lost
        assert len(lost) == 1 and why in lost[0] and "1 of 2 generators are left" in lost[0]
        assert bad.dead and (await link.publish(2)).engines_lost == ()

    asyncio.run(main())


def test_a_publish_fails_if_no_engine_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        link = publisher(monkeypatch, engine("only", lambda: WorkerError("no space", "RuntimeError", "")))
        with pytest.raises(WorkerError, match="no space"):
            await link.publish(1)

    asyncio.run(main())


def test_an_engine_that_leaves_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        never = asyncio.get_running_loop().create_future()
        link = publisher(monkeypatch, engine("fast"), engine("gone", lambda: never))
        await link.publish(1)
        await link.leave(link._pool.generators[1])
        assert not link._late and len((await link.publish(2)).pauses) == 1

    asyncio.run(main())
