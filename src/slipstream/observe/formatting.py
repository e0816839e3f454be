"""Format numbers and texts for the terminal; "–" means an unknown value."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.config.schema import SECTIONS

SHOWN = 300  # characters of a text
REASONS = 5  # that are named
BLOCKS = "▁▂▃▄▅▆▇█"


def is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def number(value: Any, digits: int = 0) -> str:
    """A number with thousands separators; "–" for None, NaN, infinities and other types."""
    return f"{value:,.{digits}f}" if is_finite(value) else "–"


def short(value: Any) -> str:
    """A number with 3 significant digits; "–" for None, NaN, infinities and other types."""
    return f"{value:.3g}" if is_finite(value) else "–"


def plural(count: int, noun: str) -> str:
    """ "1 task" or "2 tasks"."""
    return f"{count} {noun}{'s' * (count != 1)}"


def duration(seconds: Any) -> str:
    """Seconds as M:SS or H:MM:SS."""
    if not is_finite(seconds):
        return "–"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def sparkline(values: Sequence[float], width: int) -> str:
    """A chart of `values` in at most `width` (2 or more) block characters; "" for fewer than two values."""
    if len(values) < 2:
        return ""
    low, high, width = min(values), max(values), min(width, len(values))
    picked = [values[round(i * (len(values) - 1) / (width - 1))] for i in range(width)]
    return "".join(BLOCKS[round((v - low) / ((high - low) or 1) * (len(BLOCKS) - 1))] for v in picked)


def counts(reasons: Mapping[str, int]) -> str:
    """The most frequent reasons with how often each occurred: "time limit 3, KeyError 1"."""
    return ", ".join(f"{shorten(reason, 120)} {n}" for reason, n in Counter(reasons).most_common(REASONS))


def shorten(text: str, length: int = SHOWN) -> str:
    """Text on one line that is safe to print: line breaks as ↵, control characters as ·, a long middle left out."""
    half = length // 2
    if len(text) > 4 * length:  # before the work on single characters
        text = f"{text[: 2 * length]}{text[-2 * length :]}"
    text = re.sub(r"\s*\n\s*", " ↵ ", text.strip()).replace("\t", " ")
    text = "".join(c if c.isprintable() else "·" for c in text)  # also marks that reverse text, and lone surrogates
    return text if len(text) <= length else f"{text[:half]} … {text[-half:]}"


def by_label(record: Mapping[str, Any], name: str, kind: str = "environments") -> dict[str, Any]:
    """A record's values of "environments/LABEL/name", or of another `kind`, by label; {} for a run of one.

    `name` begins with "eval/" for values of an evaluation. A label without the value has None.
    """
    prefix, name = (f"eval/{kind}/", name[5:]) if name.startswith("eval/") else (f"{kind}/", name)
    labels = dict.fromkeys(key.removeprefix(prefix).partition("/")[0] for key in record if key.startswith(prefix))
    return {label: record.get(f"{prefix}{label}/{name}") for label in labels} if len(labels) > 1 else {}


def annotate_options(text: str, config: Mapping[str, Any]) -> str:
    """The text of a remedy, with "(now VALUE, default VALUE)" after each option in it that has no value there."""

    def annotate(found: re.Match[str]) -> str:
        section, key = found.groups()
        if section not in SECTIONS or key not in config.get(section, {}):
            return found[0]
        value, default = config[section][key], SECTIONS[section].model_fields[key].default
        usual = "the default" if value == default else f"default {json.dumps(default, default=str)}"
        return f"{found[0]} (now {json.dumps(value)}, {usual})"

    return re.sub(r"\b([a-z]+)\.([a-z_]+)\b(?! =)", annotate, text)
