"""Read the configuration and the summary of a run directory, from any process."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any


def read_options(run: Path) -> dict[str, Any]:
    """The resolved configuration by section; {} if `config.toml` is missing or damaged."""
    try:
        return tomllib.loads((run / "config.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def options_by_name(sections: dict[str, Any]) -> dict[str, Any]:
    """The values of all options, by "section.option". Values that are no tables are left out."""
    tables = [(name, part) for name, part in sections.items() if isinstance(part, dict)]
    return {f"{name}.{option}": value for name, part in tables for option, value in part.items()}


def read_summary(run: Path) -> dict[str, Any]:
    """`summary.json`; {} before the end of the run, and if the file is damaged."""
    try:
        return dict(json.loads((run / "summary.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}
