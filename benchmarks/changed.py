"""Share of bfloat16 elements that GRPO changes in a step and in a publish of 4 steps, beside its prediction.

    python benchmarks/changed.py --data examples/data/gsm8k --models models/gemma-3-270m models/SmolLM2-135M-Instruct

Each case is a run on GSM8K with real rewards, by `slipstream.train`: bfloat16 weights of float32 masters, a constant
learning rate. For the first publishes and for those after step 20, a sender of `sync.link = "delta"` in the trainer
counts and codes the elements that differ from the weights before. Each is predicted twice: from the learning rate and
the start weights alone, and with `moving` (mean factor by which AdamW's eps damps updates) as measured after it in each
parameter: rows of an embedding without gradients do not move. `update` is the mean size of an update in learning rates.
`examples/gemma.py` and `examples/smollm2.py` make the models.
"""

from __future__ import annotations

import argparse
import json
import operator
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from work import conditions

import slipstream
from slipstream.config.schema import Config
from slipstream.rollout import Batch
from slipstream.step_stats import StepStats
from slipstream.sync.delta import DeltaSender
from slipstream.sync.link import PublishHandle
from slipstream.sync.prediction import count_exponents, expected_changed_fraction
from slipstream.trainers.trainer_worker import PytorchTrainerWorker

PUBLISHES = (1, 4)  # steps
FIRST, SETTLED = 3, 20  # first steps that are measured, and steps after which all others are
PIECE = 2**22  # elements
ROWS = "changed.jsonl"  # in the run directory


class MeasuredTrainer(PytorchTrainerWorker):
    """Writes a row for each publish of 1 and of 4 steps into the run directory."""

    def __init__(self, config: Config, run: str) -> None:
        super().__init__(config, run)
        weights = self._trainer.parameters
        self._exponents = [count_exponents([weight]) for weight in weights.values()]
        self._senders = {steps: DeltaSender(weights, config, Path(run), 0) for steps in PUBLISHES}
        for steps in PUBLISHES:
            self._send(steps, 0)

    async def step(self, batch: Batch) -> StepStats:
        stats = await super().step(batch)
        done = self._trainer.step_count
        rows = [self._row(done, steps) for steps in PUBLISHES if is_measured(done, steps)]
        for steps in PUBLISHES:
            if is_measured(done + steps, steps):
                self._send(steps, done)  # the version before that publish
        with (self._run_dir / ROWS).open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        return stats

    def _send(self, steps: int, version: int) -> PublishHandle:
        sender = self._senders[steps]
        return sender.send(sender.stage(version))

    def _row(self, done: int, steps: int) -> dict[str, Any]:
        """Changes by the last `steps` steps of those done, and their prediction."""
        sent, weights = self._send(steps, done), self._trainer.parameters
        numbers = [weight.numel() for weight in weights.values()]
        adamw = [damping_and_update(self._trainer._optimizer, weight) for weight in weights.values()]
        row = {
            "step": done, "steps": steps,
            "changed": sent["changed"], "bytes": sent["bytes"], "dense": 2 * sum(numbers),
        }  # fmt: skip
        row["moving"], row["update"] = (weighted_mean(values, numbers) for values in zip(*adamw, strict=True))
        for name, damping in (("predicted", [1.0] * len(adamw)), ("predicted_moving", [moving for moving, _ in adamw])):
            row[name] = weighted_mean(
                [self._predict(done, steps, *case) for case in zip(self._exponents, damping, strict=True)], numbers
            )
        return row

    def _predict(self, done: int, steps: int, exponents: Tensor, moving: float) -> float:
        options = self._config.trainer
        return expected_changed_fraction(
            exponents, options.learning_rate, steps, taken=done - steps, beta1=options.betas[0],
            weight_decay=options.weight_decay, moving=moving,
        )  # fmt: skip


def is_measured(end: int, steps: int) -> bool:
    """Whether the publish of so many steps that ends with this step is measured: the first ones, and those after 20."""
    return end % steps == 0 and (end <= max(FIRST, steps) or end - steps >= SETTLED)


