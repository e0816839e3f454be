"""Send the records of a run to an experiment tracker, by a process that follows the run directory.

A tracker that raises or hangs can't touch the run: the two have nothing in common but files.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import importlib.util
import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol

from slipstream.config.checks import TRACKERS
from slipstream.config.plugins import build, load_object
from slipstream.config.schema import ConfigError
from slipstream.observe.run_data import Record, Run, load_run
from slipstream.runtime.run_directory import lock, write_json

POLL_S = 0.5
BATCH = 100  # steps after which the position is saved
STACK_AFTER_S = 50.0  # without progress, after which the log gets the stack of a tracker
TABLE_ROWS, MAX_TEXT = 8, 10_000  # rollouts in a table, characters in a text
COLUMNS = "task_id", "rollout", "turn", "prompt", "completion", "reward", "advantage", "finish_reason"


class Tracker(Protocol):
    """A connection with one tracker. What a method raises ends the tracker's process, and the run warns of it."""

    def start(self, run: Run, project: str, run_id: str) -> str:
        """Create the tracker's run, or continue `run_id` unless it is "". Returns its id. `project` may be ""."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Log numbers of a step. Those of an evaluation may come later than the metrics of later steps."""

    def table(self, name: str, step: int, rows: Sequence[Record]) -> None:
        """Log rollouts, with `prompt` and `completion`; `name` is "rollouts" or "eval/samples"."""

    def rewind(self, step: int) -> bool:
        """Discard the steps after `step`, which were lost; they are logged again if this returns true."""
        return False

    def finish(self, report: Path | None, complete: bool) -> None:
        """Upload what is pending, and the run's report. `complete`: the run has a summary."""


def label(name: str) -> str:
    """The name of a tracker in messages and file names."""
    return name.rpartition(":")[2]


def check_installed(names: Sequence[str]) -> None:
    """Raise `ConfigError` for a built-in tracker whose package is missing."""
    for name in names:
        if name in TRACKERS and importlib.util.find_spec(name) is None:
            raise ConfigError(f"{name} is not installed; pip install 'slipstream-rl[{name}]', or leave the tracker out")


