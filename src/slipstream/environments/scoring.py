"""Reward functions that are not async run here: in processes of their own, which can be killed.

A reward that computes for a second would hold up every episode if it ran in the controller; one that never returns, or
takes its process down, costs one rollout here, and a fresh process takes the next.
"""

from __future__ import annotations

import asyncio
import faulthandler
from collections.abc import Callable, Mapping
from typing import Any

from slipstream.actor import Actor, ActorDied, ActorError, Reply
from slipstream.environments.base import Task
from slipstream.rollout import Completion, Rollout

TRACEBACK_LINES = 8
START_LIMIT = 600.0  # seconds for a process to start and import what the function needs


class ScoringError(RuntimeError):
    """A reward function failed on one completion. `reason` is short enough to be counted by."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class ScorerPool:
    """`processes` workers that call the function `reference` ("module:function" or "file.py:function").

    Each is started when it is first needed, and replaced when it took longer than `time_limit` seconds or died. Its
    start, with the imports of the function's module, has a limit of its own and outlives the score that began it.
    """

    def __init__(self, reference: str, processes: int, time_limit: float) -> None:
        self._reference = reference
        self._time_limit = time_limit
        self._closed = False
        self._workers: set[Actor] = set()
        self._free: asyncio.Queue[asyncio.Task[Actor] | None] = asyncio.Queue()
        for _ in range(processes):
            self._free.put_nowait(None)

    async def score(self, task: Task, subject: Completion | Rollout) -> Any:
        """What the function returns for this completion or rollout: a number or a mapping. Raises `ScoringError`."""
        start = await self._free.get() or asyncio.create_task(self._start())
        worker: Actor | None = None
        sound = True
        try:
            await asyncio.wait([start])  # if this score is cancelled here, the next one finds the start further on
            sound = False
            worker = start.result()
            async with asyncio.timeout(self._time_limit):
                answer = await worker.call("score", task, subject)
            sound = True
            return answer
        except ActorError as error:
            sound = worker is not None
            detail = "\n".join(error.details.splitlines()[-TRACEBACK_LINES:])
            raise ScoringError(error.kind, detail) from None
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
        for worker in list(self._workers):
            self._end(worker)

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
            reply(answer if isinstance(answer, Mapping) else float(answer))
        finally:
            faulthandler.cancel_dump_traceback_later()

    def tick(self) -> None: ...

    def close(self) -> None: ...
