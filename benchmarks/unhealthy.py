"""Five runs that go wrong in five ways, on a CPU with a tiny model, to see whether rules and report name the cause.

    python benchmarks/unhealthy.py runs/unhealthy [--only stale-weights,dead-engine] [--model START] [--steps 120]

Each run leaves its directory in the given folder. Prints the rules that each run must break, and what the rules found.
Without `--model` the start model of `examples/demo.py` is made first.

| run | what is wrong |
| --- | --- |
| stale-weights | engines accept each publish and tag tokens with its version, but go on with the weights of the start |
| reward-hacking | the reward counts digits instead of right answers |
| dead-engine | one of two engines is killed, and generator.max_restarts = 0 |
| slow-scorer | the scorer sleeps |
| entropy-collapse | the learning rate is 20 times too high |
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import slipstream
from slipstream.config.schema import Config
from slipstream.environments.addition import Addition, target
from slipstream.environments.base import Policy, Task
from slipstream.generators.generator_worker import Engine, GeneratorWorker, OpenWeights
from slipstream.generators.served_weights import ServedWeights
from slipstream.observe.health import check
from slipstream.rollout import Rollout

HERE = Path(__file__).resolve()
EXAMPLES = HERE.parents[1] / "examples"
DIES_AT = 20  # version at which the engine dies
SCORE_S = 0.3


class OldWeights(ServedWeights):
    """Receives versions and never serves them."""

    def apply(self) -> None:
        self._next = None


class StaleEngine(GeneratorWorker):
    """Serves the weights of the start, whatever version it says."""

    def _load(self) -> tuple[Engine, OpenWeights]:
        engine, open_weights = super()._load()

        def open_old(link: str, info: Any, rank: int) -> ServedWeights:
            weights = open_weights(link, info, rank)
            weights.__class__ = OldWeights
            return weights  # type: ignore[return-value]

        return engine, open_old


class DyingEngine(GeneratorWorker):
    """The second engine kills itself at version `DIES_AT`."""

    def __init__(self, config: Config, log: Path | None = None, sharers: int = 1) -> None:
        super().__init__(config, log, sharers)
        self._dies = log is not None and log.name == "generator_1.log"

    async def swap(self, version: int) -> tuple[float, dict[str, float]]:
        if self._dies and version == DIES_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().swap(version)


class CountsDigits(Addition):
    """Sums, whose reward is the number of digits in the answer; the held-out score is still of right answers."""

    async def rollout(self, task: Task, policy: Policy) -> Rollout:
        text = (await policy.sample(task.prompt)).text
        return policy.rollout(sum(c.isdigit() for c in text) / 5, correct=float(text == target(task)))


async def slow_score(task: Task, completion: Any) -> float:
    """The right reward, after a sleep."""
    await asyncio.sleep(SCORE_S)
    return float(completion.text == target(task))


RUNS: dict[str, tuple[tuple[str, ...], list[str]]] = {  # rules that must warn, and options
    "stale-weights": (
        ("stale-weights",), [f"--generator.engine={HERE}:StaleEngine", "--sync.verify=off", "--loop.max_lag=1"]
    ),
    "reward-hacking": (("score-falls",), [f"--environment.name={HERE}:CountsDigits"]),
    "dead-engine": (
        ("engine-lost",),
        [f"--generator.engine={HERE}:DyingEngine", "--generator.replicas=2", "--generator.max_restarts=0"],
    ),
    "slow-scorer": (("slow-rewards",), [f"--scoring.kind={HERE}:slow_score", "--scoring.concurrency=64"]),
    "entropy-collapse": (
        ("entropy-collapse",),
        ["--trainer.learning_rate=2e-2", "--trainer.gradient_clip=0", "--trainer.warmup_steps=0"],
    ),
}  # fmt: skip


def options(name: str, directory: Path, model: Path, steps: int) -> list[str]:
    """Flags of a run."""
    common = {
        "model.path": model, "run.dir": directory / name, "loop.steps": steps, "evaluation.every": max(1, steps // 4),
        "evaluation.tasks": 200, "checkpoint.every": steps, "trainer.schedule": "constant",
    }  # fmt: skip
    return [*(f"--{option}={value}" for option, value in common.items()), *RUNS[name][1]]


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("directory", type=Path)
    found.add_argument("--only", default=",".join(RUNS), help="runs, separated by commas")
    found.add_argument("--model", type=Path, help="start model (default: make it in the directory)")
    found.add_argument("--steps", type=int, default=120)
    return found


def main() -> int:
    chosen = parser().parse_args()
    model = chosen.model or chosen.directory / "start"
    if not model.exists():
        make = [sys.executable, str(EXAMPLES / "demo.py"), "--start-only", "--dir", str(chosen.directory)]
        subprocess.run(make, check=True)
    missed = 0
    for name in chosen.only.split(","):
        flags = options(name, chosen.directory, model, chosen.steps)
        slipstream.train(slipstream.load_config(str(EXAMPLES / "addition.toml"), flags), quiet=True)
        found = check(slipstream.load_run(chosen.directory / name))
        wanted = RUNS[name][0]
        missed += not set(wanted) <= {warning.rule for warning in found}
        print(f"\n{name}: must warn of {', '.join(wanted)}; found:")
        for warning in found:
            print(f"  step {warning.step}: {warning}")
    return min(missed, 1)


if __name__ == "__main__":
    sys.exit(main())
