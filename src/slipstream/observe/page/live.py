"""The data of the live page: all of it at first, then what was added since a cursor that the page holds."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from slipstream.observe.page.data import columns, describe_options, described
from slipstream.observe.page.events import Tables
from slipstream.observe.page.rollouts import RolloutColumns, TokenTexts
from slipstream.observe.run_data import Run

POLL_S = 0.5  # between two looks at the files, for any number of pages
READ_S = 0.3  # for rollouts of earlier steps in one answer, so that metrics don't wait for them
PAUSE = 50  # times the seconds that fractions and verdict took to compute, before they are computed again
MAX_MARKS = 600  # cursors that are remembered


class LiveRun:
    """The page's data of one run: tables that grow until a resume replaces records."""

    def __init__(self, run: Run) -> None:
        self.run, self._texts = run, TokenTexts(None)
        self.clear()

    def clear(self) -> None:
        """Forget what came from the records."""
        self._replaced = self.run.replaced
        self._metrics: dict[str, list[Any]] = {}
        self._evaluations: dict[str, list[Any]] = {}
        self._tables, self._rollouts = Tables(), RolloutColumns()
        self._read = [0, 0, 0]  # records of metrics, evaluations and events
        self._step = -1  # the last one whose rollouts were read
        self.unread: list[int] = []  # steps of rollouts
        self._described: dict[str, Any] = {}
        self._measured: dict[str, Any] = {}
        self._measure_at, self._is_measured = 0.0, False

    def poll(self) -> tuple[bool, bool]:
        """Read what was written. Returns whether the data changed, and whether earlier data became invalid."""
        changed, run = self.run.poll(), self.run
        replaced = run.replaced != self._replaced
        if replaced:
            self.clear()
        state = run.state
        if changed := changed or not self._described or state != self._described["state"]:
            self._add_records()
            last = run.metrics[-1].get("step") if run.metrics and state == "running" else None
            # A step's rollouts may be written again until its line is there.
            self.unread = [step for step in run.rollout_steps if self._step < step <= (last or math.inf)]
        read = self._add_rollouts()
        if changed:
            self._described = described(run) | {"state": state}
        elif read:
            self._described["problems"] = run.problems
        return self._measure(changed) or changed or read, replaced

    def _add_records(self) -> None:
        run, (metrics, evaluations, events) = self.run, self._read
        extend(self._metrics, columns(run.metrics[metrics:]))
        extend(self._evaluations, columns(run.evaluations[evaluations:]))
        for event in run.events[events:]:
            if isinstance(event.get("start"), int | float):
                self._tables.add(event)
        self._read = [len(run.metrics), len(run.evaluations), len(run.events)]

    def _add_rollouts(self) -> bool:
        end, found = time.monotonic() + READ_S, bool(self.unread)
        while self.unread and time.monotonic() < end:
            self._step = self.unread.pop(0)
            self._rollouts.add(self.run, self._step)
        return found

    def _measure(self, changed: bool) -> bool:
        """Compute fractions and verdict, which needs all events, unless that was done a short time ago."""
        self._is_measured &= not changed
        began = time.monotonic()
        if self._is_measured or began < self._measure_at:
            return False
        self._measured, self._is_measured = self._tables.measure(self.run), True
        self._measure_at = began + PAUSE * (time.monotonic() - began)
        return True

    @property
    def texts(self) -> TokenTexts:
        if self._texts.tokenizer is None:
            self._texts = TokenTexts.of(self.run)
        return self._texts

    def growing(self) -> dict[str, Any]:
        tables, rollouts = self._tables.data(), self._rollouts.data()
        return {"metrics": self._metrics, "evaluations": self._evaluations, "timeline": tables, "rollouts": rollouts}

    def data(self, sizes: dict[str, Any]) -> dict[str, Any]:
        """What to `set` and what to `append` on a page whose tables have these sizes."""
        return {"set": self._described | {"timeline": self._measured}, "append": after(self.growing(), sizes)}


class LivePage:
    """The data of a page on `runs` for any number of readers."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = [LiveRun(run) for run in runs]
        self._began, self._version, self._polled = time.time_ns(), 0, -math.inf
        self._marks: dict[str, list[dict[str, Any]]] = {}  # sizes of each run's tables by cursor

    def poll(self) -> None:
        """Read what was written, unless that was done within `POLL_S`."""
        unread = any(run.unread for run in self.runs)
        if not unread and time.monotonic() - self._polled < POLL_S:
            return
        found = [run.poll() for run in self.runs]
        self._polled = time.monotonic()
        self._version += any(changed for changed, _ in found)
        if any(replaced for _, replaced in found):
            self._marks.clear()

    def changes(self, since: str) -> dict[str, Any]:
        """What is new since a cursor: {} if nothing is, and all data (`whole`) if the cursor is unknown or too old.

        `more` tells that rollouts of earlier steps are still unread.
        """
        self.poll()
        cursor = f"{self._began:x}.{self._version}"
        if since == cursor:
            return {}
        sizes = self._marks.get(since)
        self._marks[cursor] = [lengths(run.growing()) for run in self.runs]
        for oldest in list(self._marks)[:-MAX_MARKS]:
            del self._marks[oldest]
        found = [run.data(size) for run, size in zip(self.runs, sizes or [{}] * len(self.runs), strict=True)]
        options = {"options": list(describe_options())} if sizes is None else {}
        more = any(run.unread for run in self.runs)
        return {"cursor": cursor, "whole": sizes is None, "more": more, "runs": found} | options


def extend(table: dict[str, list[Any]], more: dict[str, list[Any]]) -> None:
    """Append the rows of `more`. A column that one of both lacks is filled with None."""
    known, added = (max(map(len, columns.values()), default=0) for columns in (table, more))
    for name in {**table, **more}:
        table.setdefault(name, [None] * known).extend(more.get(name) or [None] * added)


def lengths(data: dict[str, Any]) -> dict[str, Any]:
    """The length of each list in nested dictionaries."""
    return {name: lengths(value) if isinstance(value, dict) else len(value) for name, value in data.items()}


def after(data: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    """The items of each list beyond its size in `sizes`; lists without any are left out."""
    found = {
        name: after(value, sizes.get(name, {})) if isinstance(value, dict) else value[sizes.get(name, 0) :]
        for name, value in data.items()
    }
    return {name: value for name, value in found.items() if value}
