"""Keeps the event loop responsive: bounds the work of each iteration, and gives it priority over threads."""

from __future__ import annotations

import asyncio
import os
import selectors
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

NICENESS = 5  # of threads, relative to the process: Linux then gives a processor that both want to the event loop 3:1
YIELD_S = 0.02  # for which a thread waits at most, so that a loop that is never idle does not stop it


class _Throttle:
    """The queue of one event loop."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], object]] = deque()
        self._called = False  # in this iteration

    def call(self, function: Callable[[], object]) -> None:
        if self._called:
            self._waiting.append(function)
            return
        self._called = True
        asyncio.get_running_loop().call_soon(self._begin)  # first, in case the call raises
        function()

    def _begin(self) -> None:
        """Begin an iteration: make the call that has waited longest."""
        self._called = bool(self._waiting)
        if self._called:
            asyncio.get_running_loop().call_soon(self._begin)
            self._waiting.popleft()()


_throttles: WeakKeyDictionary[asyncio.AbstractEventLoop, _Throttle] = WeakKeyDictionary()


def call_throttled(function: Callable[..., object], *arguments: Any) -> None:
    """Call the function, at most one for each iteration of the event loop, in order of arrival.

    The call is made now if this iteration has made none. `throttle` counts as a call. Each call, with the coroutines
    that it resumes, should take at most a millisecond. The loop's exception handler gets the exceptions of delayed
    calls.
    """
    _throttles.setdefault(asyncio.get_running_loop(), _Throttle()).call(partial(function, *arguments))


async def throttle() -> None:
    """Wait for a call of `call_throttled`, so that one caller continues in each iteration, in order of arrival."""
    admitted = asyncio.Event()
    call_throttled(admitted.set)
    await admitted.wait()


def lower_priority() -> None:
    """Let the event loop's thread run before this one if both wait for a processor, on Linux.

    For threads whose results no step waits for: on a host with few free cores they delay the event loop otherwise.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, os.getpid()) + NICENESS)


class _YieldedSelector(selectors.DefaultSelector):
    """Holds the lock `busy` while the event loop has work, so that threads can wait for it to become idle.

    Each period of work gets a new lock. A thread that waited for the old lock may still hold it when the next period
    begins, and the event loop must not wait for a thread.
    """

    busy = threading.Lock()  # of the loop that had work last
    _held: threading.Lock | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout > 0:  # else the loop has callbacks to run
            self._release()
        events = super().select(timeout)
        if not self._held:
            self._held = threading.Lock()
            self._held.acquire()
            _YieldedSelector.busy = self._held
        return events

    def close(self) -> None:
        self._release()
        super().close()

    def _release(self) -> None:
        if self._held:
            self._held.release()
            self._held = None


def new_event_loop() -> asyncio.AbstractEventLoop:
    """An event loop that has priority over threads that call `yield_to_loop`."""
    return asyncio.SelectorEventLoop(_YieldedSelector())


def yield_to_loop() -> None:
    """Wait until the event loop is idle, for at most `YIELD_S`.

    Threads call it between two operations that hold the GIL. Otherwise the event loop competes for the GIL with all
    of these threads whenever it has released it, such as for each message that it sends.
    """
    deadline = time.monotonic() + YIELD_S
    while (busy := _YieldedSelector.busy).locked() and (left := deadline - time.monotonic()) > 0:
        if busy.acquire(timeout=left):
            busy.release()
