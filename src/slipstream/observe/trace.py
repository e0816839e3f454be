"""A run as a Chrome trace, which https://ui.perfetto.dev and chrome://tracing open.

Each engine, each trainer rank, the scorer and the controller are processes of the trace. Slices that overlap, such as
the completions of an engine, get one thread each. Arrows (flow events) lead from a completion to the step that trained
on it, from a step to the publish of its weights, and from there to the pause of each engine.
"""

from __future__ import annotations

import heapq
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.config.schema import ConfigError
from slipstream.observe.events import TRAINER
from slipstream.observe.run_data import Record, Run
from slipstream.observe.timeline import STATES, Timeline, timeline

NS_US = 0.001  # a trace counts microseconds, here in steps of a nanosecond
COMPLETION = ("engine", "start", "end", "tokens", "oldest_version", "newest_version", "reward", "failure", "rollout")
NO_ARGS = ("kind", "track", "start", "end", "rollouts", "pauses")


@dataclass(slots=True, eq=False)
class Slice:
    """Something with a duration, on a thread of `process` named `row`; `assign_threads` sets `tid`."""

    process: str
    row: str
    name: str
    start: float
    end: float
    args: Record = field(default_factory=dict)
    tid: int = 0

    def open_at(self, seconds: float) -> float:
        """The microsecond next to a time at which the slice is open. An arrow binds to the slice that is open there."""
        return max(_us(self.start), min(_us(seconds), round(_us(self.end) - NS_US, 3)))


Arrow = tuple[Slice, Slice]


