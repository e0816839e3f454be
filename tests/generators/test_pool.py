"""Distribution of requests over the generators of a pool."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from typing import Any

import pytest

from slipstream.environments.base import Policy
from slipstream.environments.chat_tokenizer import ChatTokenizer
from slipstream.generators.base import ContextFull, GenerationError
from slipstream.generators.pool import SESSION_SLACK, EngineReplica, GeneratorPool
from slipstream.rollout import Completion, Sampling, VersionSpan
from slipstream.runtime.worker import WorkerDied, WorkerError
from slipstream.runtime.worker_process import WorkerProcess
from tests.conftest import build_tokenizer


class Fake:
    """A generator that answers or dies when the test says so."""

    version = 0

    def __init__(self) -> None:
        self.process, self.pending_requests, self.seen = self, 0, list[tuple[int, ...]]()
        self.dead: WorkerDied | None = None
        self.go = asyncio.Event()

    @property
    def alive(self) -> bool:
        return not self.dead

    async def generate(self, prompt_ids: Any, sampling: Sampling, clock: Any = None) -> Completion:
        self.seen.append(tuple(prompt_ids))
        self.pending_requests += 1
        await self.go.wait()
        self.pending_requests -= 1
        if self.dead:
            raise self.dead
        return Completion(tuple(prompt_ids), (1,), (0.0,), (VersionSpan(0, 0, 1),), "stop")


class Timed:
    """A generator that samples for some iterations of the event loop; its token is its index."""

    version = 0

    def __init__(self, number: int, draw: random.Random) -> None:
        self.process, self.dead, self.number, self.pending_requests, self._draw = self, None, number, 0, draw
        self.most, self.alive = 0, True

    async def generate(self, prompt_ids: Any, sampling: Sampling, clock: Any = None) -> Completion:
        self.pending_requests += 1
        self.most = max(self.most, self.pending_requests)
        for _ in range(self._draw.randint(10, 40)):
            await asyncio.sleep(0)
        self.pending_requests -= 1
        return Completion(tuple(prompt_ids), (self.number,), (0.0,), (VersionSpan(0, 0, 1),), "stop")


@pytest.mark.parametrize("episodes", [64, 1024])
@pytest.mark.parametrize(("system", "own"), [(100, 30), (0, 5), (0, 80)], ids=["system prompt", "short", "own"])
def test_turns_of_an_episode_stay_on_an_engine_and_load_stays_even(system: int, own: int, episodes: int) -> None:
    """For any common prefix of prompts, and also if an agent's template rewrites earlier turns."""

    async def main() -> None:
        draw, tokenizer = random.Random(0), ChatTokenizer(build_tokenizer())
        timed = [Timed(number, draw) for number in range(4)]
        pool: Any = GeneratorPool(timed)  # type: ignore[arg-type]
        spread: list[int] = []

        async def episode() -> list[int]:
            policy = Policy(pool, tokenizer, Sampling(), "0")
            prompt, drawn = [*range(2, 2 + system), *(draw.randrange(2, 90) for _ in range(own))], list[int]()
            for _ in range(6):
                drawn += (await policy.sample(prompt)).token_ids
                spread.append(max(t.pending_requests for t in timed) - min(t.pending_requests for t in timed))
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
        assert max(spread) <= SESSION_SLACK + most // 4 + 1

    asyncio.run(main())


def test_completions_of_one_prompt_are_spread_and_an_overloaded_engine_is_avoided() -> None:
    async def main() -> None:
        fakes = [Fake() for _ in range(3)]
        pool: Any = GeneratorPool(fakes)  # type: ignore[arg-type]
        calls = [asyncio.ensure_future(pool.generate((7,) * 80, Sampling())) for _ in range(9)]
        await asyncio.sleep(0)
        assert [f.pending_requests for f in fakes] == [3, 3, 3]
        session = pool.session()
        for _ in range(40):
            calls.append(asyncio.ensure_future(session.generate((8,), Sampling())))
        await asyncio.sleep(0)
        assert max(f.pending_requests for f in fakes) - min(f.pending_requests for f in fakes) <= SESSION_SLACK + 1
        for fake in fakes:
            fake.go.set()
        await asyncio.gather(*calls)

    asyncio.run(main())


@pytest.mark.parametrize("error", [GenerationError("no"), ContextFull("the context is full")])
def test_the_reason_of_a_refused_request_reaches_the_caller_across_processes(error: Exception) -> None:
    class Refuses:
        dead = None

        def call(self, method: str, *arguments: Any) -> asyncio.Future[Any]:
            told = asyncio.get_running_loop().create_future()
            told.set_exception(WorkerError(str(error), type(error).__name__, ""))
            return told

    async def main() -> None:
        refuses: Any = Refuses()
        with pytest.raises(GenerationError, match=str(error)) as caught:
            await GeneratorPool([EngineReplica(refuses)]).generate((5,), Sampling())
        assert caught.type is type(error)

    asyncio.run(main())


def test_requests_of_a_dead_generator_are_sampled_again() -> None:
    async def main() -> None:
        fakes = [Fake(), Fake()]
        pool: Any = GeneratorPool(fakes)  # type: ignore[arg-type]
        calls = [asyncio.ensure_future(pool.generate((i,), Sampling())) for i in range(6)]
        await asyncio.sleep(0)
        fakes[0].dead = WorkerDied("killed")
        for fake in fakes:
            fake.go.set()
        assert [list(c.prompt_ids) for c in await asyncio.gather(*calls)] == [[i] for i in range(6)]
        fakes[1].dead = WorkerDied("killed, too")
        try:
            await pool.generate((1,), Sampling())
            raise AssertionError("no generator is left")
        except WorkerDied as error:
            assert "killed" in str(error)

    asyncio.run(main())


def test_paused_engines_and_calls_with_a_time_limit_are_excused_from_progress() -> None:
    async def main() -> None:
        process = WorkerProcess("engine")
        generator = EngineReplica(process)
        pool = GeneratorPool([generator])
        assert not process.excused("generate") and not process.excused("sleep")
        pool.pause()
        assert process.excused("generate") and not process.excused("sleep"), "it is to fall asleep in time"
        pool.resume()
        call = asyncio.get_running_loop().create_future()
        answer = asyncio.ensure_future(generator.wait_for(call, "receive version 1", 60.0))
        await asyncio.sleep(0)
        assert process.excused("prepare") and not process.excused("generate"), "it draws while it receives"
        call.set_result("received")
        assert await answer == "received" and not process.excused("prepare")

    asyncio.run(main())
