"""Values as JSON: configurations, paths, arrays and what `slipstream.rollout` defines come back as they were.

To read them runs no code, as reading a pickle does. Tuples stay tuples, and arrays keep their format.
"""

from __future__ import annotations

import base64
import json
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slipstream import rollout
from slipstream.config import Config, validate

# What `slipstream.rollout` defines, by name, with the fields of each.
ROLLOUTS = {
    name: (kind, tuple(f.name for f in fields(kind)) if is_dataclass(kind) else kind._fields)
    for name, kind in vars(rollout).items()
    if isinstance(kind, type) and (is_dataclass(kind) or hasattr(kind, "_fields"))
}
PLAIN = (str, int, float, bool, type(None))
PIECE = 2**12  # characters, or parts of JSON, after which a piece ends


def dumps(value: Any) -> bytes:
    """Raises `TypeError` for what has no form as JSON here."""
    return json.dumps(encoded(value), separators=(",", ":")).encode()


def pieces(value: Any) -> Iterator[bytes]:
    """What `dumps` returns, in pieces."""
    written: list[str] = []
    for part in json.JSONEncoder(separators=(",", ":")).iterencode(encoded(value)):
        written.append(part)
        if len(part) > PIECE or len(written) > PIECE:
            yield "".join(written).encode()
            written.clear()
    yield "".join(written).encode()


def loads(data: bytes) -> Any:
    """Raises `ValueError` for what `dumps` has not written."""
    try:
        return decoded(json.loads(data))
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def write_lines(path: Path, values: Iterable[Any]) -> None:
    """Write one line a value, each by itself: no call holds the interpreter for longer than one value takes."""
    with path.open("wb") as file:
        for value in values:
            file.write(dumps(value) + b"\n")


def read_lines(path: Path) -> list[Any]:
    """Raises `OSError`, or `ValueError` for what `write_lines` has not written."""
    with path.open("rb") as file:
        return [loads(line) for line in file]


def encoded(value: Any) -> Any:
    """Tuples as arrays, and all else that JSON does not know as an object that names it."""
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
    if isinstance(value, Path):
        return {"path": str(value)}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {"array": [value.dtype.str, list(value.shape), base64.b64encode(value.tobytes()).decode()]}
    if isinstance(value, array):
        return {"numbers": [value.typecode, base64.b64encode(value.tobytes()).decode()]}
    if isinstance(value, Config):
        return {"config": value.model_dump(mode="json")}
    kind, names = ROLLOUTS.get(type(value).__name__, (None, ()))
    if type(value) is kind:
        return {kind.__name__: [encoded(getattr(value, name)) for name in names]}
    raise TypeError(f"a {type(value).__name__} can't be written as JSON")


def decoded(value: Any) -> Any:
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
    if kind == "path":
        return Path(held)
    if kind == "array":
        dtype, shape, data = held
        return np.frombuffer(base64.b64decode(data), dtype).reshape(shape).copy()
    if kind == "numbers":
        typecode, data = held
        return array(typecode, base64.b64decode(data))
    if kind == "config":
        return validate(held)
    return ROLLOUTS[kind][0](*map(decoded, held))
