"""The cost of slow scoring: the generator's busy fraction with a scorer 10 times slower than generation, and without.

    python benchmarks/scoring.py [--steps 20] [--rounds 3] [--json benchmarks/results/scoring.json]

Two runs are concurrent on the same cores: one with an instant scorer, one with a slow scorer, both in 8 processes. The
generation time of a rollout is the generator's busy seconds divided by its rollouts, measured first on two runs with
instant scorers; the difference of these two is the noise. The slow scorer takes 10 times that time for each rollout. 8
such workers score at most 0.8 of the rollouts of a generator that is always busy. So the trainer gets long prompts and
becomes the bottleneck: the benchmark measures whether scoring delays generation, and not that 8 is less than 10.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from work import conditions, save_model

import slipstream

HERE = Path(__file__).parent
SLOWER, WORKERS = 10, 8
SCORER = """
import time
import hashlib

def score(task, completion):
    time.sleep({seconds})
    return hashlib.blake2b(repr(completion.token_ids).encode(), digest_size=1).digest()[0] / 255
"""


def run(model: Path, directory: Path, seconds: float, steps: int, prompt_tokens: int) -> dict[str, Any]:
    """The summary of a run with a scorer of the given seconds for each rollout."""
    scorer = directory.parent / f"{directory.name}.py"
    shutil.rmtree(directory, ignore_errors=True)
    scorer.write_text(SCORER.format(seconds=seconds))
    config = slipstream.load_config(
        None,
        [
            f"--model.path={model}", f"--environment.name={HERE / 'work.py'}:Work",
            f"--environment.options={{prompt_tokens = {prompt_tokens}}}", f"--run.dir={directory}",
            f"--scoring.kind={scorer}:score", f"--environment.reward_workers={WORKERS}",
            f"--loop.steps={steps}", "--loop.max_lag=4", "--loop.groups_per_step=4", "--loop.group_size=8",
            "--sampling.max_tokens=48", "--generator.max_num_seqs=64", "--generator.threads=1", "--trainer.threads=1",
            "--trainer.tokens_per_microbatch=2048", "--evaluation.tasks=0", f"--checkpoint.every={steps}",
        ],
    )  # fmt: skip
    return slipstream.train(config, quiet=True)


def seconds_per_rollout(summary: dict[str, Any]) -> float:
    """Busy seconds of the generator for each rollout; all rollouts have 48 tokens."""
    return float(summary["busy"]["generator"] * summary["window_s"] / (summary["tokens_generated"] / 48))


def side_by_side(scratch: Path, seconds: Sequence[float], *work: int) -> list[dict[str, Any]]:
    """The summaries of concurrent runs with scorers of the given seconds for each rollout."""
    with ProcessPoolExecutor(len(seconds), multiprocessing.get_context("spawn")) as pool:
        runs = [pool.submit(run, scratch / "model", scratch / f"run{i}", s, *work) for i, s in enumerate(seconds)]
        return [one.result() for one in runs]


def compare(instant: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Metrics of two concurrent runs, and the difference of their generators' busy fractions."""
    sides = {
        name: {"busy": s["busy"], "steps_per_second": s["steps"] / s["window_s"]}
        for name, s in (("instant", instant), ("other", other))
    }
    return sides | {"change": other["busy"]["generator"] / instant["busy"]["generator"] - 1}


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--steps", type=int, default=20)
    found.add_argument("--rounds", type=int, default=3)
    found.add_argument("--prompt-tokens", type=int, default=448)
    found.add_argument("--json", type=Path)
    return found


def main() -> None:
    options = parser().parse_args()
    work = (options.steps, options.prompt_tokens)
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary)
        save_model("1M", scratch / "model")
        alike = side_by_side(scratch, (0.0, 0.0), *work)
        chance = compare(*alike)
        seconds = SLOWER * statistics.mean(map(seconds_per_rollout, alike))
        print(f"generation takes {1000 * seconds / SLOWER:.1f} ms a rollout, the slow scorer {1000 * seconds:.0f} ms; "
              f"by chance alone {chance['change']:+.1%}")  # fmt: skip
        rounds = []
        for _ in range(options.rounds):
            rounds.append(compare(*side_by_side(scratch, (0.0, seconds), *work)))
            print(json.dumps(rounds[-1]), flush=True)
        busy = {side: statistics.median(r[side]["busy"]["generator"] for r in rounds) for side in ("instant", "other")}
        change = statistics.median(r["change"] for r in rounds)
        print(f"generator busy {busy['instant']:.1%} with the instant scorer, {busy['other']:.1%} with the slow one "
              f"(change {change:+.1%}; medians of {options.rounds})")  # fmt: skip
        if options.json:
            result = {**conditions(), "score_seconds": seconds, "workers": WORKERS, "chance": chance["change"],
                      "change": change, "busy": busy, "rounds": rounds}  # fmt: skip
            options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
