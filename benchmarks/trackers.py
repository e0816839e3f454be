"""Steps per second of a run without trackers, with tensorboard, and with a tracker that hangs, alternately.

    make .venv/trackers/installed
    .venv/trackers/bin/python benchmarks/trackers.py --json benchmarks/results/trackers.json

Each round ends with a second run without trackers: its ratio to the first is the noise of the machine. `busy` is the
processor time of the tracker's process per second of the run, after its start: noise of the machine does not change it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from work import at_least_one, conditions, save_model

from slipstream import load_config, load_run, train
from slipstream.controller import trackers as controller_trackers

MEASURED = Path(__file__).resolve().with_name("measured_trackers.py")
MODES = {"none": [], "tensorboard": [f"{MEASURED}:Measured"], "hangs": [f"{MEASURED}:Hangs"], "none again": []}
START_S = 6.0  # of each run, in which the tracker's process starts: not measured


def steps_per_second(model: Path, directory: Path, trackers: list[str], steps: int) -> dict[str, Any]:
    values: Mapping[str, Any] = {
        "model.path": model, "environment.name": f"{Path(__file__).parent}/work.py:Work", "run.dir": directory,
        "loop.steps": steps, "loop.groups_per_step": 4, "loop.group_size": 8, "sampling.max_tokens": 16,
        "trainer.threads": 1, "generator.threads": 1, "evaluation.tasks": 0, "checkpoint.every": steps,
        "observe.trackers": json.dumps(trackers), "observe.report": "false", "observe.health": "false",
    }  # fmt: skip
    with contextlib.redirect_stderr(io.StringIO()) as said:
        train(load_config(None, [f"--{name}={value}" for name, value in values.items()]), quiet=True)
    metrics = load_run(directory).metrics
    assert len(metrics) == steps, "a record is missing"
    measured = [record for record in metrics if record["time/wall_s"] - metrics[0]["time/wall_s"] > START_S]
    seconds = measured[-1]["time/wall_s"] - measured[0]["time/wall_s"]
    found: dict[str, Any] = {"steps_per_s": (len(measured) - 1) / seconds, "said": said.getvalue().splitlines()}
    if trackers:
        times = [json.loads(line) for line in (directory / "cpu.jsonl").read_text().splitlines()]
        (began, first), (ended, last) = times[1], times[-1]
        found |= {"start_cpu_s": first, "busy": (last - first) / (ended - began)}
    return found


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=at_least_one, default=7)
    parser.add_argument("--steps", type=at_least_one, default=250)
    parser.add_argument("--json", type=Path)
    return parser


def main() -> None:
    options = parser().parse_args()
    controller_trackers.DRAIN_S = 1.0  # at the end of each run with the tracker that hangs
    found: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory() as folder:
        save_model("tiny", model := Path(folder) / "model")
        for number in range(options.rounds):
            for mode, trackers in MODES.items():
                directory = Path(folder) / f"{mode.replace(' ', '_')}_{number}"
                found[mode].append(steps_per_second(model, directory, trackers, options.steps))
                print(number, mode, found[mode][-1], file=sys.stderr)
    rates = {mode: [run["steps_per_s"] for run in runs] for mode, runs in found.items()}
    ratios = {mode: [b / a for a, b in zip(rates["none"], rates[mode], strict=True)] for mode in MODES}
    trackers = {
        mode: {name: median(run[name] for run in found[mode]) for name in ("start_cpu_s", "busy")}
        for mode in ("tensorboard", "hangs")
    }
    medians = {
        "median_steps_per_s": {mode: median(values) for mode, values in rates.items()},
        "median_ratio": {mode: median(values) for mode, values in ratios.items()},
        "tracker_process": trackers,
    }
    note = "a machine shared with other work: a ratio means nothing below that of the two runs without trackers"
    result = conditions() | {"note": note, "rounds": options.rounds, "steps": options.steps} | medians
    result |= {"ratios": ratios, "steps_per_s": rates}
    print(json.dumps(medians, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
