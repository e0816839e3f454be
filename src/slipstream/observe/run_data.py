"""Read the records of a run, while the run writes them or afterwards.

    run = slipstream.load_run("runs/gsm8k-20260101-120000")
    run.metrics[-1]["reward/mean"]
    run.rollouts(step=3)

Damaged or missing records are left out and named in `problems`.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from slipstream.config.schema import ConfigError
from slipstream.observe.formatting import is_finite
from slipstream.runtime.run_directory import lock
from slipstream.runtime.run_files import options_by_name, read_options, read_summary

if TYPE_CHECKING:
    import pandas

Record = dict[str, Any]


def read_lines(path: Path) -> Iterator[Record]:
    """The records of a file of JSON objects, one at a time: those of a long run take gigabytes. Skips damaged lines."""
    with path.open("rb") if path.exists() else nullcontext(()) as lines:
        for line in lines:
            if (record := _parse(line)) is not None:
                yield record


def _parse(line: bytes) -> Record | None:
    """The object in a line of JSON; None for a damaged line."""
    try:
        record = json.loads(line, object_pairs_hook=_intern_keys)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _intern_keys(pairs: list[tuple[str, Any]]) -> Record:
    """An object with interned keys, which are in memory once for all records: keys are most of a record's memory."""
    return {sys.intern(name): value for name, value in pairs}


