"""Episodes in flight: at most so many at once, and which of them takes longest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from slipstream.generators.clock import Clock

OURS = str(Path(__file__).parents[1])
LIBRARY = str(Path(asyncio.__file__).parents[1])


class Episode(NamedTuple):
    """One that is played: its task's id, the clock of its time limit, that clock at its beginning, and who plays it."""

    task_id: str
    clock: Clock
    began: float
    player: asyncio.Task[Any] | None

    @property
    def seconds(self) -> float:
        return self.clock.time() - self.began

    @property
    def where(self) -> str:
        """File and line of the user's code that it waits in, or ""."""
        coroutine, found = self.player and self.player.get_coro(), ""
        while frame := getattr(coroutine, "cr_frame", None):
            file = frame.f_code.co_filename
            if not file.startswith((OURS, LIBRARY)) and "site-packages" not in file:
                found = f"{file}, line {frame.f_lineno}"
            coroutine = getattr(coroutine, "cr_await", None)
        return found


class Places:
    """Places for `count` episodes in flight; 0 is no bound."""

    def __init__(self, count: int = 0) -> None:
        self.count = count
        self._free = asyncio.Semaphore(count) if count else None
        self._playing: set[Episode] = set()

    @asynccontextmanager
    async def place(self, task_id: str, clock: Clock) -> AsyncIterator[None]:
        """A place for an episode, whose clock is stopped until it is free."""
        if self._free:
            with clock.paused():
                await self._free.acquire()
        episode = Episode(task_id, clock, clock.time(), asyncio.current_task())
        self._playing.add(episode)
        try:
            yield
        finally:
            self._playing.discard(episode)
            if self._free:
                self._free.release()

    @property
    def longest(self) -> Episode | None:
        """The episode that has taken longest so far, of those in flight."""
        return max(self._playing, key=lambda episode: episode.seconds, default=None)
