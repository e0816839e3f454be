"""Which generator of a pool draws what."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from typing import Any

import pytest

from slipstream.actor import Actor, ActorDied, ActorError
from slipstream.environments.base import Codec, Policy
from slipstream.generators.base import ContextFull, GenerationError
from slipstream.rollout import Completion, Sampling, VersionSpan
from slipstream.runtime.pool import SLACK, GeneratorPool, ProcessGenerator
from tests.conftest import build_tokenizer


class Fake:
    """A generator that draws when it is told to, or dies."""

    def __init__(self) -> None:
        self.actor, self.outstanding, self.seen = self, 0, list[tuple[int, ...]]()
        self.dead: ActorDied | None = None
        self.go = asyncio.Event()

    async def generate(self, prompt_ids: Any, sampling: Sampling, clock: Any = None) -> Completion:
        self.seen.append(tuple(prompt_ids))
        self.outstanding += 1
        await self.go.wait()
        self.outstanding -= 1
        if self.dead:
            raise self.dead
        return Completion(tuple(prompt_ids), (1,), (0.0,), (VersionSpan(0, 0, 1),), "stop")


class Timed:
    """A generator that draws for some turns of the event loop, and says which it is by the token that it draws."""

    def __init__(self, number: int, draw: random.Random) -> None:
        self.actor, self.dead, self.number, self.outstanding, self._draw = self, None, number, 0, draw
        self.most = 0

    async def generate(self, prompt_ids: Any, sampling: Sampling, clock: Any = None) -> Completion:
        self.outstanding += 1
        self.most = max(self.most, self.outstanding)
        for _ in range(self._draw.randint(10, 40)):
            await asyncio.sleep(0)
        self.outstanding -= 1
        return Completion(tuple(prompt_ids), (self.number,), (0.0,), (VersionSpan(0, 0, 1),), "stop")


@pytest.mark.parametrize("episodes", [64, 1024])
@pytest.mark.parametrize(("system", "own"), [(100, 30), (0, 5), (0, 80)], ids=["system prompt", "short", "own"])
def test_turns_of_an_episode_stay_on_an_engine_and_load_stays_even(system: int, own: int, episodes: int) -> None:
    """Whatever prompts have in common, and if an agent's template rewrites what was said."""

    async def main() -> None:
        draw, codec = random.Random(0), Codec(build_tokenizer())
        timed = [Timed(number, draw) for number in range(4)]
        pool: Any = GeneratorPool(timed)  # type: ignore[arg-type]
        spread: list[int] = []

        async def episode() -> list[int]:
            policy = Policy(pool, codec, Sampling(), "0")
            prompt, drawn = [*range(2, 2 + system), *(draw.randrange(2, 90) for _ in range(own))], list[int]()
            for _ in range(6):
                drawn += (await policy.sample(prompt)).token_ids
                spread.append(max(t.outstanding for t in timed) - min(t.outstanding for t in timed))
                prompt += [draw.randrange(2, 90) for _ in range(40)]
                for _ in range(draw.randint(0, 40)):  # a tool works
                    await asyncio.sleep(0)
            return drawn

        played = await asyncio.gather(*(episode() for _ in range(episodes)))
        stayed = [before == after for drawn in played for before, after in itertools.pairwise(drawn)]
        assert sum(stayed) > 0.9 * len(stayed)
        firsts = Counter(drawn[0] for drawn in played)
        assert max(firsts.values()) - min(firsts.values()) <= 1, "all begin at once, on the least loaded"
        most = max(t.most for t in timed)
        assert max(spread) <= SLACK + most // 4 + 1

    asyncio.run(main())


def test_completions_of_one_prompt_are_spread_and_a_crowded_engine_is_left() -> None:
    async def main() -> None:
        fakes = [Fake() for _ in range(3)]
        pool: Any = GeneratorPool(fakes)  # type: ignore[arg-type]
        calls = [asyncio.ensure_future(pool.generate((7,) * 80, Sampling())) for _ in range(9)]
        await asyncio.sleep(0)
        assert [f.outstanding for f in fakes] == [3, 3, 3]
        session = pool.session()
        for _ in range(40):
            calls.append(asyncio.ensure_future(session.generate((8,), Sampling())))
        await asyncio.sleep(0)
        assert max(f.outstanding for f in fakes) - min(f.outstanding for f in fakes) <= SLACK + 1
        for fake in fakes:
            fake.go.set()
        await asyncio.gather(*calls)

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
        assert [list(c.prompt_ids) for c in await asyncio.gather(*calls)] == [[i] for i in range(6)]
        fakes[1].dead = ActorDied("killed, too")
        try:
            await pool.generate((1,), Sampling())
            raise AssertionError("nobody is left to draw")
        except ActorDied as error:
            assert "killed" in str(error)

    asyncio.run(main())


def test_no_progress_is_asked_for_of_an_engine_that_is_held_or_has_a_limit_anyway() -> None:
    async def main() -> None:
        actor = Actor("engine")
        generator = ProcessGenerator(actor)
        pool = GeneratorPool([generator])
        assert not actor.excused("generate") and not actor.excused("sleep")
        pool.hold()
        assert actor.excused("generate") and not actor.excused("sleep"), "it is to fall asleep in time"
        pool.resume()
        call = asyncio.get_running_loop().create_future()
        answer = asyncio.ensure_future(generator.answer(call, "receive version 1", 60.0))
        await asyncio.sleep(0)
        assert actor.excused("prepare") and not actor.excused("generate"), "it draws while it receives"
        call.set_result("received")
        assert await answer == "received" and not actor.excused("prepare")

    asyncio.run(main())
