"""Calls to processes on other hosts: their arguments are JSON, so that to read a message runs no code.

What is called with batches, configurations, paths and plain values arrives as it was sent: tuples stay tuples, and
arrays keep their format.
"""

from __future__ import annotations

import base64
import json
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slipstream import rollout
from slipstream.actor import Line
from slipstream.config import Config, validate

# What `slipstream.rollout` defines, by name, with the fields of each.
ROLLOUTS = {
    name: (kind, tuple(f.name for f in fields(kind)) if is_dataclass(kind) else kind._fields)
    for name, kind in vars(rollout).items()
    if isinstance(kind, type) and (is_dataclass(kind) or hasattr(kind, "_fields"))
}
PLAIN = (str, int, float, bool, type(None))


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
        try:
            return self.loads(self.recv_bytes())
        except OSError as error:
            raise EOFError(str(error)) from error

    @staticmethod
    def dumps(message: Any) -> bytes:
        """Raises `TypeError` for what has no form as JSON here."""
        return json.dumps(_encoded(message), separators=(",", ":")).encode()

    @staticmethod
    def loads(data: bytes) -> Any:
        """Raises `EOFError` for what is no such message."""
        try:
            return _decoded(json.loads(data))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise EOFError(f"{type(error).__name__}: {error}") from error


def _encoded(value: Any) -> Any:
    """Tuples as arrays, and all else that JSON does not know as an object that names it."""
    if type(value) in PLAIN:
        return value
    if type(value) is tuple:
        return list(value) if all(type(v) in PLAIN for v in value) else [_encoded(v) for v in value]
    if type(value) is list:
        return {"list": _encoded(tuple(value))}
    if type(value) is dict:
        return {"dict": [[_encoded(key), _encoded(v)] for key, v in value.items()]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, Path):
        return {"path": str(value)}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {"array": [value.dtype.str, list(value.shape), base64.b64encode(value.tobytes()).decode()]}
    if isinstance(value, Config):
        return {"config": value.model_dump(mode="json")}
    kind, names = ROLLOUTS.get(type(value).__name__, (None, ()))
    if type(value) is kind:
        return {kind.__name__: [_encoded(getattr(value, name)) for name in names]}
    raise TypeError(f"a {type(value).__name__} can't be sent to another host")


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(v if type(v) in PLAIN else _decoded(v) for v in value)
    if not isinstance(value, dict):
        return value
    [(kind, held)] = value.items()
    if kind == "list":
        return list(_decoded(held))
    if kind == "dict":
        return {_decoded(key): _decoded(v) for key, v in held}
    if kind == "bytes":
        return base64.b64decode(held)
    if kind == "path":
        return Path(held)
    if kind == "array":
        dtype, shape, data = held
        return np.frombuffer(base64.b64decode(data), dtype).reshape(shape).copy()
    if kind == "config":
        return validate(held)
    return ROLLOUTS[kind][0](*map(_decoded, held))
