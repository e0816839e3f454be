"""Format numbers for the terminal; "–" means an unknown value."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

BLOCKS = "▁▂▃▄▅▆▇█"


def is_finite(value: Any) -> bool:
    """Whether the value is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def number(value: Any, digits: int = 0) -> str:
    """A number with thousands separators; "–" for None, NaN, infinities and other types."""
    return f"{value:,.{digits}f}" if is_finite(value) else "–"


def duration(seconds: Any) -> str:
    """Seconds as M:SS or H:MM:SS."""
    if not is_finite(seconds):
        return "–"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def sparkline(values: Sequence[float], width: int) -> str:
    """A chart of `values` in at most `width` block characters."""
    if len(values) < 2:
        return ""
    low, high, width = min(values), max(values), min(width, len(values))
    picked = [values[round(i * (len(values) - 1) / (width - 1))] for i in range(width)]
    return "".join(BLOCKS[round((v - low) / ((high - low) or 1) * (len(BLOCKS) - 1))] for v in picked)


def counts(reasons: Mapping[str, int]) -> str:
    """Reasons with how often each occurred, the most frequent first: "time limit 3, KeyError 1"."""
    return ", ".join(f"{reason} {n}" for reason, n in sorted(reasons.items(), key=lambda pair: -pair[1]))