@torch.no_grad()
def damping_and_update(optimizer: torch.optim.Optimizer, weight: Tensor) -> tuple[float, float]:
    """Means of sqrt(v) / (sqrt(v) + eps) and of |m| / (sqrt(v) + eps) over a parameter, both bias-corrected."""
    (beta1, beta2), eps = (optimizer.param_groups[0][name] for name in ("betas", "eps"))
    state, moving, size = optimizer.state[weight], 0.0, 0.0
    done = float(state["step"])
    moments = (state[name].view(-1).split(PIECE) for name in ("exp_avg", "exp_avg_sq"))
    for mean, square in zip(*moments, strict=True):
        root = (square / (1 - beta2**done)).sqrt_()
        moving += float((root / (root + eps)).sum(dtype=torch.float64))
        size += float((mean / (root + eps)).abs_().sum(dtype=torch.float64)) / (1 - beta1**done)
    return moving / weight.numel(), size / weight.numel()


def weighted_mean(values: Sequence[float], numbers: Sequence[int]) -> float:
    return sum(map(operator.mul, values, numbers)) / sum(numbers)


def measure(model: Path, rate: float, options: argparse.Namespace, run: Path) -> dict[str, Any]:
    environment = json.dumps({"data": options.data, "shots": options.shots, "format_reward": 0.2})
    config = slipstream.load_config(
        None,
        [
            f"--model.path={model}", "--model.dtype=bfloat16", "--environment.name=gsm8k",
            f"--environment.options={environment}", f"--run.dir={run}", f"--trainer.kind={__file__}:MeasuredTrainer",
            f"--trainer.learning_rate={rate}", "--trainer.schedule=constant", "--trainer.tokens_per_microbatch=2048",
            "--trainer.activation_checkpointing=none",
            "--algorithm.advantage={name = 'group_mean', normalize = true}", "--algorithm.filter_zero_advantage=true",
            f"--sampling.max_tokens={options.tokens}", '--sampling.stop=["\\nQuestion:", "\\n\\n"]',
            f"--loop.steps={options.steps}", "--loop.groups_per_step=1", "--loop.group_size=8", "--loop.max_lag=2",
            "--generator.max_num_seqs=16", "--generator.max_model_len=1024", "--trainer.logprob_tolerance=2",
            f"--sampling.temperature={options.temperature}", "--runtime.max_restarts=0", "--sync.verify=off",
            "--evaluation.tasks=0", f"--checkpoint.every={options.steps}",
        ],
    )  # fmt: skip
    summary = slipstream.train(config, quiet=True)
    rows = [json.loads(line) for line in (run / ROWS).read_text().splitlines()]
    cases = [summarise([row for row in rows if row["steps"] == steps]) for steps in PUBLISHES]
    return {
        "model": model.name, "learning_rate": rate, "steps": options.steps,
        "seconds": summary["window_s"], "publishes": cases, "rows": rows,
    }  # fmt: skip


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the publishes after step 20, the least and greatest of their ratios, and the ratios of the first."""
    late = [row for row in rows if row["step"] - row["steps"] >= SETTLED] or rows[-1:]
    names = ("changed", "predicted", "predicted_moving", "moving", "update")
    ratios = [row["predicted_moving"] / max(row["changed"], 1e-12) for row in rows]
    return {
        "steps": rows[0]["steps"], "publishes": len(late),
        **{name: statistics.median(row[name] for row in late) for name in names},
        "ratio": [min(ratios[-len(late) :]), max(ratios[-len(late) :])], "first_ratios": ratios[: -len(late)],
        "bytes_of_dense": statistics.median(row["bytes"] / row["dense"] for row in late),
        "most_bytes_of_dense": max(row["bytes"] / row["dense"] for row in rows),
    }  # fmt: skip


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--data", default="examples/data/gsm8k")
    found.add_argument("--models", type=Path, nargs="+", default=[Path("models/gemma-3-270m")])
    found.add_argument("--learning-rates", type=float, nargs="+", default=[1e-6, 3e-6, 1e-5])
    found.add_argument("--steps", type=int, default=24)
    found.add_argument("--tokens", type=int, default=32, help="most tokens of a completion")
    found.add_argument("--temperature", type=float, default=0.8)
    found.add_argument("--shots", type=int, default=1, help="worked examples in the prompt")
    found.add_argument("--json", type=Path, help="results are added to this file")
    return found


def main() -> None:
    options = parser().parse_args()
    for model in options.models:
        for rate in options.learning_rates:
            with tempfile.TemporaryDirectory() as scratch:
                found = measure(model, rate, options, Path(scratch) / "run")
            print(json.dumps({**found, "rows": len(found["rows"])}), flush=True)
            if options.json:
                before = json.loads(options.json.read_text()) if options.json.exists() else []
                options.json.write_text(json.dumps([*before, {**conditions(), **found}], indent=1) + "\n")


if __name__ == "__main__":
    main()
