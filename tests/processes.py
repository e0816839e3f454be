"""Which processes a test has started, and which of them still live."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import kill


@contextmanager
def module_for_processes(name: str, source: str, folder: Path, path: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module of this source in `folder`, which this process, and those that it starts, can import meanwhile."""
    folder.mkdir()
    (folder / f"{name}.py").write_text(source)
    path.syspath_prepend(str(folder))
    yield folder
    sys.modules.pop(name, None)


def descendants(process: int) -> set[int]:
    """The processes that `process` started, and that those did."""
    children = set(kill.children(process))
    return children.union(*(descendants(child) for child in children))


def lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
