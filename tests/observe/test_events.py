"""The events of a run: times, fates of rollouts, and what a resume keeps."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from slipstream.observe.events import EventLog
from slipstream.rollout import Completion, Rollout, VersionSpan
from slipstream.runtime.serialization import dumps, loads


class Clock:
    """A clock that a test sets."""

    def __init__(self, time: float = 100.0) -> None:
        self.time = time

    def __call__(self) -> float:
        return self.time


def completion(tokens: int, *spans: tuple[int, int, int], start: float = 1.0) -> Completion:
    times = {"engine": "engine 1", "started_s": start, "ended_s": start + 2}
    return Completion((1,), (5,) * tokens, (0.0,) * tokens, tuple(VersionSpan(*s) for s in spans), "stop", **times)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_events_have_the_time_since_the_start(tmp_path: Path) -> None:
    clock = Clock()
    events = EventLog(tmp_path / "events.jsonl", clock)
    clock.time = 103.25
    events.add("fault", "engine 0", what="it died")
    events.add("evaluation", "controller", 1.0000004, 3.0, step=4, score=math.nan)
    assert not (tmp_path / "events.jsonl").exists(), "the event loop wrote to the disk"
    events.write()
    events.write()
    assert read(tmp_path / "events.jsonl") == [
        {"kind": "fault", "track": "engine 0", "start": 3.25, "end": None, "what": "it died"},
        {"kind": "evaluation", "track": "controller", "start": 1.0, "end": 3.0, "step": 4, "score": None},
    ]


def test_a_group_lists_its_completions_with_their_fates(tmp_path: Path) -> None:
    clock = Clock()
    events = EventLog(tmp_path / "events.jsonl", clock)
    two_turns = Rollout((completion(3, (4, 0, 2), (5, 2, 3)), completion(1, (5, 0, 1), start=3.5)), 0.5)
    events.rollout_failed(8, 0.5, [completion(2, (4, 0, 2))], "time limit")
    clock.time = 105
    events.rollout_failed(7, 0.5, [completion(2, (4, 0, 2))], "time limit")
    events.rollout_failed(7, 0.5, [], "KeyError")
    events.forget_group(8)
    for visit in (7, 8):
        events.group(visit, "task", "ready", 0.25, [two_turns] if visit == 7 else [])
    events.write()
    group, cancelled = read(tmp_path / "events.jsonl")
    assert (group["start"], group["end"]) == (0.25, 5.0)
    assert group["rollouts"] == [
        ["engine 1", 1.0, 3.0, 3, 4, 5, 0.5, None, 0],
        ["engine 1", 3.5, 5.5, 1, 5, 5, 0.5, None, 0],
        ["engine 1", 1.0, 3.0, 2, 4, 4, None, "time limit", 1],
        [None, 0.5, 5.0, 0, None, None, None, "KeyError", 2],
    ]
    assert cancelled["rollouts"] == []


@pytest.mark.parametrize("torn", ['{"kind": "st', "", "null\n", "\0\0"])
def test_a_resume_removes_events_after_the_checkpoint(tmp_path: Path, torn: str) -> None:
    path, clock = tmp_path / "events.jsonl", Clock()
    before = EventLog(path, clock)
    before.add("step", "trainer", 1.0, 2.0, step=1)
    before.add("step", "trainer", 2.0, 3.0, step=2)
    before.add("fault", "trainer", 2.5, what="killed")
    before.write()
    with path.open("a") as file:
        file.write(torn)

    after = EventLog(path, clock)
    clock.time += 4  # the start of the process
    after.add("warning", "controller")
    after.truncate(2.25)
    after.set_time(6.25)
    after.add("start", "controller", 2.25, after.now())
    after.write()
    assert [(e["kind"], e["start"], e["end"]) for e in read(path)] == [
        ("step", 1.0, 2.0), ("warning", 6.25, None), ("start", 2.25, 6.25),
    ]  # fmt: skip


def test_groups_of_older_checkpoints_have_no_times() -> None:
    """A checkpoint holds a completion as the list of its fields; those added since have defaults."""
    line = json.loads(dumps(completion(1, (0, 0, 1))))
    assert loads(dumps(completion(1, (0, 0, 1)))).ended_s == 3.0
    older = loads(json.dumps({"Completion": line["Completion"][:-5]}).encode())
    assert older == completion(1, (0, 0, 1)) and older.engine == "" and older.started_s is None
