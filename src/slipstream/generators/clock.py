"""The time of episodes. A clock stops while engines sleep and while a request waits for a slot: an episode can't change
either, so neither counts against its time limit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from weakref import WeakSet

ASLEEP = "asleep"


class Clock:
    """Seconds that count against a time limit. It runs while there is no reason to stop it, and its `parent` runs."""

    def __init__(self, parent: Clock | None = None) -> None:
        self._reasons: set[object] = set()
        self._children: WeakSet[Clock] = WeakSet()
        self._stopped: float | None = None  # since then
        self._lost = 0.0  # seconds stopped so far
        self._left: dict[asyncio.Timeout, float] = {}  # seconds of each as of the last `stop`, or of its beginning
        if parent is not None:
            parent._children.add(self)
            if parent._stopped is not None:
                self.stop(parent)

    def time(self) -> float:
        """Seconds since an arbitrary moment."""
        now = time.monotonic() if self._stopped is None else self._stopped
        return now - self._lost

    def stop(self, reason: object = ASLEEP) -> None:
        """Stop for a `reason`; it runs again once `go_on` was called for each."""
        self._reasons.add(reason)
        if self._stopped is None:
            self._stopped = time.monotonic()
            for timeout in self._running():
                self._left[timeout] = (timeout.when() or 0.0) - asyncio.get_running_loop().time()
                timeout.reschedule(None)
            for child in self._children:
                child.stop(self)

    def go_on(self, reason: object = ASLEEP) -> None:
        self._reasons.discard(reason)
        if self._stopped is not None and not self._reasons:
            self._lost += time.monotonic() - self._stopped
            self._stopped = None
            for timeout in self._running():
                timeout.reschedule(asyncio.get_running_loop().time() + self._left[timeout])
            for child in self._children:
                child.go_on(self)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop it for the time of a wait."""
        reason = object()
        self.stop(reason)
        try:
            yield
        finally:
            self.go_on(reason)

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


class Slots:
    """Which requests of an engine hold one of its `count` slots (0: unknown, no request waits).

    An engine admits requests in order of arrival, so a request waits while `count` unfinished ones precede it. Its
    clock is stopped for that time.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._held = 0
        self._open = True
        self._waiting: dict[object, Clock] = {}  # in order of arrival

    @contextmanager
    def request(self, clock: Clock) -> Iterator[None]:
        """A request from its arrival at the engine to its end, by the clock of its episode."""
        ticket = object()
        if waits := not self._free:
            self._waiting[ticket] = clock
            clock.stop(ticket)
        self._held += not waits
        try:
            yield
        finally:
            if self._waiting.pop(ticket, None):
                clock.go_on(ticket)
            else:
                self._held -= 1
                self._admit()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """The time in which an engine admits no request, such as while it drains."""
        self._open = False
        try:
            yield
        finally:
            self._open = True
            self._admit()

    @property
    def _free(self) -> bool:
        return self._open and not 0 < self.count <= self._held

    def _admit(self) -> None:
        while self._waiting and self._free:
            ticket, clock = next(iter(self._waiting.items()))
            del self._waiting[ticket]
            self._held += 1
            clock.go_on(ticket)
