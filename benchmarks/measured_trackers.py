"""Trackers for `trackers.py`. Imports no tensor library."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from slipstream.observe.run_data import Record, Run


class Counts:
    """Writes the number of steps that it got to the file `steps_sent` of the run directory."""

    def start(self, run: Run, project: str, run_id: str) -> str:
        self._path, self._steps = run.path, set[int]()
        return ""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._steps.add(step)

    def table(self, name: str, step: int, rows: Sequence[Record]) -> None: ...

    def rewind(self, step: int) -> bool:
        return False

    def finish(self, report: Path | None, complete: bool) -> None:
        (self._path / "steps_sent").write_text(str(len(self._steps)))


class Hangs(Counts):
    """Never returns from its first call after its start."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        threading.Event().wait()


class Raises(Counts):
    """Raises in its first call after its start."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        raise ConnectionError("no route to host")
