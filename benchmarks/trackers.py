"""What a tracker costs a run: one that hangs, one that raises, and tensorboard.

    make .venv/trackers/installed
    .venv/trackers/bin/python benchmarks/trackers.py --json benchmarks/results/trackers.json

A tracker shares nothing with the run but the machine: its process takes processor time, and the controller watches it.
So the sum of these two bounds what a run without a free core can lose. Both are fractions of one core:

- `tracker_busy`: the tracker's process after its start; that of tensorboard in a run of a tiny model, where it also
  sends what it missed while it was stopped, see below;
- `controller_busy`: the controller with a running tracker, in an event loop that does nothing else, less the same loop
  without a tracker. `longest_callback_ms` is the longest time for which it blocked that loop after the start.

The runs also give ratios. In a run the tracker's process is stopped (SIGSTOP) and continued many times. A round is one
segment with the tracker and one without, in alternating order: a ratio of the steps per second, and of the controller's
processor time per step. The record has medians with 95% confidence intervals (order statistics). In `control` the
tracker is stopped in both segments, so its interval is the noise of the machine.

A tracker that raises has no process afterwards, so its cost is that of its start (`raises`). After each run another
tracker gets all its records, and counts them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import math
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from work import at_least_one, conditions, save_model

from slipstream import ConfigError, load_config, load_run, run
from slipstream.controller import trackers as controller_trackers
from slipstream.controller.run_context import RunContext
from slipstream.controller.trackers import TrackerProcess
from slipstream.observe.trackers import check_installed, track

DOUBLES = Path(__file__).resolve().with_name("measured_trackers.py")
MODES = {"hangs": f"{DOUBLES}:Hangs", "tensorboard": "tensorboard"}
SETTLE_S = 0.2  # after the tracker is stopped or continued
START_S = 5.0  # in which a tracker starts
IDLE_S = 60.0  # of an event loop with a tracker, and of one without
Mark = tuple[float, int, float, float]  # time, steps so far, processor seconds of the controller and of the tracker


class Segments:
    """Stops and continues the tracker of a run, and measures each segment between."""

    def __init__(self, rounds: int, segment: float) -> None:
        self._rounds, self._segment = rounds, segment
        self._ends: list[float] = []  # time of each step
        self.rates: dict[str, list[float]] = {"tracker": [], "control": []}
        self.costs: dict[str, list[float]] = {"tracker": [], "control": []}
        self.busy: list[float] = []

    def attach(self) -> None:
        """Measure the next run."""
        record = run.record_step

        def recorded(context: RunContext, *arguments: Any) -> None:
            record(context, *arguments)
            self._ends.append(time.perf_counter())
            if len(self._ends) == 1:
                self._measuring = asyncio.ensure_future(self._measure(context.trackers[0]))

        vars(run).update(record_step=recorded)

    async def _measure(self, tracker: TrackerProcess) -> None:
        await asyncio.sleep(START_S)  # until the tracker has started, and hangs
        assert tracker._process.process
        pid = tracker._process.process.pid
        try:
            for number in range(self._rounds):
                for pair, signals in (
                    ("tracker", (signal.SIGCONT, signal.SIGSTOP)), ("control", (signal.SIGSTOP, signal.SIGSTOP))
                ):  # fmt: skip
                    order = 1 if number % 2 else -1
                    found = [await self._segment_of(pid, one) for one in signals[::order]][::order]
                    (rate, cost, busy), (rate_without, cost_without, _) = found
                    if rate and rate_without:
                        self.rates[pair].append(rate / rate_without)
                        self.costs[pair].append(cost / cost_without)
                    self.busy += [busy] if pair == "tracker" else []
        finally:
            os.kill(pid, signal.SIGCONT)
            os.kill(os.getpid(), signal.SIGINT)  # ends the run

    async def _segment_of(self, pid: int, which: signal.Signals) -> tuple[float, float, float]:
        """Steps per second, the controller's processor time per step, and the tracker's per second."""
        os.kill(pid, which)
        await asyncio.sleep(SETTLE_S)
        before = self._mark(pid)
        await asyncio.sleep(self._segment)
        now, steps, own, tracker = (b - a for a, b in zip(before, self._mark(pid), strict=True))
        ends = self._ends[before[1] - 1 :]
        rate = (len(ends) - 1) / (ends[-1] - ends[0]) if steps else 0.0
        return rate, own / max(steps, 1), tracker / now

    def _mark(self, pid: int) -> Mark:
        return time.perf_counter(), len(self._ends), time.process_time(), processor_s(pid)


def processor_s(pid: int) -> float:
    """Processor seconds of the threads of a process."""
    total = 0
    for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            total += int(file.read_text().split()[0])
    return total / 1e9


def described(ratios: Sequence[float]) -> dict[str, Any]:
    """The median and its 95% confidence interval, from the order statistics of a binomial distribution."""
    ordered, count, below, rank = sorted(ratios), len(ratios), 0.0, 0
    while (below := below + math.comb(count, rank) / 2**count) <= 0.025:
        rank += 1
    interval = [round(ordered[end], 4) for end in (max(rank - 1, 0), min(count - rank, count - 1))]
    return {"median": round(median(ratios), 4), "interval": interval, "count": count}


def measure(model: Path, directory: Path, tracker: str, rounds: int, segment: float) -> dict[str, Any]:
    """The ratios of one run, and whether another tracker gets each of its steps."""
    values = {
        "model.path": model, "environment.name": f"{DOUBLES.with_name('work.py')}:Work", "run.dir": directory,
        "loop.steps": 1_000_000, "loop.groups_per_step": 4, "loop.group_size": 8, "sampling.max_tokens": 16,
        "trainer.threads": 1, "generator.threads": 1, "evaluation.tasks": 0, "checkpoint.every": 1_000_000,
        "observe.report": "false", "observe.health": "false", "observe.trackers": json.dumps([tracker]),
    }  # fmt: skip
    segments, original = Segments(rounds, segment), run.record_step
    segments.attach()
    with contextlib.redirect_stderr(io.StringIO()) as said:
        run.train(load_config(None, [f"--{name}={value}" for name, value in values.items()]), quiet=True)
    run.record_step = original
    recorded = load_run(directory)
    steps = [record["step"] for record in recorded.metrics]
    track(directory, f"{DOUBLES}:Counts", "")
    sent = int((directory / "steps_sent").read_text())
    assert steps == list(range(1, len(steps) + 1)) == recorded.rollout_steps and sent == len(steps), "records are lost"
    return {
        "steps_per_s": {name: described(ratios) for name, ratios in segments.rates.items()},
        "controller_s_per_step": {name: described(ratios) for name, ratios in segments.costs.items()},
        "tracker_busy": round(fmean(segments.busy), 6),
        "steps_recorded": len(steps), "steps_sent_afterwards": sent,
        "warnings": [line.partition(". The run")[0] for line in said.getvalue().splitlines()],
    }  # fmt: skip


async def watching(directory: Path) -> dict[str, float]:
    """The process of a tracker that hangs, and what it costs a controller whose event loop does nothing else."""
    idle, longest, run_handle = [], 0.0, asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        nonlocal longest
        began = time.perf_counter()
        run_handle(handle)
        longest = max(longest, time.perf_counter() - began)

    asyncio.Handle._run = timed  # type: ignore[method-assign]
    for name in ("", f"{DOUBLES}:Hangs"):
        tracker = TrackerProcess(name, "", directory, print) if name else None
        await asyncio.sleep(START_S)
        pid = tracker._process.process.pid if tracker and tracker._process.process else os.getpid()
        longest, began, tracker_began = 0.0, time.process_time(), processor_s(pid)
        await asyncio.sleep(IDLE_S)
        idle.append((time.process_time() - began) / IDLE_S)
        busy, blocked_ms = (processor_s(pid) - tracker_began) / IDLE_S, round(1000 * longest, 3)
        if tracker:
            await tracker.close()
    asyncio.Handle._run = run_handle  # type: ignore[method-assign]
    figures = {"tracker_busy": busy, "controller_busy": idle[1] - idle[0]}
    return {name: round(value, 6) for name, value in figures.items()} | {"longest_callback_ms": blocked_ms}


async def failure(directory: Path) -> dict[str, float]:
    """Processor seconds of a tracker that raises, and of the controller for it, from start to end."""
    said: list[str] = []
    own, children = time.process_time(), resource.getrusage(resource.RUSAGE_CHILDREN)
    tracker = TrackerProcess(f"{DOUBLES}:Raises", "", directory, said.append)
    while not said:
        await asyncio.sleep(0.5)
    await tracker.close()
    assert "ConnectionError" in said[0], said
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    tracker_s = ended.ru_utime + ended.ru_stime - children.ru_utime - children.ru_stime
    return {"tracker_cpu_s": round(tracker_s, 3), "controller_cpu_s": round(time.process_time() - own, 4)}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=at_least_one, default=60)
    parser.add_argument("--segment", type=float, default=1.0, help="seconds")
    parser.add_argument("--json", type=Path)
    return parser


def main() -> None:
    options = parser().parse_args()
    try:
        check_installed(list(MODES.values()))
    except ConfigError as error:
        sys.exit(f"trackers.py: {error}")
    controller_trackers.DRAIN_S = 1.0  # at the end of the run with the tracker that hangs
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        save_model("tiny", model := Path(folder) / "model")
        for mode, tracker in MODES.items():
            found[mode] = measure(model, Path(folder) / mode, tracker, options.rounds, options.segment)
            print(json.dumps({mode: found[mode]}, indent=1))
        found["raises"] = asyncio.run(failure(Path(folder) / "hangs"))
        found["hangs"] |= asyncio.run(watching(Path(folder) / "tensorboard"))
    print(json.dumps(found["raises"]), json.dumps(found["hangs"]))
    if options.json:
        result = conditions() | {"rounds": options.rounds, "segment_s": options.segment} | found
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
