"""Authenticated messages between hosts: every part carries a MAC, whose key both ends derive from a shared secret."""

from __future__ import annotations

import contextlib
import hmac
import itertools
import os
import socket
import struct
import threading
import time
from collections.abc import Callable

DIGEST, NONCE = 16, 32  # bytes
MORE = getattr(socket, "MSG_MORE", 0)  # more of the message follows
LENGTH = struct.Struct("<Q")
SILENCE_S = 20.0  # without a byte, after which a connection counts as broken
RETRY_S = 0.2
Address = tuple[str, int]


class Listener:
    """Accepts connections at a free port of `address`, and calls `serve` with each in a new thread."""

    def __init__(self, address: str, serve: Callable[[socket.socket], None], name: str) -> None:
        self._serve, self._name, self._closed = serve, name, False
        self._socket = socket.create_server((address, 0), backlog=256)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, name=name, daemon=True).start()

    def close(self) -> None:
        """Accept no more connections. Existing connections stay open until one end closes them."""
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
            threading.Thread(target=self._serve, args=(connected,), name=self._name, daemon=True).start()


class Limiter:
    """Limits the bytes per second of all connections of a server together; 0: no limit."""

    def __init__(self, rate: float = 0.0) -> None:
        self._rate, self._free, self._lock = rate, 0.0, threading.Lock()
        self.slice = max(1, int(rate / 10)) if rate else 2**62  # bytes between two waits: some move in every second

    def wait(self, size: int) -> None:
        """Wait until so many bytes may be sent."""
        if not self._rate:
            return
        with self._lock:
            now = time.monotonic()
            self._free = max(now, self._free) + size / self._rate
            delay = self._free - now
        time.sleep(delay)


class Channel:
    """Authenticated messages over a connected socket. Calls fail after `SILENCE_S` without a byte.

    A message is its length and its bytes, each with a MAC over it and the number of such parts before it. The keys are
    of this connection and direction, so a part that is damaged, left out, repeated or of another connection is refused.
    """

    def __init__(self, connected: socket.socket, limiter: Limiter | None = None) -> None:
        connected.settimeout(None)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connected.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(SILENCE_S), 0))
        self._socket, self._limiter = connected, limiter or Limiter()

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def authenticate(self, secret: bytes, own: bytes, other: bytes) -> None:
        """Derive the keys of both directions from the secret and a nonce of each end.

        `own` and `other` name the roles of the ends. An end without the secret fails at the first message.
        """
        nonce = os.urandom(NONCE)
        self._socket.sendall(nonce)
        nonces = {own: nonce, other: bytes(self._read(NONCE))}
        both = b"".join(nonces[role] for role in sorted(nonces))
        self._sent, self._received = (_Mac(hmac.digest(secret, role + both, "sha256")) for role in (own, other))

    def send_bytes(self, message: bytes) -> None:
        length, view = LENGTH.pack(len(message)), memoryview(message)
        self._socket.sendall(length + self._sent(length), MORE)
        for at in range(0, len(view), self._limiter.slice):
            part = view[at : at + self._limiter.slice]
            self._limiter.wait(len(part))
            self._socket.sendall(part, MORE)
        self._socket.sendall(self._sent(message))

    def recv_bytes(self, progress: Callable[[int], None] = lambda total: None) -> memoryview:
        """The next message. `progress` is called with the bytes of it so far. Raises `PermissionError` if damaged."""
        size = LENGTH.unpack(self._open(LENGTH.size))[0]
        progress(0)
        return self._open(size, progress)

    def _open(self, size: int, progress: Callable[[int], None] = lambda total: None) -> memoryview:
        data = memoryview(self._read(size + DIGEST, progress))
        if not hmac.compare_digest(data[size:], self._received(data[:size])):
            raise PermissionError("a message was damaged on its way, or the other end does not have the secret")
        return data[:size]

    def _read(self, size: int, progress: Callable[[int], None] = lambda total: None) -> bytearray:
        """So many bytes, by few system calls, since a thread waits for the interpreter's lock after each.

        `progress` gets the number of bytes that have been read so far. Raises `EOFError` if the connection ends before.
        """
        found, at = bytearray(size), 0
        while at < size:
            received = self._socket.recv_into(memoryview(found)[at:], size - at, socket.MSG_WAITALL)
            if not received:
                raise EOFError("the connection ended")
            at += received
            progress(at)
        return found


class _Mac:
    """MACs of consecutive parts under one key."""

    def __init__(self, key: bytes) -> None:
        self._key, self._numbers = key, itertools.count()

    def __call__(self, part: bytes | memoryview) -> bytes:
        mac = hmac.new(self._key, LENGTH.pack(next(self._numbers)), "sha256")
        mac.update(part)
        return mac.digest()[:DIGEST]