class JsonLinesFollower:
    """Follows a JSON-lines file, to which another process may append. Each `poll` adds the new objects to `records`.

    `damaged` counts lines that are no objects. `replacements` counts how often the file was replaced or truncated.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.records = path, list[Record]()
        self.damaged = self.replacements = self._inode = self._offset = 0

    def poll(self) -> bool:
        """Read the lines that are complete since the last call. Returns whether the records changed."""
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                replaced = self._offset > 0 and (status.st_ino != self._inode or status.st_size < self._offset)
                if replaced:
                    self.records.clear()
                    self._offset, self.damaged, self.replacements = 0, 0, self.replacements + 1
                self._inode = status.st_ino
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return False
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        known = len(self.records)
        for line in complete.splitlines():
            if (record := _parse(line)) is not None:
                self.records.append(record)
            else:
                self.damaged += 1
        return replaced or len(self.records) > known


class Run:
    """The records of one run: `metrics` by step, `evaluations`, and `events` (see docs/run-directory.md).

    `poll` reads what was written since the run was loaded.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.resolve().name
        self._files = [JsonLinesFollower(path / f"{name}.jsonl") for name in ("metrics", "evaluations", "events")]
        self.metrics, self.evaluations, self.events = (file.records for file in self._files)
        self._unreadable: dict[str, str] = {}  # by file of rollouts
        self.poll()

    def poll(self) -> bool:
        """Read what was written since the last call. Returns whether there was anything new."""
        changes = [file.poll() for file in self._files]
        if any(changes):
            self.__dict__.pop("config", None)  # a resume may replace it
        return any(changes)

    @property
    def replacements(self) -> int:
        """How often a resume has replaced records."""
        return sum(file.replacements for file in self._files)

    @cached_property
    def config(self) -> Record:
        """The resolved configuration by section; {} if `config.toml` is missing or damaged."""
        return read_options(self.path)

    @property
    def options(self) -> Record:
        """The values of the configuration by "section.option" or "environments.N.option"."""
        entries = {f"environments.{i}": entry for i, entry in enumerate(self.config.get("environments", ()))}
        return options_by_name(self.config | entries)

    @property
    def summary(self) -> Record:
        """`summary.json`; {} before the end of the run."""
        return read_summary(self.path)

    @property
    def last(self) -> Record:
        """The last record of `metrics.jsonl` or {}, with the rollout counts of a summary of the same step."""
        last, summary = self.metrics[-1] if self.metrics else {}, self.summary
        if not (counts := summary.get("rollouts")) or summary.get("steps") != last.get("step"):
            return last
        ended = {f"rollout/{fate}": count for fate, count in counts.items()}
        return last | ended | {"rollout/failures": summary.get("failures")}

    @property
    def state(self) -> str:
        """ "running", "complete", "stopped", or "dead" for a run that ended without a summary."""
        try:
            lock(self.path / "lock", "r").close()
        except BlockingIOError:
            return "running"
        except OSError:
            pass  # without a lock file, no process runs it
        summary = self.summary
        if not summary:
            return "dead"
        return "stopped" if summary.get("stopped") else "complete"

    def values(self, name: str) -> list[float]:
        """The finite values of a metric, in the order of the steps."""
        return [record[name] for record in self.metrics if is_finite(record.get(name))]

    @property
    def rollout_steps(self) -> list[int]:
        """Steps whose rollouts are recorded, in ascending order."""
        folder = self.path / "rollouts"
        files = folder.iterdir() if folder.exists() else ()
        return sorted(int(found[1]) for file in files if (found := re.fullmatch(r"step_(\d+)\.parquet", file.name)))

    def table(self, step: int, columns: Sequence[str] | None = None) -> pa.Table | None:
        """The completions of a step, one row each; None if its file is missing or damaged."""
        path = self.path / "rollouts" / f"step_{step:06d}.parquet"
        try:
            return pq.read_table(path, columns=columns and list(columns))
        except (OSError, pa.ArrowException) as error:
            self._unreadable[path.name] = str(error).partition("\n")[0]
            return None

    def rollouts(self, step: int) -> list[Record]:
        """The completions of a step as dictionaries; [] if its file is missing or damaged."""
        table = self.table(step)
        return table.to_pylist() if table is not None else []

    @property
    def problems(self) -> list[str]:
        """What is missing or damaged in the records read so far, one sentence each."""
        found = [] if self.config else ["config.toml is missing or damaged"]
        found += [] if self.metrics else ["no step is recorded"]
        found += [] if self.events or not self.metrics else ["events.jsonl is missing: there is no timeline"]
        found += [] if self.rollout_steps or not self.metrics else ["no rollouts are recorded"]
        found += ["the run ended without a summary: it was killed or failed"] if self.state == "dead" else []
        return found + self.read_errors

    @property
    def read_errors(self) -> list[str]:
        """Damaged lines and unreadable rollout files found so far, one sentence for each file."""
        found = [f"{f.path.name}: {f.damaged} damaged lines were left out" for f in self._files if f.damaged]
        return found + [f"rollouts/{name} can't be read: {why}" for name, why in dict(self._unreadable).items()]

    def plot(self, *names: str, by: str = "step") -> Any:
        """Curves of metrics (default: "reward/mean") over the metric `by`, as a figure of matplotlib.

        Raises `ConfigError` for an unknown metric, and without matplotlib.
        """
        from slipstream.observe.notebook import plot

        return plot(self, names or ("reward/mean",), by)

    def _repr_html_(self) -> str:
        """The run's card in a notebook, with what is written by now."""
        from slipstream.observe.notebook import card

        self.poll()
        return card(self)

    def metrics_frame(self) -> pandas.DataFrame:
        """The metrics, one row a step, with the step as index. Needs pandas."""
        frame = _pandas().DataFrame(self.metrics)
        return frame.set_index("step") if "step" in frame else frame

    def rollouts_frame(self, steps: Sequence[int] | None = None) -> pandas.DataFrame:
        """The completions of `steps`, by default of all steps, one row each. Needs pandas."""
        tables = (self.table(step) for step in (self.rollout_steps if steps is None else steps))
        found = [table for table in tables if table is not None]
        return pa.concat_tables(found).to_pandas() if found else _pandas().DataFrame()


def load_run(path: str | Path) -> Run:
    """The records of the run in directory `path`. Raises `ConfigError` if it holds no run."""
    folder = Path(path)
    if not any((folder / name).exists() for name in ("config.toml", "metrics.jsonl", "lock")):
        raise ConfigError(f"{folder} holds no run (no config.toml); `slipstream runs` lists the runs in runs/")
    return Run(folder)


def group_turns_by_rollout(rows: Iterable[Record]) -> list[list[Record]]:
    """The rows of each rollout, one for each turn. `rows` are in the order of the file."""
    return [list(turns) for _, turns in groupby(rows, key=itemgetter("visit_id", "rollout"))]


def _pandas() -> Any:
    try:
        import pandas
    except ImportError:
        raise ConfigError("DataFrames need pandas: pip install pandas") from None
    return pandas
