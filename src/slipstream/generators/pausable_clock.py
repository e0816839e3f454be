"""Clocks for the time limits of episodes, which exclude the time in which engines sleep or a request is queued."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from weakref import WeakSet

ASLEEP = "asleep"


class Clock:
    """A clock that runs unless it is stopped for at least one reason, or its `parent` is stopped."""

    def __init__(self, parent: Clock | None = None) -> None:
        self._reasons: set[object] = set()
        self._children: WeakSet[Clock] = WeakSet()
        self._stopped_at: float | None = None
        self._stopped_s = 0.0  # total of the stops that have ended
        self._remaining: dict[asyncio.Timeout, float] = {}  # seconds of each timeout as of the last `stop`
        if parent is not None:
            parent._children.add(self)
            if parent._stopped_at is not None:
                self.stop(parent)

    def time(self) -> float:
        """Seconds since an arbitrary moment, without stops."""
        now = time.monotonic() if self._stopped_at is None else self._stopped_at
        return now - self._stopped_s

    def stop(self, reason: object = ASLEEP) -> None:
        """Stop for a `reason`, until `start` was called for each reason."""
        self._reasons.add(reason)
        if self._stopped_at is None:
            self._stopped_at = time.monotonic()
            for timeout in self._active_timeouts():
                self._remaining[timeout] = (timeout.when() or 0.0) - asyncio.get_running_loop().time()
                timeout.reschedule(None)
            for child in self._children:
                child.stop(self)

    def start(self, reason: object = ASLEEP) -> None:
        """Remove a `reason` to be stopped, and run if it was the last one."""
        self._reasons.discard(reason)
        if self._stopped_at is not None and not self._reasons:
            self._stopped_s += time.monotonic() - self._stopped_at
            self._stopped_at = None
            for timeout in self._active_timeouts():
                timeout.reschedule(asyncio.get_running_loop().time() + self._remaining[timeout])
            for child in self._children:
                child.start(self)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Context in which the clock is stopped."""
        reason = object()
        self.stop(reason)
        try:
            yield
        finally:
            self.start(reason)

    @asynccontextmanager
    async def timeout(self, seconds: float | None) -> AsyncIterator[asyncio.Timeout]:
        """`asyncio.timeout` by this clock; None is no limit."""
        async with asyncio.timeout(seconds if self._stopped_at is None else None) as timeout:
            if seconds is not None:
                self._remaining[timeout] = seconds
            try:
                yield timeout
            finally:
                self._remaining.pop(timeout, None)

    def _active_timeouts(self) -> list[asyncio.Timeout]:
        """Timeouts that have not expired; an expired one can't be rescheduled."""
        return [timeout for timeout in self._remaining if not timeout.expired()]


class EngineSlots:
    """Mirrors which requests hold one of an engine's `count` slots (0: unknown, no request is queued).

    An engine admits requests in order of arrival, so a request is queued while `count` unfinished ones precede it. Its
    clock is stopped meanwhile.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._used = 0
        self._admitting = True
        self._queue: dict[object, Clock] = {}  # in order of arrival

    @contextmanager
    def request(self, clock: Clock) -> Iterator[None]:
        """Context of a request from its arrival at the engine to its end, with the clock of its episode."""
        ticket = object()
        if queued := not self._free:
            self._queue[ticket] = clock
            clock.stop(ticket)
        self._used += not queued
        try:
            yield
        finally:
            if self._queue.pop(ticket, None):
                clock.start(ticket)
            else:
                self._used -= 1
                self._admit()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Context in which the engine admits no request, such as while it drains."""
        self._admitting = False
        try:
            yield
        finally:
            self._admitting = True
            self._admit()

    @property
    def _free(self) -> bool:
        return self._admitting and not 0 < self.count <= self._used

    def _admit(self) -> None:
        while self._queue and self._free:
            ticket, clock = next(iter(self._queue.items()))
            del self._queue[ticket]
            self._used += 1
            clock.start(ticket)
