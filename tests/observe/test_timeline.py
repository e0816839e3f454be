"""Who waited for whom, and the trace of a run, from events written by hand: two engines, one trainer, a restart."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli import main
from slipstream.observe.run_data import load_run
from slipstream.observe.timeline import Timeline, Track, intersect, length, subtract, timeline, union
from slipstream.observe.trace import select

ENGINES = ("engine 0", "engine 1")


def engine(track: str, start: float, end: float, *requests: list[float]) -> dict[str, Any]:
    keys = {"requests": requests, "asleep": [], "forward_s": 0.0, "tokens": 0}
    return {"kind": "engine", "track": track, "start": start, "end": end, **keys}


def step(number: int, start: float, end: float, wait: float, *visits: int) -> dict[str, Any]:
    keys = {"step": number, "version": number - 1, "wait_s": wait, "visit_ids": visits}
    return {"kind": "step", "track": "trainer", "start": start, "end": end, **keys}


def group(visit: int, start: float, end: float, track: str = "engine 0", fate: str = "ready") -> dict[str, Any]:
    rows = [[track, start, end, 5, 0, 0, 1.0, None, 0], [track, start, end - 0.1, 5, 0, 0, None, "KeyError", 1]]
    keys = {"visit_id": visit, "task_id": "a", "fate": fate, "rollouts": rows}
    return {"kind": "group", "track": "controller", "start": start, "end": end, **keys}


def publish(version: int, start: float, end: float) -> dict[str, Any]:
    pauses = [[track, end - 0.5, end - 0.25] for track in ENGINES]
    keys = {"version": version, "pauses": pauses}
    return {"kind": "publish", "track": "controller", "start": start, "end": end, **keys}


# Engine 0 works from 2 to 6 and from 7 to 12, engine 1 from 2 to 4; the trainer waits for 4 s and for 1 s.
EVENTS = [
    {"kind": "start", "track": "controller", "start": 0.0, "end": 2.0, "step": 0},
    group(0, 2.0, 5.0), group(1, 2.0, 4.0, "engine 1"), group(2, 2.0, 5.5, fate="filtered"),
    step(1, 6.5, 8.0, 4.0, 0, 1),
    engine("engine 0", 2.0, 8.5, [2.0, 6.0], [7.0, 8.5]), engine("engine 1", 2.0, 8.5, [2.0, 4.0]),
    publish(1, 8.0, 9.0),
    group(3, 7.0, 9.25),
    step(2, 10.0, 11.0, 1.0, 3),
    engine("engine 0", 8.5, 12.0, [8.5, 12.0]), engine("engine 1", 8.5, 12.0),
]  # fmt: skip


def write(directory: Path, events: list[dict[str, Any]], torn: str = "", config: str = "") -> Path:
    (directory / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events) + torn)
    (directory / "config.toml").write_text(config)
    return directory


def test_each_track_is_busy_waiting_or_paused(tmp_path: Path) -> None:
    found = timeline(load_run(write(tmp_path, EVENTS)))
    assert found.window == [(2.0, 12.0)]
    first, second = found.engines
    assert first.busy == [(2.0, 6.0), (7.0, 8.5), (8.75, 12.0)] and first.paused == [(8.5, 8.75)]
    assert first.waiting == [(6.0, 7.0)]
    assert second.waiting == [(4.0, 8.5), (8.75, 12.0)]
    assert found.trainer.busy == [(6.5, 8.0), (10.0, 11.0)] and found.trainer.waiting == [(2.0, 6.0), (8.5, 9.5)]
    assert found.fractions(second) == pytest.approx({"busy": 0.2, "waiting": 0.775, "paused": 0.025})
    assert found.verdict().startswith(
        "Of the time since the first rollout, the trainer waited 50% for rollouts, the engines 44% for work: "
    )


def test_lost_steps_are_outside_of_the_window(tmp_path: Path) -> None:
    """The trainer dies in step 3, and continues from a checkpoint that was written after step 1."""
    after = [
        {"kind": "fault", "track": "trainer", "start": 13.0, "end": None, "what": "it was killed"},
        {"kind": "recovery", "track": "trainer", "start": 13.0, "end": 20.0, "rewound_to": 8.6, "steps_lost": 1},
        step(2, 21.0, 22.0, 0.5, 3),
        engine("engine 0", 20.0, 23.0, [20.0, 23.0]), engine("engine 1", 20.0, 23.0),
    ]  # fmt: skip
    found = timeline(load_run(write(tmp_path, [*EVENTS, *after])))
    assert found.window == [(2.0, 8.5), (20.0, 23.0)]
    assert length(found.trainer.busy) == 2.5


@pytest.mark.parametrize(
    ("trainer", "idle", "options", "remedy"),
    [
        (0.05, 0.02, {}, "both are well used"),
        (0.05, 0.02, {"trainer_busy": 0.03}, "the trainer was busy 3%, the engines 98%; the rest went to evaluations"),
        (0.05, 0.2, {"trainer_busy": 0.3}, "the trainer was busy 30%, the engines 80%; the rest went to evaluations"),
        (0.2, 0.2, {"trainer_busy": 0.1}, "the trainer was busy 10%, the engines 80%; the rest went to evaluations"),
        (0.2, 0.2, {"trainer_busy": 0.1, "publish": 0.9}, "publishes kept the trainer from its next step for 70%"),
        (0.5, 0.02, {"max_lag": 1}, "add an engine (generator.replicas) or raise loop.max_lag"),
        (0.02, 0.5, {"max_lag": 1}, "training is the slower side"),
        (0.4, 0.5, {"max_lag": 4}, "both wait, for each other in turn or for tools and rewards; raise loop.max_lag"),
        (0.4, 0.5, {"max_lag": 0}, "with loop.max_lag = 0 they take turns"),
        (0.4, 0.5, {"colocated": True}, "they share GPUs"),
        (0.4, 0.5, {"scoring": 0.45}, "both wait for scores"),
    ],
)
def test_the_verdict_names_the_slower_side(trainer: float, idle: float, options: dict[str, Any], remedy: str) -> None:
    scoring = Track("scoring", [(0, 100 * options.pop("scoring", 0))])
    publish = Track("publish", [(0, 100 * options.pop("publish", 0))])
    busy = 100 * options.pop("trainer_busy", 1 - trainer)
    engine = Track("engine 0", [(100 * idle, 100)], [(0, 100 * idle)])
    tracks = [engine, Track("trainer", [(0, busy)], [(0, 100 * trainer)]), scoring, publish]
    found = Timeline([(0, 100)], [], {track.name: track for track in tracks}, **options)
    assert f"waited {trainer:.0%}" in found.verdict() and remedy in found.verdict()


def test_a_pause_by_the_user_is_no_wait(tmp_path: Path) -> None:
    paused = {"kind": "paused", "track": "controller", "start": 2.0, "end": 7.0}
    verdict = timeline(load_run(write(tmp_path, [*EVENTS, paused]))).verdict()
    assert "the trainer waited 20% for rollouts" in verdict


def test_a_dead_engine_does_not_count_as_idle(tmp_path: Path) -> None:
    """Engine 1 dies at 6 s, after 2 s of work and 2 s without; it is back at 10 s in the second run."""
    fault = {"kind": "fault", "track": "engine 1", "start": 6.0, "end": None, "what": "it died"}
    found = timeline(load_run(write(tmp_path, [*EVENTS, fault])))
    dead = found.engines[1]
    assert dead.alive == [(2.0, 6.0)] and dead.waiting == [(4.0, 6.0)] and dead.paused == []
    assert found.fractions(dead) == {"busy": 0.5, "waiting": 0.5, "paused": 0.0}
    assert found.fractions(*found.engines)["waiting"] == pytest.approx(3 / 14)
    recovery = {"kind": "recovery", "track": "engine 1", "start": 8.0, "end": 10.0, "what": "it is restarted"}
    again = timeline(load_run(write(tmp_path, [*EVENTS, fault, recovery]))).engines[1]
    assert again.alive == [(2.0, 6.0), (10.0, 12.0)]


def test_intervals() -> None:
    assert union([(3, 4), (0, 1), (1, 2), (3.5, 3.6)]) == [(0, 2), (3, 4)]
    assert subtract([(0, 10)], [(-1, 1), (2, 3), (3, 4), (9, 11)]) == [(1, 2), (4, 9)]
    assert subtract([(0, 2), (3, 5)], [(1, 4)]) == [(0, 1), (4, 5)]
    assert intersect([(0, 2), (3, 5)], [(1, 4)]) == [(1, 2), (3, 4)] and length([(1, 2), (3, 5)]) == 3


def test_a_trace_is_well_formed_and_its_arrows_bind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a viewer reads it: slices of a thread do not overlap, and a slice is open at both ends of each arrow."""
    assert main(["trace", str(write(tmp_path, EVENTS))]) == 0
    assert f"{tmp_path / 'trace.json'} (0.0 MB), open it in ui.perfetto.dev" in capsys.readouterr().out
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in trace if e["name"].endswith("_name")}
    drawn = [e for e in trace if e["ph"] != "M"]
    assert [e["ts"] for e in drawn] == sorted(e["ts"] for e in drawn)
    slices = [e for e in drawn if e["ph"] == "X"]
    threads = {(e["pid"], e["tid"]) for e in slices}
    assert threads <= set(names) and {names[pid, None] for pid, _ in threads} == {"controller", "trainer", *ENGINES}
    for thread in threads:
        ends = [(e["ts"], e["ts"] + e["dur"]) for e in slices if (e["pid"], e["tid"]) == thread]
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends)), names[thread]

    def bound(arrow: dict[str, Any]) -> str:
        (name,) = (
            e["name"] for e in slices
            if (e["pid"], e["tid"]) == (arrow["pid"], arrow["tid"]) and e["ts"] <= arrow["ts"] < e["ts"] + e["dur"]
        )  # fmt: skip
        return str(name)

    begins, finishes = ({e["id"]: e for e in drawn if e["ph"] == ph} for ph in "sf")
    assert set(begins) == set(finishes) and all(begins[i]["ts"] <= finishes[i]["ts"] for i in begins)
    assert sorted((bound(begins[i]), bound(finishes[i])) for i in begins) == [
        ("publish 1", "publish 1"), ("publish 1", "publish 1"), ("step 1", "publish 1"),
        ("visit 0 rollout 0", "step 1"), ("visit 1 rollout 0", "step 1"), ("visit 3 rollout 0", "step 2"),
    ]  # fmt: skip
    failed = next(e for e in slices if e["name"] == "visit 2 rollout 1")
    assert failed["args"] | {"failure": "KeyError", "fate": "filtered", "tokens": 5} == failed["args"]


