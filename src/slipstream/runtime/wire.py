"""Calls to processes on other hosts: their arguments are JSON, so that to read a message runs no code.

What is called with batches, configurations, paths and plain values arrives as it was sent (`slipstream.serialization`).
"""

from __future__ import annotations

from typing import Any

from slipstream import serialization
from slipstream.actor import Line


class PlainLine(Line):
    """A connection with another host. One that breaks, in whatever way, or says what makes no sense, has ended."""

    def send(self, message: Any) -> None:
        """Raises `BrokenPipeError`."""
        data = self.dumps(message)
        try:
            self.send_bytes(data)
        except OSError as error:
            raise BrokenPipeError(str(error)) from error

    def recv(self) -> Any:
        """Raises `EOFError`."""
        return self.loads(self.recv_raw())

    def recv_raw(self) -> bytes:
        """Raises `EOFError`."""
        try:
            return self.recv_bytes()
        except OSError as error:
            raise EOFError(str(error)) from error

    @staticmethod
    def dumps(message: Any) -> bytes:
        """Raises `TypeError` for what has no form as JSON here."""
        return serialization.dumps(message)

    @staticmethod
    def pieces(message: Any) -> list[bytes]:
        return list(serialization.pieces(message))

    @staticmethod
    def loads(data: bytes) -> Any:
        """Raises `EOFError` for what is no such message."""
        try:
            return serialization.loads(data)
        except ValueError as error:
            raise EOFError(str(error)) from error
