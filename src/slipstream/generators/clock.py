"""The time of episodes: it stands still while generators are asleep, since no episode can do anything about that."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Clock:
    """Seconds in which generators were there to be asked."""

    def __init__(self) -> None:
        self._stopped: float | None = None  # since then
        self._asleep = 0.0
        self._left: dict[asyncio.Timeout, float] = {}  # seconds of each as of the last `stop`, or of its beginning

    def time(self) -> float:
        """Now, in seconds since nobody knows when."""
        now = time.monotonic() if self._stopped is None else self._stopped
        return now - self._asleep

    def stop(self) -> None:
        if self._stopped is None:
            self._stopped = time.monotonic()
            for timeout in self._running():
                self._left[timeout] = (timeout.when() or 0.0) - asyncio.get_running_loop().time()
                timeout.reschedule(None)

    def go_on(self) -> None:
        if self._stopped is not None:
            self._asleep += time.monotonic() - self._stopped
            self._stopped = None
            for timeout in self._running():
                timeout.reschedule(asyncio.get_running_loop().time() + self._left[timeout])

    @asynccontextmanager
    async def timeout(self, seconds: float | None) -> AsyncIterator[asyncio.Timeout]:
        """`asyncio.timeout` by this clock; None is no limit."""
        async with asyncio.timeout(seconds if self._stopped is None else None) as timeout:
            if seconds is not None:
                self._left[timeout] = seconds
            try:
                yield timeout
            finally:
                self._left.pop(timeout, None)

    def _running(self) -> list[asyncio.Timeout]:
        """Those that are not over; one whose time is up can't be given more."""
        return [timeout for timeout in self._left if not timeout.expired()]
