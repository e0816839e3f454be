"""Messages between this process and its workers: one thread sends and receives all of them, and waits for no worker.

The worker's end is a `multiprocessing.connection.Connection`: a message is its length and a pickle.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

from slipstream.runtime.event_loop import yield_to_loop

LENGTH = struct.Struct("!i")  # of a message, or `LONG`: then `LONG_LENGTH` follows
LONG, LONG_LENGTH = -1, struct.Struct("!Q")
MAX_LENGTH = 2**31 - 1
SMALL = 2**12  # bytes of messages that don't wait for the event loop: heartbeats arrive in time though it is never idle


class LoopCalls:
    """Calls from one event loop to another, in order. Those of one iteration are handed over together, at its end."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], object]] = []

    def add(self, target: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._hand_over, target)
        self._waiting.append(call)

    def _hand_over(self, target: asyncio.AbstractEventLoop) -> None:
        calls, self._waiting = self._waiting, []
        with contextlib.suppress(RuntimeError):  # the target is closed
            target.call_soon_threadsafe(lambda: [call() for call in calls])


# Calls to and from the thread, for each event loop that has streams.
_calls: WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[LoopCalls, LoopCalls]] = WeakKeyDictionary()


@cache
def _message_loop() -> asyncio.AbstractEventLoop:
    """The event loop that sends and receives, which runs in its own thread."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="messages", daemon=True).start()
    return loop


class MessageStream(asyncio.Protocol):
    """This process's end of a connection to a worker.

    The event loop that creates it calls `receive` for each message, `fail` with the error of a message that can't be
    unpickled, and `end` after the last message.
    """

    def __init__(
        self,
        connection: socket.socket,
        receive: Callable[[Any], object],
        fail: Callable[[Exception], object],
        end: Callable[[], object],
    ) -> None:
        """The stream uses a copy of the connection, and ends with it."""
        loop, thread = asyncio.get_running_loop(), _message_loop()
        to_thread, to_loop = _calls.setdefault(loop, (LoopCalls(), LoopCalls()))
        self._in_thread, self._in_loop = partial(to_thread.add, thread), partial(to_loop.add, loop)
        self._receive, self._fail, self._end = receive, fail, end
        self._arrived = bytearray()
        self._unsent: deque[bytes] = deque()
        self._transport: asyncio.Transport | None = None
        self._writable = False
        ours = connection.dup()
        ours.setblocking(False)
        self._in_thread(lambda: asyncio.ensure_future(thread.connect_accepted_socket(lambda: self, ours)))

    def send(self, messages: Sequence[bytes]) -> None:
        """Send messages, without waiting. They are lost if the connection has ended."""
        self._in_thread(partial(self._write, messages))

    def _write(self, messages: Sequence[bytes]) -> None:
        for message in messages:
            self._unsent += (_length(message), message)
        self._continue()

    def _continue(self) -> None:
        while self._unsent and self._writable and self._transport and not self._transport.is_closing():
            self._transport.write(self._unsent.popleft())

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self.resume_writing()

    def pause_writing(self) -> None:
        """Called while the worker has not read what was sent: the rest is kept here, without a copy."""
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        self._continue()

    def data_received(self, data: bytes) -> None:
        self._arrived += data
        for message in _take_messages(self._arrived):
            if len(message) > SMALL:
                yield_to_loop()
            try:
                self._in_loop(partial(self._receive, pickle.loads(message)))
            except Exception as error:  # such as a class that can't be unpickled here
                self._in_loop(partial(self._fail, error))

    def eof_received(self) -> None:
        assert self._transport
        self._transport.abort()  # what is unsent has no reader

    def connection_lost(self, error: Exception | None) -> None:
        self._unsent.clear()
        self._in_loop(self._end)


def _length(message: bytes) -> bytes:
    size = len(message)
    return LENGTH.pack(size) if size <= MAX_LENGTH else LENGTH.pack(LONG) + LONG_LENGTH.pack(size)


def _take_messages(arrived: bytearray) -> Iterator[memoryview]:
    """Remove the whole messages at the beginning, and yield each; a view is valid until the next one."""
    while len(arrived) >= LENGTH.size:
        (size,), begin = LENGTH.unpack_from(arrived), LENGTH.size
        if size == LONG:
            if len(arrived) < begin + LONG_LENGTH.size:
                return
            (size,), begin = LONG_LENGTH.unpack_from(arrived, begin), begin + LONG_LENGTH.size
        if len(arrived) < begin + size:
            return
        with memoryview(arrived) as all_, all_[begin : begin + size] as message:
            yield message
        del arrived[: begin + size]
