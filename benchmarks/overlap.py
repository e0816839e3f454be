"""The speed-up by overlapping generation and training: steps per second with `max_lag` 0 and 2, one core each.

    python benchmarks/overlap.py [--steps 40] [--rounds 3] [--json benchmarks/results/overlap.json]

First the work is balanced: prompts are lengthened (which costs the trainer more than the generator, since the rollouts
of a group share their prompt) or slots are removed until generation and training take equal time in a synchronous run.
Then synchronous and asynchronous runs alternate. Steps per second are counted from the first rollout to the last step.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from work import conditions, save_model

import slipstream

HERE = Path(__file__).parent


def run(scratch: Path, prompt_tokens: int, slots: int, steps: int, max_lag: int) -> tuple[dict[str, Any], list[Any]]:
    directory = scratch / "run"
    shutil.rmtree(directory, ignore_errors=True)
    config = slipstream.load_config(
        None,
        [
            f"--model.path={scratch / 'model'}", f"--environment.name={HERE / 'work.py'}:Work",
            f"--environment.options={{prompt_tokens = {prompt_tokens}}}", f"--run.dir={directory}",
            f"--loop.steps={steps}", f"--loop.max_lag={max_lag}", "--loop.groups_per_step=8", "--loop.group_size=8",
            "--sampling.max_tokens=48", f"--generator.max_num_seqs={slots}", "--generator.threads=1",
            "--trainer.threads=1",
            "--trainer.tokens_per_microbatch=2048", "--evaluation.tasks=0", f"--checkpoint.every={steps}",
        ],
    )  # fmt: skip
    summary = slipstream.train(config, quiet=True)
    return summary, [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def balance(scratch: Path, steps: int = 8) -> tuple[int, int, float]:
    """Prompt length and slots that balance generation and training of a synchronous run, and their ratio."""
    prompt_tokens, slots, ratio = 16, 64, 0.0
    for _ in range(6):
        _, metrics = run(scratch, prompt_tokens, slots, steps, max_lag=0)
        generation = statistics.median(m["time/batch_wait_s"] for m in metrics[1:])
        training = statistics.median(m["time/step_s"] for m in metrics[1:])
        ratio = generation / training
        print(
            f"  {prompt_tokens} prompt tokens, {slots} slots: generation {generation:.3f} s, training {training:.3f} s"
        )
        if 0.93 < ratio < 1.07:
            break
        if ratio > 1:
            prompt_tokens += max(1, round((prompt_tokens + 48) * (ratio - 1) * 0.8))
        elif prompt_tokens > 4:
            prompt_tokens = max(4, prompt_tokens - max(1, round((prompt_tokens + 48) * (1 - ratio) * 0.8)))
        else:
            slots = max(8, round(slots * ratio))
    return prompt_tokens, slots, ratio


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--steps", type=int, default=40)
    found.add_argument("--rounds", type=int, default=3)
    found.add_argument("--json", type=Path)
    return found


def main() -> None:
    options = parser().parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary)
        save_model("1M", scratch / "model")
        print("balancing ...")
        prompt_tokens, slots, ratio = balance(scratch)
        rounds = []
        for _ in range(options.rounds):
            result: dict[str, Any] = {}
            for max_lag in (0, 2):
                summary, _ = run(scratch, prompt_tokens, slots, options.steps, max_lag)
                window = summary["window_s"]
                result[str(max_lag)] = {"steps_per_second": options.steps / window, "busy": summary["busy"]}
            result["speedup"] = result["2"]["steps_per_second"] / result["0"]["steps_per_second"]
            rounds.append(result)
            print(
                f"max_lag 0: {result['0']['steps_per_second']:.2f} steps/s, max_lag 2: "
                f"{result['2']['steps_per_second']:.2f} steps/s, {result['speedup']:.2f}x, busy "
                + ", ".join(f"{side} {share:.0%}" for side, share in result["2"]["busy"].items()),
                flush=True,
            )
        median = statistics.median(r["speedup"] for r in rounds)
        print(f"overlap is worth {median:.2f}x (median of {options.rounds}; generation / training = {ratio:.2f})")
        if options.json:
            found = {**conditions(), "balance": ratio, "prompt_tokens": prompt_tokens, "slots": slots,
                     "rounds": rounds, "speedup": median}  # fmt: skip
            options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
