"""Streams of frames over TCP: a server sends them to authenticated clients, which resume broken ones and pass them on.

Messages are JSON and frames of bytes, never pickles; nothing is parsed before its MAC is verified (channel.py). After a
damaged message or a broken connection a client connects again, and asks for the rest. A frame begins with a byte that
says whether the rest is compressed.
"""

from __future__ import annotations

import contextlib
import json
import math
import socket
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from slipstream.errors import InvalidInput
from slipstream.sync.channel import RETRY_S, SILENCE_S, Address, Channel, Limiter, Listener

PLAIN, PACKED, JSON = b"\0", b"\1", b"{"  # first byte of a frame, a compressed frame, and a message that is no frame
SILENCE_LIMIT_S = 60.0  # without a byte: the transfer of a version fails
COMPRESSION = 2e8  # bytes per second of the fastest network on which compression is tried
PROBE = 2**16  # bytes of a larger frame that are compressed first, since 3 MB of a GPU's changes take 50 ms
FAILURES = (OSError, EOFError, ValueError)  # of a connection or its data: try again
Request = dict[str, Any]


class Refused(Exception):
    """The server does not have the requested stream. A second request would fail, too."""


class Superseded(InvalidInput):
    """A version did not arrive, or a newer one was published. The engine serves the version before."""


class Source(Protocol):
    """What a server sends: a header, frames and a trailer. `frames` and `trailer` raise `Refused` after a failure."""

    used: float
    """Time of the last read."""

    rate: float
    """Bytes per second in which the frames arrived, once all have; 0.0 if they are made here."""

    @property
    def trailer(self) -> dict[str, Any]: ...

    def wait_header(self) -> dict[str, Any]: ...

    def frames(self, start: int = 0) -> Iterator[bytes]:
        """Frames from number `start` on, as they come."""


class Stream:
    """Frames between a header and a trailer, which readers may wait for while they are added.

    A stream keeps at most about `window` bytes: it drops frames that its owner has taken, and blocks `add` until the
    owner takes more.
    """

    def __init__(self, header: dict[str, Any] | None = None, window: float = math.inf) -> None:
        self._changed = threading.Condition()
        self.header, self.trailer, self._window = header, dict[str, Any](), window
        self._frames: deque[bytes] = deque()
        self._dropped = self._taken = 0  # numbers of the first frames that are kept, and not taken
        self._kept = 0  # bytes
        self._ended = ""  # "complete" or the reason of a failure
        self.size = self._reached = 0  # bytes of the frames, and with the part of the next one
        self.used = time.monotonic()
        self.progressed = 0.0  # time of the last further byte
        self.rate = self.upstream_rate = 0.0  # bytes per second from first to last frame, here and in the server
        self.rated = 0  # bytes by which `rate` was measured: those of the last connection

    def __len__(self) -> int:
        return self._dropped + len(self._frames)

    @property
    def ended(self) -> bool:
        return bool(self._ended)

    def begin(self, header: dict[str, Any]) -> None:
        with self._changed:
            self.header = header
            self._changed.notify_all()

    def add(self, frame: bytes) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._kept < self._window or self._taken == len(self) or bool(self._ended))
            self._frames.append(frame)
            self.size, self._kept = self.size + len(frame), self._kept + len(frame)
            self._changed.notify_all()

    def reach(self, part: int) -> None:
        """Record that `part` bytes of the next frame have arrived.

        It is no progress if a connection that broke had already brought them.
        """
        if self.size + part > self._reached:
            self._reached, self.progressed = self.size + part, time.monotonic()

    def end(self, failure: str = "", trailer: dict[str, Any] | None = None) -> None:
        """No more frames follow. Readers raise `Refused` with the failure, if any."""
        with self._changed:
            self.trailer = trailer or self.trailer
            self._ended = self._ended or failure or "complete"
            self._changed.notify_all()

    def wait_header(self) -> dict[str, Any]:
        with self._changed:
            self._wait(lambda: self.header is not None)
            assert self.header is not None
            return self.header

    def wait_end(self) -> None:
        with self._changed:
            self._wait(lambda: False)

    def frames(self, start: int = 0) -> Iterator[bytes]:
        """Yield the frames from number `start` to the last. Blocks until the next one is added."""
        while (frame := self._frame(start)) is not None:
            yield frame
            start += 1

    def take(self) -> Iterator[bytes]:
        """Yield the frames to the owner. Drops taken frames while the stream keeps more than `window` bytes."""
        for number, frame in enumerate(self.frames()):
            yield frame
            with self._changed:
                self._taken = number + 1
                while self._kept > self._window and self._dropped < self._taken:
                    self._kept -= len(self._frames.popleft())
                    self._dropped += 1
                self._changed.notify_all()

    def _frame(self, number: int) -> bytes | None:
        """Frame `number`, after a wait until it is added; None if the stream is complete and has fewer frames.

        Raises `Refused` if the stream failed, or if the frame is no longer kept.
        """
        with self._changed:
            self._wait(lambda: len(self) > number)
            if number < self._dropped:
                raise Refused("the first frames are no longer kept")
            self.used = time.monotonic()
            return self._frames[number - self._dropped] if number < len(self) else None

    def _wait(self, ready: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: ready() or bool(self._ended))
        if not ready() and self._ended != "complete":
            raise Refused(self._ended)


