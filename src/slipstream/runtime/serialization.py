"""Lossless JSON serialization of arrays and the types of `slipstream.rollout`.

Unlike unpickling, reading it runs no code. Tuples stay tuples, and arrays keep their dtype.
"""

from __future__ import annotations

import base64
import json
from array import array
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slipstream import rollout
from slipstream.runtime.event_loop import yield_to_loop

# The types of `slipstream.rollout` by name, each with its fields.
ROLLOUTS = {
    name: (kind, tuple(f.name for f in fields(kind)) if is_dataclass(kind) else kind._fields)
    for name, kind in vars(rollout).items()
    if isinstance(kind, type) and (is_dataclass(kind) or hasattr(kind, "_fields"))
}
PLAIN = (str, int, float, bool, type(None))


def dumps(value: Any) -> bytes:
    """Serialize a value. Raises `TypeError` for an unsupported type."""
    return json.dumps(encoded(value), separators=(",", ":")).encode()


def loads(data: bytes) -> Any:
    """Deserialize a value. Raises `ValueError` for bytes not written by `dumps`."""
    try:
        return decoded(json.loads(data))
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def write_lines(path: Path, values: Iterable[Any]) -> None:
    """Write one line for each value. Each value is serialized by itself, to hold the interpreter lock briefly."""
    with path.open("wb") as file:
        for value in values:
            yield_to_loop()
            file.write(dumps(value) + b"\n")


def read_lines(path: Path) -> list[Any]:
    """Read the values of a file. Raises `OSError`, or `ValueError` for a file not written by `write_lines`."""
    with path.open("rb") as file:
        return [loads(line) for line in file]


def encoded(value: Any) -> Any:
    """A JSON value: tuples become arrays, and other types without a JSON form become an object with the type as key.

    Raises `TypeError` for types that `decoded` can't restore.
    """
    if isinstance(value, PLAIN):
        return value
    if type(value) is tuple:
        return list(value) if all(type(v) in PLAIN for v in value) else [encoded(v) for v in value]
    if type(value) is list:
        return {"list": encoded(tuple(value))}
    if type(value) is dict:
        return {"dict": [[encoded(key), encoded(v)] for key, v in value.items()]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {"array": [value.dtype.str, list(value.shape), base64.b64encode(value.tobytes()).decode()]}
    if isinstance(value, array):
        return {"numbers": [value.typecode, base64.b64encode(value.tobytes()).decode()]}
    kind, names = ROLLOUTS.get(type(value).__name__, (None, ()))
    if type(value) is kind:
        return {kind.__name__: [encoded(getattr(value, name)) for name in names]}
    raise TypeError(f"a {type(value).__name__} can't be written as JSON")


def decoded(value: Any) -> Any:
    """The inverse of `encoded`."""
    if isinstance(value, list):
        return tuple(v if type(v) in PLAIN else decoded(v) for v in value)
    if not isinstance(value, dict):
        return value
    [(kind, held)] = value.items()
    if kind == "list":
        return list(decoded(held))
    if kind == "dict":
        return {decoded(key): decoded(v) for key, v in held}
    if kind == "bytes":
        return base64.b64decode(held)
    if kind == "array":
        dtype, shape, data = held
        return np.frombuffer(base64.b64decode(data), dtype).reshape(shape).copy()
    if kind == "numbers":
        typecode, data = held
        return array(typecode, base64.b64decode(data))
    return ROLLOUTS[kind][0](*map(decoded, held))
