"""Which processes a test has started, and which of them still live."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import kill


def descendants(process: int) -> set[int]:
    """The processes that `process` started, and that those did."""
    children = set(kill.children(process))
    return children.union(*(descendants(child) for child in children))


def lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
