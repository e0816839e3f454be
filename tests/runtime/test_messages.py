"""Messages of several workers, which one thread sends and receives."""

from __future__ import annotations

import asyncio
import pickle
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import pytest

from slipstream.runtime import event_loop, messages
from slipstream.runtime.closing import run_bounded
from slipstream.runtime.messages import LONG, LONG_LENGTH, MessageStream

LIMIT_S = 60.0


class Peer:
    """A stream of the running event loop, what it got, and the worker's end of its connection."""

    def __init__(self) -> None:
        ours, self.theirs = socket.socketpair()
        self.got: asyncio.Queue[Any] = asyncio.Queue()
        self.stream = MessageStream(ours, self.got.put_nowait, self.got.put_nowait, lambda: self.got.put_nowait("end"))
        ours.close()

    async def next(self) -> Any:
        return await asyncio.wait_for(self.got.get(), LIMIT_S)

    async def echo(self, value: Any) -> Any:
        """Send a message, and return the stream's next message after the worker has answered with the same."""
        pipe = Connection(self.theirs.dup().detach())
        self.stream.send([pickle.dumps(value)])
        await asyncio.to_thread(lambda: pipe.send(pipe.recv()))
        return await self.next()


def run(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(body())


def test_messages_arrive_whole_however_they_are_split() -> None:
    async def body() -> None:
        peer, first, second = Peer(), pickle.dumps("first"), pickle.dumps("second")
        long = messages.LENGTH.pack(LONG) + LONG_LENGTH.pack(len(first)) + first
        for byte in long + messages.LENGTH.pack(len(second)) + second:
            peer.theirs.sendall(bytes([byte]))
            await asyncio.sleep(0)
        assert [await peer.next(), await peer.next()] == ["first", "second"]
        peer.theirs.close()
        assert await peer.next() == "end"

    run(body)


def test_heartbeats_arrive_in_time_although_the_event_loop_is_never_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop, "YIELD_S", 60.0)

    async def body() -> None:
        peers, heartbeat, began = [Peer() for _ in range(8)], pickle.dumps([(-1, False, (7, 1.0))]), time.monotonic()
        await asyncio.sleep(0.01)  # from now on the loop has work
        for peer in peers:
            peer.theirs.sendall(messages.LENGTH.pack(len(heartbeat)) + heartbeat)
        while any(peer.got.empty() for peer in peers):
            assert time.monotonic() < began + LIMIT_S / 2
            await asyncio.sleep(0)

    run_bounded(body())


def test_a_worker_stopped_in_the_middle_of_a_message_does_not_delay_others() -> None:
    async def body() -> None:
        stopped, other, message = Peer(), Peer(), pickle.dumps("a" * 1_000_000)
        whole = messages.LENGTH.pack(len(message)) + message
        stopped.theirs.sendall(whole[:100_000])
        assert [await other.echo(number) for number in range(3)] == [0, 1, 2]
        assert stopped.got.empty()
        await asyncio.to_thread(stopped.theirs.sendall, whole[100_000:])
        assert await stopped.next() == "a" * 1_000_000

    run(body)


def test_a_worker_that_reads_nothing_does_not_delay_others_and_gets_all_messages_in_order() -> None:
    async def body() -> None:
        busy, other = Peer(), Peer()
        for number in range(20):
            busy.stream.send([pickle.dumps((number, bytes(1_000_000)))])
        assert [await other.echo(number) for number in range(3)] == [0, 1, 2]
        pipe = Connection(busy.theirs.detach())
        received = await asyncio.to_thread(lambda: [pipe.recv()[0] for _ in range(20)])
        assert received == list(range(20))

    run(body)


def test_a_message_that_fails_to_unpickle_is_an_error_of_its_stream_only() -> None:
    async def body() -> None:
        bad, other = Peer(), Peer()
        Connection(bad.theirs.dup().detach()).send_bytes(b"no pickle")
        assert isinstance(await bad.next(), pickle.UnpicklingError)
        assert [await bad.echo("later"), await other.echo("other")] == ["later", "other"]

    run(body)


def test_workers_have_one_thread_together() -> None:
    async def body() -> None:
        await Peer().echo(0)
        before = threading.active_count()
        peers = [Peer() for _ in range(50)]
        for peer in peers:
            peer.theirs.sendall(messages.LENGTH.pack(4) + pickle.dumps(None))
            assert await peer.next() is None
        assert threading.active_count() == before

    run(body)


def test_calls_of_one_iteration_wake_the_other_event_loop_once() -> None:
    async def body() -> None:
        loop, calls, made, wakes = asyncio.get_running_loop(), messages.LoopCalls(), list[int](), list[Any]()
        wake, woken = loop.call_soon_threadsafe, asyncio.Event()
        loop.call_soon_threadsafe = lambda *given: (wakes.append(given), wake(*given))[1]  # type: ignore
        for number in range(10):
            calls.add(loop, partial(made.append, number))
        calls.add(loop, woken.set)
        await asyncio.wait_for(woken.wait(), LIMIT_S)
        assert made == list(range(10)) and len(wakes) == 1

    run(body)
