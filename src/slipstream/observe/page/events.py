"""The timeline of a run for the page: its events as columns."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

from slipstream.observe import timeline as intervals
from slipstream.observe.run_data import Record, Run

MAX_ROLLOUTS = 200_000  # of a run; of more, evenly spaced groups
MAX_RANKS = 8  # of more, only the first has a track
TABLES = ("rollouts", "groups", "steps", "publishes", "pauses", "spans", "updates")
SPANS = ("start", "evaluation", "checkpoint", "score", "paused", "fault", "recovery", "dropped", "warning")


def name_engines(text: str) -> str:
    """The text of a fault with engines named as in the timeline: their processes are called generators."""
    return re.sub(r"\bgenerator(s?)(?=[\s,;:]|$)", r"engine\1", text)


class Columns(defaultdict[str, list[Any]]):
    """A table as lists by name."""

    def __init__(self) -> None:
        super().__init__(list)

    def add(self, **values: Any) -> None:
        for name, value in values.items():
            self[name].append(round(value, 4) if isinstance(value, float) else value)


def timeline(run: Run) -> dict[str, Any] | None:
    """Tracks, rollouts, groups, steps, publishes, pauses and other intervals of a run as columns; None without events.

    Times are seconds as in `time/wall_s`. A rollout names its group, and groups name the step that trained on them.
    """
    events = [event for event in run.events if isinstance(event.get("start"), int | float)]
    groups = [event for event in events if event.get("kind") == "group"]
    if not events:
        return None
    every = max(1, -(-sum(len(group.get("rollouts") or ()) for group in groups) // MAX_ROLLOUTS))
    skipped = {id(group) for i, group in enumerate(groups) if i % every}
    found = Tables()
    for event in events:
        if id(event) not in skipped:
            found.add(event)
    measured = found.measure(run)
    del found.tables["updates"]  # they are in the groups
    return found.data() | measured | {"left_out": [len(skipped), len(groups)]}


class Tables:
    """The timeline's tables, which grow with each event. `updates` are later changes to rows of `groups`."""

    def __init__(self) -> None:
        self.tracks: dict[str, int] = {}
        self.reasons: dict[str, int] = {}
        self.tables = {name: Columns() for name in TABLES}
        self.groups: dict[Any, int] = {}  # the newest of a visit, which is repeated after a drop

    def data(self) -> dict[str, Any]:
        return {"tracks": list(self.tracks), "reasons": list(self.reasons), **self.tables}

    def measure(self, run: Run) -> dict[str, Any]:
        """Fractions by track and the verdict, from all events of the run."""
        measured = intervals.timeline(run)
        fractions = {name: measured.fractions(track) for name, track in measured.tracks.items()}
        ranks = [name for name in fractions if name.startswith("trainer rank")]
        for name in ranks if len(ranks) < MAX_RANKS else ():
            self.track({"track": name})  # the ranks take each step together
        return {"fractions": fractions, "verdict": measured.verdict()}

    def add(self, event: Record) -> None:
        kind, start = event.get("kind"), event["start"]
        end = start if event.get("end") is None else event["end"]
        if kind == "group":
            self.add_group(event, start, end)
        elif kind == "step":
            self.set(event, "step", event.get("step"))
            keys = {"step": event.get("step"), "version": event.get("version"), "wait": event.get("wait_s") or 0.0}
            self.tables["steps"].add(track=self.track(event), start=start, end=end, **keys)
        elif kind == "publish":
            self.track(event)
            self.tables["publishes"].add(start=start, end=end, version=event.get("version"))
            for name, paused, resumed in event.get("pauses") or ():
                self.tables["pauses"].add(track=self.track({"track": name}), start=paused, end=resumed)
        elif kind in SPANS:
            if kind == "dropped":
                self.set(event, "fate", "stale")
            text = event.get("what") or event.get("text") or (f"step {event['step']}" if "step" in event else "")
            self.tables["spans"].add(
                kind=kind, track=self.track(event), start=start, end=end, text=name_engines(str(text))
            )

    def add_group(self, event: Record, start: float, end: float) -> None:
        groups = self.tables["groups"]
        index = self.groups[event.get("visit_id")] = len(groups["visit"])
        visit, task = event.get("visit_id"), str(event.get("task_id"))
        groups.add(visit=visit, task=task, fate=event.get("fate"), start=start, end=end, step=None)
        for name, began, ended, tokens, oldest, newest, reward, failure, number in event.get("rollouts") or ():
            reason = -1 if failure is None else self.reasons.setdefault(str(failure), len(self.reasons))
            self.tables["rollouts"].add(
                track=self.track({"track": name or "controller"}), start=began, end=ended, tokens=tokens,
                oldest=oldest, newest=newest, reward=reward, failed=reason, group=index, number=number,
            )  # fmt: skip

    def set(self, event: Record, name: str, value: Any) -> None:
        """Set a column of the groups that an event names."""
        for visit in event.get("visit_ids") or ():
            if visit in self.groups:
                self.tables["groups"][name][self.groups[visit]] = value
                self.tables["updates"].add(column=name, group=self.groups[visit], value=value)

    def track(self, event: Record) -> int:
        return self.tracks.setdefault(str(event.get("track")), len(self.tracks))