class Follower:
    """Sends each record of a run to a tracker once. `trackers/NAME.json` holds the tracker's id and the position.

    It is also the worker of a tracker, whose event loop blocks as the tracker does.
    """

    orphan_grace_s = 30.0  # a tracker may need that long to send the last records

    def __init__(self, path: Path, name: str, project: str) -> None:
        self._run, self._name, self._project = Run(path), name, project
        self.progress = 0  # looks at the files
        self.step = self._evaluations = 0  # the last step that was sent, and the number of evaluations
        self._sending = self._ending = False
        self._position = path / "trackers" / f"{label(name)}.json"
        self._position.parent.mkdir(exist_ok=True)

    async def run(self) -> None:
        """Prepare the tracker's process. A scheduler sends SIGTERM to all processes of a run."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    async def follow(self, is_over: Callable[[], bool] | None = None) -> None:
        """Send all records until the run `is_over`, by default until `finish`. Raises what the tracker raises."""
        self._tracker = _load_tracker(self._name)
        file = self._position.with_suffix(".lock")
        while True:
            with contextlib.suppress(BlockingIOError):  # held by the tracker of a controller that was just killed
                locked = lock(file)
                break
            print(f"{file} is held: another process sends the run to this tracker", file=sys.stderr, flush=True)
            await asyncio.sleep(POLL_S)
        with locked:
            self._count_progress()
            saved = json.loads(self._position.read_text()) if self._position.exists() else {}
            self.step, self._evaluations = saved.get("step", 0), saved.get("evaluations", 0)
            self._id = self._tracker.start(self._run, self._project, saved.get("id", ""))
            self._save()
            self._sending, over = True, False
            while (more := self._send()) or not over:
                self._count_progress()
                over = is_over() if is_over else self._ending
                await asyncio.sleep(0 if more or over else POLL_S)
            self._finish()
        faulthandler.cancel_dump_traceback_later()

    async def finish(self) -> None:
        """End once all that is recorded by now is sent."""
        self._ending = True

    def close(self) -> None:
        """Send the last records of a run whose controller was killed."""
        if self._sending:
            while self._send():
                pass
            self._finish()

    def _send(self) -> bool:
        """Send what is new, at most `BATCH` steps. Returns whether there may be more."""
        self._run.poll()
        self._run.events.clear()  # they are not sent, and many
        last = _step_of(self._run.metrics[-1]) if self._run.metrics else 0
        if last < self.step and self._tracker.rewind(last):
            sent = self._run.evaluations[: self._evaluations]
            self.step, self._evaluations = last, sum(_step_of(record) <= last for record in sent)
            self._save()
        steps = [record for record in self._run.metrics if _step_of(record) > self.step][:BATCH]
        # An evaluation follows the record of its step, so a later one is of lost history.
        limit = _step_of(steps[-1]) if steps else last
        unsent = self._run.evaluations[self._evaluations :]
        evaluations = list(takewhile(lambda record: _step_of(record) <= limit, unsent))
        for record in sorted([*steps, *evaluations], key=_step_of):
            self._tracker.metrics(_step_of(record), dict(numbers(record)))
            for name, rows in self._tables(record):
                self._tracker.table(name, _step_of(record), rows)
        if steps or evaluations:
            self.step, self._evaluations = max(limit, self.step), self._evaluations + len(evaluations)
            self._save()
        return bool(steps)

    def _finish(self) -> None:
        self._sending = False
        report, steps = self._run.path / "report.html", self._run.summary.get("steps")
        complete = bool(self._run.metrics) and steps == _step_of(self._run.metrics[-1])
        self._tracker.finish(report if report.exists() else None, complete)

    def _tables(self, record: Record) -> Iterator[tuple[str, list[Record]]]:
        """Samples of an evaluation, or rollouts: of each step below 100, then of each tenth below 1,000, and so on."""
        step = _step_of(record)
        if samples := record.get("samples"):
            yield "eval/samples", _pick_rows(samples)
        due = "eval/score" not in record and step % 10 ** max(0, len(str(step)) - 2) == 0
        if due and (table := self._run.table(step, COLUMNS)):
            yield "rollouts", _pick_rows(table.to_pylist())

    def _save(self) -> None:
        write_json(self._position, {"id": self._id, "step": self.step, "evaluations": self._evaluations})

    def _count_progress(self) -> None:
        """Count progress; without it, the stack is written to the log."""
        self.progress += 1
        faulthandler.dump_traceback_later(STACK_AFTER_S, file=sys.__stderr__ or sys.stderr)


def _load_tracker(name: str) -> Tracker:
    check_installed([name])
    built_in = f"slipstream.observe.tracker_backends:{name.capitalize()}"
    factory = load_object(built_in if name in TRACKERS else name, "tracker", TRACKERS)
    tracker: Tracker = build(factory, (), ("start", "metrics", "table", "rewind", "finish"))
    return tracker


def track(path: Path, name: str, project: str) -> int:
    """Send a run to a tracker, until its end if it is still going on. Returns its last step. Raises `ConfigError`."""
    run, follower = load_run(path), Follower(path, name, project)
    asyncio.run(follower.follow(lambda: run.state != "running"))
    return follower.step


def numbers(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a record but its step; those of a table of counts as `name/key`."""
    for key, value in record.items():
        if isinstance(value, dict):
            yield from numbers(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and key != "step":
            yield prefix + key, value


def _step_of(record: Record) -> int:
    step = record.get("step")
    return step if isinstance(step, int) else 0


def _pick_rows(rows: Sequence[Record]) -> list[Record]:
    """At most `TABLE_ROWS` rows, evenly spaced, with texts that every tracker can encode."""
    picked = sorted({i * len(rows) // TABLE_ROWS for i in range(TABLE_ROWS)}) if rows else []
    return [
        {key: _shorten(value) if isinstance(value, str) else value for key, value in rows[i].items()} for i in picked
    ]


def _shorten(text: str) -> str:
    more = f" … ({len(text) - MAX_TEXT} characters more)" if len(text) > MAX_TEXT else ""
    return text[:MAX_TEXT].encode("utf-8", "replace").decode() + more
