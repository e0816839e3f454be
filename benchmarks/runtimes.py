"""What Ray costs: the same run on child processes and on Ray actors of this host, alternately.

    python benchmarks/runtimes.py [--shape tiny] [--steps 300] [--rounds 3] [--json FILE] [OPTION OF A RUN ...]

Steps per second are those after the first tenth of the steps, so that starts are left out. The ratio is that of the
medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
from pathlib import Path

from kill import MODULE, WORK
from work import SHAPES, at_least_one, conditions, save_model

RUNTIMES = ("local", "ray")


def steps_per_second(command: list[str], directory: Path, steps: int) -> float:
    """Steps per second of one run, from the times of its metrics' records."""
    done = subprocess.run([*command, f"--run.dir={directory}"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    walls = [json.loads(line)["time/wall_s"] for line in (directory / "metrics.jsonl").read_text().splitlines()]
    first = steps // 10
    return (len(walls) - 1 - first) / float(walls[-1] - walls[first])


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--shape", choices=list(SHAPES), default="tiny")
    found.add_argument("--steps", type=at_least_one, default=300)
    found.add_argument("--rounds", type=at_least_one, default=3)
    found.add_argument("--json", type=Path)
    return found


def main() -> None:
    options, flags = parser().parse_known_args()
    rates: dict[str, list[float]] = {name: [] for name in RUNTIMES}
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary)
        save_model(options.shape, scratch / "model")
        (scratch / "run.toml").write_text("")
        common = [
            *MODULE, "train", str(scratch / "run.toml"), f"--model.path={scratch / 'model'}",
            f"--environment.name={WORK}:Work", f"--loop.steps={options.steps}", "--loop.groups_per_step=16",
            "--loop.group_size=8", "--sampling.max_tokens=16", "--evaluation.tasks=0", *flags,
        ]  # fmt: skip
        for number in range(options.rounds):
            for name in RUNTIMES:
                command = [*common, f"--runtime.kind={name}"]
                rates[name].append(steps_per_second(command, scratch / f"{name}_{number}", options.steps))
                print(f"round {number + 1}, {name}: {rates[name][-1]:.2f} steps/s", flush=True)
            local, ray = (statistics.median(rates[name]) for name in RUNTIMES)
            if options.json:
                found = {**conditions(), "steps_per_s": rates, "ratio": ray / local}
                options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(f"Ray: {ray:.2f} steps/s, {ray / local:.3f} of local's {local:.2f} (medians of {options.rounds})")


if __name__ == "__main__":
    main()
