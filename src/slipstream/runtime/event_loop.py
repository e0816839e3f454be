"""A bound on the coroutines that continue in one iteration of the event loop, so that timers and sockets are served."""

from __future__ import annotations

import asyncio
from collections import deque
from weakref import WeakKeyDictionary

PER_ITERATION = 4  # episodes for each iteration; each takes some tenths of a millisecond


class _Throttle:
    """The queue of `throttle` for one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._used = 0  # callers that continue in this iteration

    async def wait(self) -> None:
        if not self._used:
            self._loop.call_soon(self._begin)
        if self._used < PER_ITERATION:
            self._used += 1
            return
        admitted = self._loop.create_future()
        self._waiting.append(admitted)
        await admitted

    def _begin(self) -> None:
        """Begin an iteration: admit the callers that have waited longest."""
        self._used = 0
        while self._waiting and self._used < PER_ITERATION:
            admitted = self._waiting.popleft()
            if not admitted.done():  # else its coroutine was cancelled
                admitted.set_result(None)
                self._used += 1
        if self._used:
            self._loop.call_soon(self._begin)


_throttles: WeakKeyDictionary[asyncio.AbstractEventLoop, _Throttle] = WeakKeyDictionary()


async def throttle() -> None:
    """Wait until an iteration of the event loop in which fewer than `PER_ITERATION` other callers continue.

    Callers continue in the order in which they called.
    """
    loop = asyncio.get_running_loop()
    if loop not in _throttles:
        _throttles[loop] = _Throttle(loop)
    await _throttles[loop].wait()