def write_trace(run: Run, path: Path, steps: str | None = None) -> str:
    """Write the trace of a run, or of the steps "FIRST-LAST". Returns which side waited for the other.

    Raises `ConfigError` if there is nothing to draw, or if `path` can't be written.
    """
    first, dash, last = (steps or "").partition("-")
    if steps and not (dash and first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
        raise ConfigError(f'--steps = "{steps}" must be a range of steps, such as 10-20')
    events, measured = select(run.events, int(first), int(last)) if steps else run.events, timeline(run)
    if not events:
        missing = f"no step from {first} to {last} is recorded" if steps else "it is missing or empty"
        raise ConfigError(f"{run.path / 'events.jsonl'} has nothing to draw: {missing}")
    lines = ",\n".join(map(json.dumps, trace_events(events, measured)))
    try:
        path.write_text(f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n')
    except OSError as error:
        raise ConfigError(f"{path} can't be written ({error.strerror}); name another file with --output") from None
    return measured.verdict()


def select(events: Sequence[Record], first: int, last: int) -> list[Record]:
    """The events from the start of the rollouts of step `first` to the end of step `last`; [] if there are none."""
    steps = [e for e in events if e["kind"] == "step" and first <= e["step"] <= last]
    visits = {visit for step in steps for visit in step["visit_ids"]}
    groups = [e for e in events if e["kind"] == "group" and e["visit_id"] in visits]
    began = min((e["start"] for e in (*steps, *groups)), default=0.0)
    return [e for e in events if steps and e["start"] <= steps[-1]["end"] and (e["end"] or e["start"]) >= began]


def trace_events(events: Sequence[Record], found: Timeline) -> list[Record]:
    """Trace events of a run's `events`, ordered by time, after the names of processes and threads."""
    slices, arrows = _slices(events)
    slices += _states(found, min(e["start"] for e in events), max(e["end"] or e["start"] for e in events))
    threads = assign_threads(slices)
    pids = {process: pid for pid, process in enumerate(sorted({*threads, *(e["track"] for e in events)}), 1)}
    drawn: list[Record] = [
        {"ph": "i", "s": "p", "name": event["kind"], "pid": pids[event["track"]], "tid": 1, "ts": _us(event["start"]),
         "args": _args(event)}
        for event in events if event["end"] is None
    ]  # fmt: skip
    for one in slices:
        at = {"pid": pids[one.process], "tid": one.tid, "ts": _us(one.start)}
        drawn.append({"ph": "X", "name": one.name, **at, "dur": round(_us(one.end) - at["ts"], 3), "args": one.args})
    for number, (before, after) in enumerate(arrows, 1):
        time = min(before.end, max(before.start, after.start))
        for ph, one in (("s", before), ("f", after)):
            at = {"pid": pids[one.process], "tid": one.tid, "ts": one.open_at(time)}
            drawn.append({"ph": ph, "bp": "e", "cat": "flow", "name": f"to {after.name}", "id": number, **at})
    return [*_names(pids, threads), *sorted(drawn, key=lambda event: (event["ts"], "Xisf".index(event["ph"])))]


def assign_threads(slices: Sequence[Slice]) -> dict[str, list[str]]:
    """Give each slice the first thread of its row that is free. Returns the names of each process's threads."""
    threads: dict[str, list[str]] = defaultdict(list)
    ends: dict[tuple[str, str], list[tuple[float, int]]] = defaultdict(list)  # of each thread's last slice, by row
    for one in sorted(slices, key=lambda one: one.start):
        row = ends[one.process, one.row]
        if row and row[0][0] <= one.start:
            _, one.tid = heapq.heappop(row)
        else:
            threads[one.process].append(f"{one.row} {len(row) + 1}" if row else one.row)
            one.tid = len(threads[one.process])
        heapq.heappush(row, (one.end, one.tid))
    return threads


def _slices(events: Sequence[Record]) -> tuple[list[Slice], list[Arrow]]:
    slices: list[Slice] = []
    arrows: list[Arrow] = []
    buffer: dict[int, list[Slice]] = {}  # last completion of each rollout that waits for its step, by visit
    unpublished: dict[int, list[Slice]] = defaultdict(list)  # steps by the version before them
    for event in (event for event in events if event["end"] is not None and event["kind"] != "engine"):
        kind, track = event["kind"], event["track"]
        name = " ".join([kind, *(str(event[key]) for key in ("step", "version", "visit_id") if key in event)][:2])
        drawn = Slice(track, kind, name, event["start"], event["end"], _args(event))
        slices.append(drawn)
        if kind == "group":
            completions = list(_completions(event))
            slices += completions
            last = {c.args["rollout"]: c for c in completions if c.args["reward"] is not None}
            buffer[event["visit_id"]] = list(last.values()) if event["fate"] == "ready" else []
        elif kind == "step":
            arrows += [(rollout, drawn) for visit in event["visit_ids"] for rollout in buffer.pop(visit, ())]
            unpublished[event["version"]].append(drawn)
        elif kind == "publish":
            pauses = [Slice(engine, "publish", name, start, end) for engine, start, end in event["pauses"]]
            slices += pauses
            arrows += [(step, drawn) for step in unpublished.pop(event["version"] - 1, ())]
            arrows += [(drawn, pause) for pause in pauses]
    return slices, arrows


def _completions(group: Record) -> Iterator[Slice]:
    """The slices of a group's completions on their engines."""
    for row in group["rollouts"]:
        args = _args(group) | dict(zip(COMPLETION, row, strict=False))
        name = f"visit {args['visit_id']} rollout {args['rollout']}"
        if row[0] and row[1] is not None:
            yield Slice(row[0], "completion", name, row[1], row[2], args)


def _states(found: Timeline, first: float, last: float) -> Iterator[Slice]:
    """When engines and the trainer's ranks were busy, waiting and paused, as far as it falls between two times."""
    for track in found.tracks.values():
        for state in STATES if track.name.startswith(("engine", TRAINER)) else ():
            for start, end in getattr(track, state):
                if end >= first and start <= last:
                    yield Slice(track.name, "state", state, start, end)


def _args(event: Record) -> Record:
    return {key: value for key, value in event.items() if key not in NO_ARGS}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _names(pids: dict[str, int], threads: dict[str, list[str]]) -> Iterator[Record]:
    for process, pid in pids.items():
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}}
        for tid, name in enumerate(threads.get(process, ()), 1):
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