def test_a_range_of_steps() -> None:
    assert [e["kind"] for e in select(EVENTS, 2, 9)] == [
        "step", "engine", "engine", "publish", "group", "step", "engine", "engine"
    ]  # fmt: skip
    assert select(EVENTS, 3, 9) == []


@pytest.mark.parametrize(
    ("events", "arguments", "said"),
    [
        ([], (), "events.jsonl has nothing to draw: it is missing or empty"),
        (EVENTS, ("--steps", "7-8"), "events.jsonl has nothing to draw: no step from 7 to 8 is recorded"),
        (EVENTS, ("--steps", "8-7"), '--steps = "8-7" must be a range of steps, such as 10-20'),
        (EVENTS, ("--output", "missing/trace.json"), "can't be written (No such file or directory); name another"),
    ],
)
def test_a_trace_that_cannot_be_written(
    events: list[dict[str, Any]], arguments: tuple[str, ...], said: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert main(["trace", str(write(tmp_path, events, torn='{"kind": "st')), *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_killed_run_has_a_trace_of_what_it_wrote(tmp_path: Path) -> None:
    assert main(["trace", str(write(tmp_path, EVENTS[:5], torn='{"kind": "st'))]) == 0
    assert "There" not in timeline(load_run(tmp_path)).verdict()
