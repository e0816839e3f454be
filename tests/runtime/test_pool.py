"""Which generator of a pool draws what."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from slipstream.actor import ActorDied, ActorError
from slipstream.generators.base import ContextFull, GenerationError
from slipstream.rollout import Completion, Sampling, VersionSpan
from slipstream.runtime.pool import SLACK, GeneratorPool, ProcessGenerator


class Fake:
    """A generator that draws when it is told to, or dies."""

    def __init__(self) -> None:
        self.actor, self.outstanding, self.seen = self, 0, list[tuple[int, ...]]()
        self.dead: ActorDied | None = None
        self.go = asyncio.Event()

    async def generate(self, prompt_ids: Any, sampling: Sampling) -> Completion:
        self.seen.append(tuple(prompt_ids))
        self.outstanding += 1
        await self.go.wait()
        self.outstanding -= 1
        if self.dead:
            raise self.dead
        return Completion(tuple(prompt_ids), (1,), (0.0,), (VersionSpan(0, 0, 1),), "stop")


def test_what_begins_alike_stays_together_and_load_stays_even() -> None:
    async def main() -> None:
        fakes = [Fake() for _ in range(3)]
        pool: Any = GeneratorPool(fakes)  # type: ignore[arg-type]
        draw = random.Random(0)
        beginnings = [tuple(draw.randrange(99) for _ in range(70)) for _ in range(40)]
        calls = []
        for turn in range(3):  # every episode's turns begin with the first 64 tokens of its prompt
            for beginning in beginnings:
                calls.append(asyncio.ensure_future(pool.generate((*beginning, *range(turn * 5)), Sampling())))
            await asyncio.sleep(0)
        assert max(f.outstanding for f in fakes) - min(f.outstanding for f in fakes) <= SLACK + 1
        homes = [{f for f in fakes if any(seen[:64] == b[:64] for seen in f.seen)} for b in beginnings]
        assert sum(len(home) == 1 for home in homes) > 30
        same = [asyncio.ensure_future(pool.generate((7,) * 80, Sampling())) for _ in range(90)]
        await asyncio.sleep(0)
        assert max(f.outstanding for f in fakes) - min(f.outstanding for f in fakes) <= SLACK + 1, "one prompt for all"
        for fake in fakes:
            fake.go.set()
        await asyncio.gather(*calls, *same)

    asyncio.run(main())


@pytest.mark.parametrize("error", [GenerationError("no"), ContextFull("the context is full")])
def test_why_a_request_can_not_be_served_is_told_across_processes(error: Exception) -> None:
    class Refuses:
        dead = None

        def call(self, method: str, *arguments: Any) -> asyncio.Future[Any]:
            told = asyncio.get_running_loop().create_future()
            told.set_exception(ActorError(str(error), type(error).__name__, ""))
            return told

    async def main() -> None:
        refuses: Any = Refuses()
        with pytest.raises(GenerationError, match=str(error)) as caught:
            await GeneratorPool([ProcessGenerator(refuses)]).generate((5,), Sampling())
        assert caught.type is type(error)

    asyncio.run(main())


def test_what_a_dead_generator_drew_is_drawn_again() -> None:
    async def main() -> None:
        fakes = [Fake(), Fake()]
        pool: Any = GeneratorPool(fakes)  # type: ignore[arg-type]
        calls = [asyncio.ensure_future(pool.generate((i,), Sampling())) for i in range(6)]
        await asyncio.sleep(0)
        fakes[0].dead = ActorDied("killed")
        for fake in fakes:
            fake.go.set()
        assert [c.prompt_ids for c in await asyncio.gather(*calls)] == [(i,) for i in range(6)]
        fakes[1].dead = ActorDied("killed, too")
        try:
            await pool.generate((1,), Sampling())
            raise AssertionError("nobody is left to draw")
        except ActorDied as error:
            assert "killed" in str(error)

    asyncio.run(main())
