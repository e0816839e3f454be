"""Messages between the controller and a worker's process of the same host, over a private socket pair.

Weights never pass here. Messages are pickled, which is safe because both ends are processes of one run.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


class Pipe(Connection):
    """A connection that sends messages, and the arguments of calls in them, as pickles."""

    @staticmethod
    def dumps(message: Any) -> bytes:
        return pickle.dumps(message)

    @staticmethod
    def loads(data: bytes) -> Any:
        return pickle.loads(data)

    @staticmethod
    def pieces(message: Any) -> list[bytes]:
        """The result of `dumps` in pieces, each of which holds the GIL for less than a millisecond."""
        written = _Pieces()
        pickle.Pickler(written).dump(message)
        return written.pieces

    def recv_raw(self) -> bytes:
        """The next message as it was sent."""
        return self.recv_bytes()


class _Pieces:
    """A file for `pickle.Pickler`, which writes 64 KiB at a time; other threads run between two writes."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def write(self, data: Any) -> None:
        self.pieces.append(bytes(data))


class Large:
    """Arguments of a call that are serialized once for several processes, in the first thread that sends them.

    They must not change meanwhile.
    """

    def __init__(self, pieces: Callable[[Any], list[bytes]], arguments: tuple[Any, ...]) -> None:
        self._serialize, self._arguments = pieces, arguments
        self._lock = threading.Lock()
        self._pieces: list[bytes] | None = None

    def pieces(self) -> list[bytes]:
        """The serialized arguments, from the first call on. Raises what the serialization raises."""
        with self._lock:
            if self._pieces is None:
                self._pieces = self._serialize(self._arguments)
            return self._pieces
