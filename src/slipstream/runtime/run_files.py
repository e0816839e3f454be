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


def read_summary(run: Path) -> dict[str, Any]:
    """`summary.json`; {} before the end of the run, and if the file is damaged."""
    try:
        return dict(json.loads((run / "summary.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}
