"""Runs survive kills: killed with -9 at random moments, resumed until they end, then audited.

    python benchmarks/kill.py [--runs 30] [--seed 0] [--json benchmarks/results/kill.json]

Each run trains a tiny model on pseudo-random rewards, which move its weights at every step. After a random number of
steps, or before the first, its controller, its trainer or its generator is killed, up to three times, and resumed by
`slipstream train --resume`. Afterwards the records are audited: every step once, no visit trained on twice, every visit
accounted for, one outcome for every rollout. Half of the runs are synchronous (`max_lag = 0`), and must end with the
weights of an undisturbed run, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from safetensors.numpy import load_file
from work import conditions, save_model

STEPS, GROUPS, SIZE = 60, 4, 4
WORK = Path(__file__).parent / "work.py"
MODULE = [sys.executable, "-m", "slipstream.cli"]


def arguments(model: Path, directory: Path, max_lag: int) -> list[str]:
    options = {
        "model.path": model, "environment.name": f"{WORK}:Work", "environment.options": "{ tasks = 50 }",
        "run.dir": directory, "loop.steps": STEPS, "loop.groups_per_step": GROUPS, "loop.group_size": SIZE,
        "loop.max_lag": max_lag, "loop.seed": 5, "sampling.max_tokens": 5, "trainer.learning_rate": 1e-3,
        "trainer.threads": 1, "generator.threads": 1, "checkpoint.every": 4, "evaluation.tasks": 20,
        "evaluation.every": 7, "algorithm.filter_zero_advantage": "true", "runtime.max_restarts": 0,
    }  # fmt: skip
    path = directory.with_suffix(".toml")
    path.write_text("")
    return [*MODULE, "train", str(path), *(f"--{name}={value}" for name, value in options.items())]


def children(process: int) -> list[int]:
    """The processes that the controller `process` started."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == process:
            found.append(int(status.parent.name))
    return found


def steps_done(directory: Path) -> int:
    """Lines of metrics, one a step."""
    path = directory / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def run_with_kills(
    model: Path,
    directory: Path,
    max_lag: int,
    rng: random.Random,
    kills: int,
    popen: type[subprocess.Popen[str]] = subprocess.Popen,
    workers: Callable[[int], list[int]] = children,
) -> list[tuple[str, int]]:
    """Start a run, kill it `kills` times, each a random number of steps after its start or resumption, and let it end.

    `popen` starts it, and `workers` finds its workers. Returns what was killed, and after which step.
    """
    command, killed = arguments(model, directory, max_lag), []
    for attempt in range(kills + 1):
        process = popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if attempt < kills:
            due = steps_done(directory) + rng.randint(0, STEPS // (kills + 1))
            time.sleep(rng.uniform(0.0, 2.0))  # lets a kill come before the first step, too
            while process.poll() is None and steps_done(directory) < due:
                time.sleep(0.005)
            victim, name = process.pid, "controller"
            if rng.random() < 0.4 and (started := workers(process.pid)):
                victim, name = rng.choice(started), "a child"
            if process.poll() is None:
                os.kill(victim, signal.SIGKILL)
                killed.append((name, steps_done(directory)))
        output, _ = process.communicate(timeout=240)
        if attempt == kills:
            assert process.returncode == 0, output
        elif "Traceback" in output:
            raise AssertionError(f"a traceback reached the user:\n{output}")
        if (directory / "config.toml").exists():
            command = [*MODULE, "train", "--resume", str(directory)]
        if (directory / "summary.json").exists():
            break  # it ended before it could be killed
    return killed


def audit(directory: Path, last_step: int = STEPS) -> dict[str, Any]:
    """Check that a finished run's records are consistent. Raises `AssertionError`."""
    summary = json.loads((directory / "summary.json").read_text())
    metrics = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in metrics] == list(range(1, last_step + 1))
    files = sorted((directory / "rollouts").iterdir())
    assert [f.name for f in files] == [f"step_{step:06d}.parquet" for step in range(1, last_step + 1)]
    steps = [pq.read_table(file).to_pylist() for file in files]
    trained: list[int] = []
    for step, rows in enumerate(steps, 1):
        visits = {row["visit_id"] for row in rows}
        assert len(visits) == GROUPS and all(row["step"] == step for row in rows)
        trained += visits
    assert len(trained) == len(set(trained)), "a visit was trained on twice"

    last = json.loads((directory / "checkpoints" / f"step_{last_step}" / "run.json").read_text())["ledger"]
    live = {visit["id"] for visit in last["live"]}
    assert not live & set(trained)
    filtered, rest = divmod(last["counts"]["filtered"], SIZE)  # no rollout of this work fails, so groups are whole
    assert rest == 0
    assert len(live) + len(trained) + filtered + last["abandoned"] == last["next_id"], "a visit was lost"
    counts = summary["rollouts"]
    fates = ("trained", "dropped_stale", "failed", "filtered", "ready")
    assert counts["generated"] == sum(counts[fate] for fate in fates)
    assert counts["trained"] == sum(len(rows) for rows in steps)
    assert not list(directory.rglob("*.partial"))
    return summary


def weights(directory: Path) -> dict[str, Any]:
    return dict(load_file(directory / "policy" / "model.safetensors"))


def same_bits(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(a[name].tobytes() == b[name].tobytes() for name in a)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--runs", type=int, default=30)
    found.add_argument("--seed", type=int, default=0)
    found.add_argument("--json", type=Path)
    return found


def main() -> None:
    options = parser().parse_args()
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary)
        save_model("tiny", scratch / "model")
        run_with_kills(scratch / "model", scratch / "undisturbed", 0, rng, kills=0)
        audit(scratch / "undisturbed")
        wanted, kills, equal = weights(scratch / "undisturbed"), 0, 0
        for number in range(options.runs):
            directory, max_lag = scratch / f"run_{number}", (0, 2)[number % 2]
            killed = run_with_kills(scratch / "model", directory, max_lag, rng, kills=rng.randint(1, 3))
            audit(directory)
            kills += len(killed)
            if max_lag == 0:
                assert same_bits(weights(directory), wanted), "a resumed synchronous run ended with other weights"
                equal += 1
            victims = ", ".join(f"{name} after step {step}" for name, step in killed)
            print(f"run {number + 1}/{options.runs}: max_lag {max_lag}, killed {victims}: sound", flush=True)
    print(f"{options.runs} runs, {kills} kills: all conserved; {equal} synchronous runs equal an undisturbed one")
    if options.json:
        found = {**conditions(), "runs": options.runs, "kills": kills, "bit_identical": equal}
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
