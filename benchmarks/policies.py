"""Several policies in one run learn: both examples, on several seeds, against each other and against the start.

    python benchmarks/policies.py [--seeds 3] [--json benchmarks/results/policies.json]

Each policy must have a higher reward at the end than at the start against the others as they were at the start, and
the proposer and the solver also against each other. (In Nim the two rewards of a game always have the sum 1.)
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from work import at_least_one, conditions

EXAMPLES = Path(__file__).parents[1] / "examples"
MUST_RISE = {"nim": ("against_start",), "words": ("against_start", "reward")}


def play(example: str, seed: int, directory: Path) -> dict[str, Any]:
    """Run an example. Returns reward and 95% interval of each policy at the start and at the end."""
    began = time.perf_counter()
    command = [sys.executable, str(EXAMPLES / f"{example}.py"), "--seed", str(seed), "--dir", str(directory), "--quiet"]
    subprocess.run(command, check=True, cwd=EXAMPLES.parent, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - began
    lines = (directory / "run_0" / "evaluations.jsonl").read_text().splitlines()
    first, last = json.loads(lines[0]), json.loads(lines[-1])
    rewards = {
        name.removeprefix("eval/policies/"): {
            when: {"reward": round(each[name], 3), "interval": [round(bound, 3) for bound in each["intervals"][name]]}
            for when, each in (("before", first), ("after", last))
        }
        for name in sorted(last)
        if name.startswith("eval/policies/")
    }
    rises = [r["after"]["interval"][0] > r["before"]["interval"][1]
             for name, r in rewards.items() if name.partition("/")[2] in MUST_RISE[example]]  # fmt: skip
    return {"example": example, "seed": seed, "steps": last["step"], "seconds": round(seconds),
            "better": all(rises), "rewards": rewards}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--seeds", type=at_least_one, default=3)
    found.add_argument("--json", type=Path)
    return found


def main() -> None:
    options = parser().parse_args()
    runs = []
    with tempfile.TemporaryDirectory() as scratch:
        for example in MUST_RISE:
            for seed in range(options.seeds):
                runs.append(play(example, seed, Path(scratch) / f"{example}_{seed}"))
                print(json.dumps(runs[-1]), flush=True)
    better = all(run["better"] for run in runs)
    record = {**conditions(), "every_policy_is_better_than_its_start": better, "runs": runs}
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    print(f"every policy is better than its start: {better}")
    sys.exit(not better)


if __name__ == "__main__":
    main()
