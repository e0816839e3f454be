"""The timeline of a run: what happened when, in `events.jsonl`.

Times are seconds on the clock of the metric `time/wall_s`: wall time of the run without the time between a stop and a
resume. docs/run-directory.md lists the kinds of events and their keys.
"""

from __future__ import annotations

import itertools
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.rollout import Completion, Rollout
from slipstream.runtime.event_loop import yield_to_loop
from slipstream.runtime.run_directory import write_atomically

CONTROLLER, TRAINER, SCORING = "controller", "trainer", "scoring"  # tracks; engines have one each
DIGITS = 6  # decimals of seconds
PIECE = 16  # events that take about a millisecond to write
UNWRITTEN_S = 1.0  # age at which events are written before the next step ends


class EventLog:
    """Events of a run, which the recorder's thread appends to a file.

    `add` only appends to a list in memory. All methods but `write` and `truncate` belong to the event loop.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.perf_counter) -> None:
        self._path, self._clock = path, clock
        self._origin = self._written = clock()
        self._unwritten: deque[dict[str, Any]] = deque()
        self._failed: dict[int, list[list[Any]]] = {}  # completions of failed rollouts by visit in flight

    def now(self) -> float:
        """Seconds since the start of the run, without the time between a stop and a resume."""
        return self._clock() - self._origin

    def add(self, kind: str, track: str, start: float | None = None, end: float | None = None, **keys: Any) -> None:
        """Record an event from `start` (default: now) to `end` (None: an instant). `keys` are plain data."""
        start = self.now() if start is None else start
        self._unwritten.append({"kind": kind, "track": track, "start": start, "end": end, **keys})

    def rollout_failed(self, visit_id: int, start: float, sampled: Sequence[Completion], reason: str) -> None:
        """Remember a failed rollout until the end of its group."""
        rows = [_row(completion, None, reason) for completion in sampled]
        self._failed.setdefault(visit_id, []).append(rows or [[None, start, self.now(), 0, None, None, None, reason]])

    def forget_group(self, visit_id: int) -> None:
        """Forget the failed rollouts of a group that was cancelled."""
        self._failed.pop(visit_id, None)

    def group(self, visit_id: int, task_id: str, fate: str, start: float, rollouts: Sequence[Rollout]) -> None:
        """Record the end of a group: its successful `rollouts`, numbered as in the parquet file, then failed ones."""
        played = [[_row(c, r.reward, None) for c in r.completions] for r in rollouts]
        numbered = enumerate([*played, *self._failed.pop(visit_id, [])])
        rows = [[*row, number] for number, completions in numbered for row in completions]
        keys = {"visit_id": visit_id, "task_id": task_id, "fate": fate, "rollouts": rows}
        self.add("group", CONTROLLER, start, self.now(), **keys)

    @property
    def due(self) -> bool:
        """Whether events have waited for `UNWRITTEN_S` to be written."""
        return bool(self._unwritten) and self._clock() - self._written > UNWRITTEN_S

    def write(self) -> None:
        """Append the events so far to the file. Raises `OSError`."""
        self._written = self._clock()
        lines = []
        for number in range(len(self._unwritten)):
            if number % PIECE == 0:
                yield_to_loop()
            lines.append(strict_json(_rounded(self._unwritten.popleft())) + "\n")
        if lines:
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(lines)

    def truncate(self, wall: float) -> None:
        """Remove the events that ended after time `wall` of the run, at which it wrote its checkpoint."""
        truncate_lines(self._path, lambda e: float(e["start"] if e["end"] is None else e["end"]), wall)

    def set_time(self, wall: float) -> None:
        """Let `now` agree with `time/wall_s`, which is `wall` at present: a resumed run has an earlier start."""
        later = wall - self.now()
        self._origin -= later
        for event in self._unwritten:
            event["start"] += later
            event["end"] = None if event["end"] is None else event["end"] + later


def _row(completion: Completion, reward: float | None, reason: str | None) -> list[Any]:
    start, end, spans = completion.started_s, completion.ended_s, completion.spans
    return [
        completion.engine or None, start and round(start, DIGITS), end and round(end, DIGITS),
        len(completion.token_ids), spans[0].version if spans else None, spans[-1].version if spans else None,
        reward, reason,
    ]  # fmt: skip


def _rounded(event: dict[str, Any]) -> dict[str, Any]:
    """The event with rounded numbers, without those in lists: a pause may last a few microseconds."""
    return {key: round(v, DIGITS) if isinstance(v, float) else v for key, v in event.items()}


def strict_json(data: Any, **options: Any) -> str:
    """The data as JSON, with null for NaN and infinities."""
    try:
        return json.dumps(data, allow_nan=False, **options)
    except ValueError:
        return json.dumps(json.loads(json.dumps(data), parse_constant=lambda _: None), **options)


def truncate_lines(
    path: Path, value: Callable[[Mapping[str, Any]], float], largest: float, most: int | None = None
) -> int:
    """Keep the first `most` lines whose records have a value of at most `largest`, none that a kill has truncated.

    Returns the number of kept lines. Reads one line at a time: the file of a long run has gigabytes.
    """
    count = 0

    def is_kept(line: str) -> bool:
        try:
            return value(json.loads(line)) <= largest
        except (ValueError, KeyError, TypeError):
            return False

    def kept(lines: Iterable[str]) -> Iterator[str]:
        nonlocal count
        for line in itertools.islice(filter(is_kept, lines), most):
            count += 1
            yield line.removesuffix("\n") + "\n"

    if path.exists():
        with path.open(encoding="utf-8", errors="replace") as lines:
            write_atomically(path, kept(lines))
    return count