class FrameServer:
    """Answers requests for streams at a free port of `address`, each in a thread.

    `find` returns the answer to a request, and the stream if the client is to read it here; it may raise `Refused`.
    `rate` limits the bytes per second of all connections together (0.0: no limit).
    """

    def __init__(
        self, address: str, secret: bytes, find: Callable[[Request], tuple[Request, Source | None]], rate: float = 0.0
    ) -> None:
        self._secret, self._find, self._limiter = secret, find, Limiter(rate)
        self.sent = 0  # bytes of frames
        self._listener = Listener(address, self._serve, "frames")
        self.address: Address = (address, self._listener.port)

    def close(self) -> None:
        self._listener.close()

    def _serve(self, connected: socket.socket) -> None:
        """Answer one client. `FAILURES`, such as a broken connection, end it silently.

        Any other error is sent to the client as "refused".
        """
        with contextlib.suppress(*FAILURES), Channel(connected, self._limiter) as connection:
            connection.authenticate(self._secret, b"server", b"client")
            request = json.loads(bytes(connection.recv_bytes()))
            try:
                answer, source = self._find(request)
                _send(connection, answer)
                if source is not None:
                    self._send_source(connection, source, int(request["start"]), float(answer.get("rate", 0.0)))
            except FAILURES:
                raise
            except Exception as error:  # such as memory that is full: the client reports it
                _send(connection, {"refused": str(error) or type(error).__name__})

    def _send_source(self, connection: Channel, source: Source, start: int, rate: float) -> None:
        """Send the rest of a source, compressed if that is faster at `rate` bytes per second (0.0: unknown)."""
        _send(connection, source.wait_header())
        for plain in source.frames(start):
            frame = plain
            if plain[:1] == PLAIN and 0 < rate < COMPRESSION:
                if packed := _compress(memoryview(plain)[1:], rate):
                    frame = PACKED + packed
                else:
                    rate = 0.0  # don't try again
            connection.send_bytes(frame)
            self.sent += len(frame)
        _send(connection, {"trailer": source.trailer, "rate": source.rate})


def _compress(data: memoryview, rate: float) -> bytes | None:
    """The data compressed, or None if that takes longer than it saves at `rate` bytes per second.

    Of large data the first `PROBE` bytes are tried first.
    """
    if len(data) > PROBE and not _compress(data[:PROBE], rate):
        return None
    began, packed = time.perf_counter(), zlib.compress(data, 1)
    return packed if time.perf_counter() - began <= (len(data) - len(packed)) / rate else None


def unpack(frame: bytes) -> memoryview:
    """The data of a frame."""
    return memoryview(zlib.decompress(memoryview(frame)[1:])) if frame[:1] == PACKED else memoryview(frame)[1:]


def fetch(server: Address, secret: bytes, request: Request, into: Stream, limit: float) -> None:
    """Fetch a stream from `server`, or from a peer that the server redirects to.

    Frames are added to `into` as they come. If a connection breaks or the peer fails, the rest is fetched from the
    server, after the last whole frame. Raises `Refused` if the server refuses the request or has another stream by
    then; `TimeoutError` if a connection fails after `limit` seconds without a further byte of the stream.
    """
    direct, began = False, time.monotonic()
    while not into.ended:
        try:
            peer = _fetch_from(server, secret, {**request, "direct": direct}, into)
            if peer:
                direct = True  # if this fails
                with contextlib.suppress(Refused):
                    peer = _fetch_from(peer, secret, {**request, "direct": True}, into)
            if not peer:
                return
        except FAILURES as error:
            direct = True
            if time.monotonic() - max(began, into.progressed) > limit:
                raise TimeoutError(f"no byte from {server[0]}:{server[1]} for {limit:.3g} s: {error}") from None
            time.sleep(RETRY_S)


def _fetch_from(address: Address, secret: bytes, request: Request, into: Stream) -> Address | None:
    """Read the rest of a stream. Returns the address of a peer to read it from if the server names one."""
    with Channel(socket.create_connection(address, timeout=SILENCE_S)) as connection:
        connection.authenticate(secret, b"client", b"server")
        _send(connection, {**request, "start": len(into)})
        answer = _receive(connection)
        if "peer" in answer:
            return str(answer["peer"][0]), int(answer["peer"][1])
        header = _receive(connection)
        if into.header is None:
            into.begin(header)
        elif into.header != header:
            raise Refused("the stream was replaced while it was read")
        began, before, last = 0.0, into.size, 0.0

        def progress(size: int) -> None:
            nonlocal began
            began = began or time.monotonic()
            into.reach(size)

        while (message := connection.recv_bytes(progress))[:1] != JSON:
            last = time.monotonic()
            into.add(bytes(message))
        end = _parse(message)
        into.rated = into.size - before
        into.rate, into.upstream_rate = into.rated / max(last - began, 1e-6), end["rate"]
        into.end(trailer=end["trailer"])
    return None


def _receive(connection: Channel) -> dict[str, Any]:
    return _parse(connection.recv_bytes())


def _parse(data: memoryview) -> dict[str, Any]:
    message: dict[str, Any] = json.loads(bytes(data))
    if "refused" in message:
        raise Refused(message["refused"])
    return message


def _send(connection: Channel, message: dict[str, Any]) -> None:
    connection.send_bytes(json.dumps(message).encode())
