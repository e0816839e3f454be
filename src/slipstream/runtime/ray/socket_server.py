"""Passes open sockets of this process to processes of the same user on the same host."""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

NUMBER = struct.Struct("!Q")
TIMEOUT_S = 5.0  # for a request, and for its answer


@dataclass(frozen=True)
class Offer:
    """A socket that can be taken once, on one node of a Ray cluster."""

    node: str
    server: str
    number: int

    def take(self, own_node: str) -> socket.socket | None:
        """Receive the offered socket, which is open already, as a file descriptor. The caller is on `own_node`.

        None on another node, if the server can't be reached, or if the socket was taken or dropped before.
        """
        if own_node != self.node:
            return None
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as asking:
            asking.settimeout(TIMEOUT_S)
            asking.connect(self.server)
            asking.sendall(NUMBER.pack(self.number))
            _, descriptors, _, _ = socket.recv_fds(asking, 1, 1)
            return socket.socket(fileno=descriptors[0]) if descriptors else None
        return None


class SocketServer:
    """Passes offered sockets to processes of the same user, which connect through a private directory.

    The server keeps weak references: an offer ends when its owner drops the socket.
    """

    def __init__(self, node: str) -> None:
        self._node, self._numbers = node, itertools.count()
        self._sockets: WeakValueDictionary[int, socket.socket] = WeakValueDictionary()
        self._directory = tempfile.TemporaryDirectory(prefix="slipstream-")
        self._path = str(Path(self._directory.name, "sockets"))
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self._path)
        self._listener.listen(256)
        threading.Thread(target=self._serve, name="sockets for workers", daemon=True).start()

    def offer(self, given: socket.socket) -> Offer:
        number = next(self._numbers)
        self._sockets[number] = given
        return Offer(self._node, self._path, number)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends `accept`
        self._listener.close()
        self._directory.cleanup()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                asking, _ = self._listener.accept()
                with asking, contextlib.suppress(OSError, struct.error):  # the other end is gone
                    asking.settimeout(TIMEOUT_S)
                    given = self._sockets.pop(NUMBER.unpack(asking.recv(NUMBER.size))[0], None)
                    if given is not None:
                        socket.send_fds(asking, [b"\0"], [given.fileno()])
