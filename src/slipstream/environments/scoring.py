"""Reward functions that are not async run here: in processes of their own, which can be killed.

A reward that computes for a second would hold up every episode if it ran in the controller; one that never returns, or
takes its process down, costs one rollout here, and a fresh process takes the next.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import traceback
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

from slipstream.actor import Actor, ActorDied, ActorError, Reply, went_well
from slipstream.config import ConfigError
from slipstream.environments.base import NoNumber, Task, as_reward
from slipstream.generators.clock import Clock
from slipstream.rollout import Completion, Rollout

TRACEBACK_LINES = 8
MOST_WORKERS = 32  # by default: each may need 100 MB
START_LIMIT = 600.0  # seconds for a process to start and import what the function needs


class ScoringError(RuntimeError):
    """A reward function failed on one completion. `reason` is short enough to be counted by."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason

    @property
    def one_line(self) -> str:
        """The end of the detail, which names the error."""
        return (str(self).splitlines() or [self.reason])[-1]


class RewardRaised(ScoringError):
    """The function itself raised: a strange answer may be why."""


class ZeroReward(float):
    """The reward in the place of one that raised."""


class RewardErrors:
    """What becomes of a reward function that raises: the reward is 0, and `told` hears of it.

    After `limit` in a row the rollouts fail: the function is broken, not an answer strange.
    """

    def __init__(self, limit: int, told: Callable[[ScoringError], None]) -> None:
        self._limit, self._told = limit, told
        self.in_a_row = 0

    def raised(self, error: ScoringError) -> float:
        """The reward in the place of this error. Raises the error if it is one too many."""
        self.in_a_row += 1
        if self.in_a_row > self._limit:
            raise error
        self._told(error)
        return ZeroReward()

    def succeeded(self) -> None:
        self.in_a_row = 0


class Waits(NamedTuple):
    """The episode that the current task plays: the clock that its waits stop, and what its reward errors do."""

    clock: Clock
    reward_errors: RewardErrors | None


EPISODE: ContextVar[Waits | None] = ContextVar("episode", default=None)


def outside_of_the_clock() -> AbstractContextManager[None]:
    """A wait that does not count against the time limit of the current episode."""
    episode = EPISODE.get()
    return episode.clock.paused() if episode else nullcontext()


async def scored(answer: Awaitable[Any]) -> Any:
    """What a reward function returns, or the reward for one that raises. Raises `ScoringError`, `ConfigError`."""
    episode = EPISODE.get()
    errors = episode.reward_errors if episode else None
    try:
        result = await answer
    except RewardRaised as error:
        failure: ScoringError = error
    except (ScoringError, NoNumber, ConfigError):
        raise
    except Exception as error:
        lines = traceback.format_exc().splitlines()[-TRACEBACK_LINES:]
        failure = RewardRaised(type(error).__name__, "\n".join(lines))
    else:
        if errors:
            errors.succeeded()
        return result
    if errors is None:
        raise failure
    return errors.raised(failure)


class ScorerPool:
    """At most `processes` workers (0: one a core) that call the function `reference` ("module:function" or
    "file.py:function").

    Each is started when it is first needed, and replaced when it took longer than `time_limit` seconds or died. Its
    start, with the imports of the function's module, has a limit of its own and outlives the score that began it.
    Neither a start nor the wait for a free worker counts against an episode's time limit.
    """

    def __init__(self, reference: str, processes: int, time_limit: float) -> None:
        self.processes = processes or cores()
        self._reference = reference
        self._time_limit = time_limit
        self._closed = False
        self._workers: set[Actor] = set()
        self._free: asyncio.LifoQueue[asyncio.Task[Actor] | None] = asyncio.LifoQueue()  # a running one first
        for _ in range(self.processes):
            self._free.put_nowait(None)

    async def score(self, task: Task, subject: Completion | Rollout) -> Any:
        """What the function returns for this completion or rollout: a number or a mapping. Raises `ScoringError`."""
        return await scored(self._score(task, subject))

    async def _score(self, task: Task, subject: Completion | Rollout) -> Any:
        with outside_of_the_clock():
            start = await self._free.get()
            if start is None or _ended(start):
                start = asyncio.create_task(self._start())
                start.add_done_callback(went_well)  # raised here, unless this score is cancelled before
        worker: Actor | None = None
        sound = True
        try:
            with outside_of_the_clock():
                await asyncio.wait([start])  # if this score is cancelled here, the next one finds the start further on
            sound = False
            worker = start.result()
            async with asyncio.timeout(self._time_limit):
                answer = await worker.call("score", task, subject)
            sound = True
            return answer
        except ActorError as error:
            sound = worker is not None
            if error.kind == NoNumber.__name__:
                raise NoNumber(str(error)) from None
            detail = "\n".join(error.details.splitlines()[-TRACEBACK_LINES:])
            raise (RewardRaised if sound else ScoringError)(error.kind, detail) from None
        except TimeoutError:
            raise ScoringError(
                "reward time limit",
                f"the reward took longer than {self._time_limit:g} s; see the time limits in the configuration",
            ) from None
        except ActorDied:
            raise ScoringError("reward process died", "the reward function took its process down") from None
        finally:
            if worker and not sound:  # it may still be at work on a completion that nobody waits for
                self._end(worker)
            self._free.put_nowait(start if sound else None)

    async def close(self) -> None:
        self._closed = True
        workers = list(self._workers)
        for worker in workers:
            self._end(worker)
        await asyncio.gather(*(worker.stop(grace=0.0) for worker in workers))

    async def _start(self) -> Actor:
        """A worker that has loaded the function. Whatever goes wrong on the way, its process is ended."""
        if self._closed:
            raise ActorDied("the scorers are closed")
        worker = Actor("scorer")
        self._workers.add(worker)
        try:
            async with asyncio.timeout(START_LIMIT):
                await worker.start("slipstream.environments.scoring:Scorer", self._reference, self._time_limit)
        except TimeoutError:
            self._end(worker)
            slow = f"{self._reference} took longer than {START_LIMIT:g} s to load; do less in its module on import"
            raise ScoringError("reward start", slow) from None
        except BaseException:
            self._end(worker)
            raise
        return worker

    def _end(self, worker: Actor) -> None:
        self._workers.discard(worker)
        worker.kill()


def _ended(start: asyncio.Task[Actor]) -> bool:
    """Whether a worker failed to start, or died, while no score waited for it."""
    return start.done() and (not went_well(start) or start.result().dead is not None)


class Scorer:
    """What runs in a worker: the function, asked one completion at a time."""

    busy = False

    def __init__(self, reference: str, time_limit: float) -> None:
        from slipstream.things import load_thing

        self._reward: Callable[[Task, Any], Any] = load_thing(reference)
        self._time_limit = time_limit

    def handle(self, method: str, arguments: tuple[Any, ...], reply: Reply) -> None:
        if method != "score":
            return reply(None)
        # The controller ends this process when time is up, unless it was killed itself: then this does, a little later.
        faulthandler.dump_traceback_later(2 * self._time_limit, exit=True)
        try:
            answer = self._reward(*arguments)
            reply(answer if isinstance(answer, Mapping) else as_reward(answer))
        finally:
            faulthandler.cancel_dump_traceback_later()

    def tick(self) -> None: ...

    def close(self) -> None: ...


def cores() -> int:
    """Cores that this process may use, `MOST_WORKERS` at most."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(usable, MOST_WORKERS)
