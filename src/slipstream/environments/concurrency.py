"""Bound the number of episodes in flight and the rate of calls, and find the longest-running episode."""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.generators.pausable_clock import Clock

PACKAGE = str(Path(__file__).parents[1])
STANDARD_LIBRARY = str(Path(asyncio.__file__).parents[1])


class RateLimiter:
    """Lets at most `per_second` callers pass each second, evenly spaced in order of arrival; 0: all at once."""

    def __init__(self, per_second: float) -> None:
        self._interval = 1 / per_second if per_second else 0.0
        self._next = 0.0  # time of the event loop
        self._lock = asyncio.Lock()  # first come, first served; a cancelled waiter leaves the queue

    async def wait(self) -> None:
        """Wait for the caller's turn."""
        async with self._lock:
            now = asyncio.get_running_loop().time()
            turn = max(now, self._next)
            if turn > now:
                await asyncio.sleep(turn - now)
            self._next = turn + self._interval


@functools.cache
def shared_limiter(_label: str, per_second: float) -> RateLimiter:
    """The limiter of an environment in this process."""
    return RateLimiter(per_second)


@dataclass(eq=False)
class Episode:
    """An episode in flight. `clock` is that of its `timeout`, `began` the time on it, `player` its asyncio task."""

    task_id: str
    timeout: float
    clock: Clock
    began: float
    player: asyncio.Task[Any]

    @property
    def seconds(self) -> float:
        """Seconds since its beginning, on its clock."""
        return self.clock.time() - self.began

    @property
    def where(self) -> str:
        """File and line of the user's code that the episode awaits in, or ""."""
        coroutine: Any = self.player.get_coro()
        found = ""
        while frame := getattr(coroutine, "cr_frame", None):
            file = frame.f_code.co_filename
            if not file.startswith((PACKAGE, STANDARD_LIBRARY)) and "site-packages" not in file:
                found = f"{file}, line {frame.f_lineno}"
            coroutine = getattr(coroutine, "cr_await", None)
        return found


class EpisodeSlots:
    """At most `count` episodes are in flight; 0: unbounded."""

    def __init__(self, count: int = 0) -> None:
        self.count = count
        self._free = asyncio.Semaphore(count or sys.maxsize)
        self._in_flight: set[Episode] = set()

    def grow(self, count: int) -> None:
        """Allow `count` episodes, if these are more than before."""
        for _ in range(count - self.count if self.count else 0):
            self._free.release()
        self.count = max(self.count, count) if self.count else 0

    @asynccontextmanager
    async def acquire(self, task_id: str, timeout: float, clock: Clock) -> AsyncIterator[Episode]:
        """Hold a slot for the current task's episode. `clock` is paused during the wait for a free slot."""
        player = asyncio.current_task()
        assert player, "an episode runs in a task"
        with clock.stopped():
            await self._free.acquire()
        episode = Episode(task_id, timeout, clock, clock.time(), player)
        self._in_flight.add(episode)
        try:
            yield episode
        finally:
            self._in_flight.discard(episode)
            self._free.release()

    @property
    def longest(self) -> Episode | None:
        """The episode in flight that has taken longest so far."""
        return max(self._in_flight, key=lambda episode: episode.seconds, default=None)
