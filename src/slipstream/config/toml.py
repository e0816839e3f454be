"""Values of options as TOML."""

from __future__ import annotations

import json
import math
from typing import Any

from slipstream.config.section import Section


def to_toml(value: Any) -> str:
    """A value in TOML, on one line, if `is_writable`: None, NaN and infinities give invalid TOML."""
    if isinstance(value, Section):  # what it leaves out is given elsewhere
        value = value.model_dump(exclude_unset=True)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{to_toml(k)} = {to_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(to_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # as JSON, but TOML allows no raw DEL


def is_writable(value: Any) -> bool:
    """Whether `to_toml` can write the value."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_writable(v) for key, v in value.items())
    if isinstance(value, list | tuple):
        return all(map(is_writable, value))
    return isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
