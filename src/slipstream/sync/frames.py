"""Streams of frames over TCP: served to authenticated clients, fetched with resumption, and passed on while they come.

Both ends of a connection prove that they have the shared secret before anything else is read. Messages are JSON and
frames of bytes, never pickles. Each frame carries a digest keyed with the secret; a client asks for a damaged frame, or
for the rest after a broken connection, again.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from slipstream.errors import InvalidInput

LARGEST = 2**28  # bytes of a message
DIGEST, NONCE = 16, 32  # bytes
LENGTH = struct.Struct("<Q")
SILENCE_S = 20.0  # after which a connection counts as broken
RETRY_S = 0.2
FAILURES = (OSError, EOFError, ValueError)  # of a connection or its data: try again
Address = tuple[str, int]
Request = dict[str, Any]


class Refused(Exception):
    """The server does not have the requested stream. A second request would fail, too."""


class Superseded(InvalidInput):
    """A version did not arrive in time; the engine serves the one before."""


class Stream:
    """A header and frames, which readers may wait for while they are added."""

    def __init__(self, header: dict[str, Any] | None = None) -> None:
        self._changed = threading.Condition()
        self.header = header
        self._frames: list[bytes] = []
        self._ended = ""  # "complete" or the reason of a failure

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def ended(self) -> bool:
        return bool(self._ended)

    @property
    def size(self) -> int:
        """Bytes of the frames so far."""
        return sum(map(len, self._frames))

    def begin(self, header: dict[str, Any]) -> None:
        with self._changed:
            self.header = header
            self._changed.notify_all()

    def add(self, frame: bytes) -> None:
        with self._changed:
            self._frames.append(frame)
            self._changed.notify_all()

    def end(self, failure: str = "") -> None:
        """No more frames follow. Readers raise `Refused` with the failure, if any."""
        with self._changed:
            self._ended = self._ended or failure or "complete"
            self._changed.notify_all()

    def wait_header(self) -> dict[str, Any]:
        with self._changed:
            self._wait(lambda: self.header is not None)
            assert self.header is not None
            return self.header

    def frames(self, start: int = 0) -> Iterator[bytes]:
        """Frames from number `start` on, as they are added."""
        while True:
            new = self._wait_frames(start)
            if not new:
                return
            yield from new
            start += len(new)

    def _wait_frames(self, start: int) -> list[bytes]:
        with self._changed:
            self._wait(lambda: len(self._frames) > start)
            return self._frames[start:]

    def _wait(self, ready: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: ready() or bool(self._ended))
        if not ready() and self._ended != "complete":
            raise Refused(self._ended)


class Limiter:
    """Limits the bytes per second of all connections of a server together; 0: no limit."""

    def __init__(self, rate: float) -> None:
        self._rate, self._free, self._lock = rate, 0.0, threading.Lock()

    def wait(self, size: int) -> None:
        if not self._rate:
            return
        with self._lock:
            now = time.monotonic()
            self._free = max(now, self._free) + size / self._rate
            delay = self._free - now
        time.sleep(max(0.0, delay))


class FrameServer:
    """Answers requests for streams at a free port of `address`, each in a thread.

    `find` returns the answer to a request, and the stream if the client is to read it here; it may raise `Refused`.
    """

    def __init__(
        self, address: str, secret: bytes, find: Callable[[Request], tuple[Request, Stream | None]], rate: float = 0.0
    ) -> None:
        self._secret, self._find, self._limiter = secret, find, Limiter(rate)
        self._socket = socket.create_server((address, 0), backlog=256)
        self.address: Address = (address, self._socket.getsockname()[1])
        self.sent = 0  # bytes of frames
        self._closed = False
        threading.Thread(target=self._accept, name="frames", daemon=True).start()

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connected, _ = self._socket.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(RETRY_S)  # such as too many open files
                continue
            threading.Thread(target=self._serve, args=(connected,), name="frames", daemon=True).start()

    def _serve(self, connected: socket.socket) -> None:
        """Answer one client. It may break off at any point, or be no client of ours."""
        with contextlib.suppress(*FAILURES), Channel(connected) as connection:
            connection.authenticate(self._secret, b"server", b"client")
            request = json.loads(connection.recv_bytes())
            try:
                answer, stream = self._find(request)
                _send(connection, answer)
                if stream is not None:
                    _send(connection, stream.wait_header())
                    self._send_frames(connection, stream, int(request.get("start", 0)))
            except FAILURES:
                raise
            except Exception as error:  # such as memory that is full: the client reports it
                _send(connection, {"refused": str(error) or type(error).__name__})

    def _send_frames(self, connection: Channel, stream: Stream, start: int) -> None:
        for number, frame in enumerate(stream.frames(start), start):
            self._limiter.wait(len(frame))
            connection.send_bytes(_digest(self._secret, number, frame), frame)
            self.sent += len(frame)
        connection.send_bytes(b"")


def fetch(server: Address, secret: bytes, request: Request, into: Stream, limit: float) -> None:
    """Fetch a stream from `server`, or from the peer that its answer names.

    Frames are added to `into` as they come. A broken connection is made again, and continues after the last whole
    frame; if a peer fails, the server sends the rest. Raises `Refused`, or `TimeoutError` after `limit` seconds without
    a frame.
    """
    last, known, direct = time.monotonic(), len(into), False
    while not into.ended:
        try:
            peer = _fetch_from(server, secret, {**request, "direct": direct}, into)
            if peer:
                direct = True  # if this fails
                with contextlib.suppress(Refused):
                    peer = _fetch_from(peer, secret, {**request, "direct": True}, into)
            if not peer:
                into.end()
                return
        except FAILURES as error:
            direct = True
            if len(into) > known:
                last, known = time.monotonic(), len(into)
            if time.monotonic() - last > limit:
                raise TimeoutError(f"no frame from {server[0]}:{server[1]} for {limit:.3g} s: {error}") from None
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
        while message := connection.recv_bytes():
            digest, frame = message[:DIGEST], bytes(memoryview(message)[DIGEST:])
            if not hmac.compare_digest(digest, _digest(secret, len(into), frame)):
                raise ValueError(f"frame {len(into)} is damaged")
            into.add(frame)
    return None


def _receive(connection: Channel) -> dict[str, Any]:
    message: dict[str, Any] = json.loads(connection.recv_bytes())
    if "refused" in message:
        raise Refused(message["refused"])
    return message


def _send(connection: Channel, message: dict[str, Any]) -> None:
    connection.send_bytes(json.dumps(message).encode())


def _digest(secret: bytes, number: int, frame: bytes) -> bytes:
    digest = hmac.new(secret, struct.pack("<Q", number), "sha256")
    digest.update(frame)
    return digest.digest()[:DIGEST]


class Channel:
    """Messages over a connected socket: a length and that many bytes. Calls fail after `SILENCE_S`.

    A message is read by one system call, since a thread waits for the interpreter's lock after each.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.settimeout(None)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connected.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(SILENCE_S), 0))
        self._socket = connected

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def authenticate(self, secret: bytes, own: bytes, other: bytes) -> None:
        """Prove to the other end that this one has the secret, and the reverse. Raises `PermissionError`.

        `own` and `other` name the roles of the ends, so that no answer can be sent back as the other's.
        """
        challenge = os.urandom(NONCE)
        self.send_bytes(challenge)
        received = self.recv_bytes(NONCE)
        self.send_bytes(hmac.digest(secret, own + received + challenge, "sha256"))
        if not hmac.compare_digest(self.recv_bytes(NONCE), hmac.digest(secret, other + challenge + received, "sha256")):
            raise PermissionError("the other end does not have the secret")

    def send_bytes(self, *parts: bytes) -> None:
        self._socket.sendall(LENGTH.pack(sum(map(len, parts))))
        for part in parts:
            self._socket.sendall(part)

    def recv_bytes(self, largest: int = LARGEST) -> bytearray:
        size: int = LENGTH.unpack(self._read(LENGTH.size))[0]
        if size > largest:
            raise ValueError(f"a message of {size} bytes")
        return self._read(size)

    def _read(self, size: int) -> bytearray:
        found = bytearray(size)
        if size and self._socket.recv_into(found, size, socket.MSG_WAITALL) < size:
            raise EOFError("the connection ended")
        return found
