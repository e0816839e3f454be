"""Messages between the controller and a worker's process, over a private socket pair.

Weights never pass here. Messages are pickled, which is safe because both ends are processes of one run. A message of
the controller is a list of calls; large arguments follow it in pieces, of which the call has the number.
"""

from __future__ import annotations

import pickle
import threading
from typing import Any


class Large:
    """Arguments of a call that are serialized once for several processes, in the first thread that sends them.

    They must not change meanwhile.
    """

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        self._arguments = arguments
        self._lock = threading.Lock()
        self._pieces: list[bytes] = []

    def pieces(self) -> list[bytes]:
        """The serialized arguments, from the first call on. Raises what the serialization raises."""
        with self._lock:
            if not self._pieces:
                self._pieces = pickle_in_pieces(self._arguments)
            return self._pieces


def serialize(arguments: tuple[Any, ...], large: bool) -> bytes | Large:
    """The arguments as a pickle; `large` ones are pickled when they are sent."""
    return Large(arguments) if large else pickle.dumps(arguments)


def pickle_in_pieces(value: Any) -> list[bytes]:
    """A pickle in pieces, each of which holds the GIL for less than a millisecond."""
    written = _Pieces()
    pickle.Pickler(written).dump(value)
    return written.pieces


class _Pieces:
    """A file for `pickle.Pickler`, which writes 64 KiB at a time; other threads run between two writes."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def write(self, data: Any) -> None:
        self.pieces.append(bytes(data))
