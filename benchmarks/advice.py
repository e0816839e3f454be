"""Whether the planner's advice pays: badly set runs, and the same runs with the one option changed that it names.

    python benchmarks/advice.py [--steps 30] [--cases N] [--json FILE]

Real runs with the real loop on this machine; engines and trainer are simulated: they wait instead of computing, so
added ones cost no processor. An engine has slots and takes the same time for each decode step; the trainer's step takes
a time for each token, divided by its ranks. `gain` is trained tokens/s with the change over those without, `predicted`
what the advice said; `error` is that of the simulation of the first run itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from bisect import bisect_right
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import simulated

from slipstream.rollout import Completion, VersionSpan
from slipstream.step_stats import StepStats

HERE = Path(__file__).resolve().parent
RATES = "SLIPSTREAM_ADVICE"  # environment variable: the case as JSON
TOKENS = 100  # median length of a completion; the limit is four times as long
# decode: ms of a step; train: seconds of a step of 16 completions by one rank; the options of a run
CASES: tuple[dict[str, float], ...] = (
    {"decode": 4, "train": 0.25, "slots": 8, "engines": 1, "ranks": 1, "lag": 1, "spread": 0.3},
    {"decode": 4, "train": 0.40, "slots": 6, "engines": 1, "ranks": 1, "lag": 2, "spread": 0.6},
    {"decode": 4, "train": 0.20, "slots": 4, "engines": 2, "ranks": 1, "lag": 1, "spread": 0.3},
    {"decode": 4, "train": 1.20, "slots": 8, "engines": 1, "ranks": 1, "lag": 1, "spread": 0.3},
    {"decode": 4, "train": 1.00, "slots": 16, "engines": 1, "ranks": 1, "lag": 2, "spread": 0.6},
    {"decode": 4, "train": 2.00, "slots": 16, "engines": 1, "ranks": 2, "lag": 1, "spread": 0.3},
    {"decode": 4, "train": 0.80, "slots": 8, "engines": 1, "ranks": 1, "lag": 0, "spread": 0.3},
    {"decode": 4, "train": 0.50, "slots": 8, "engines": 1, "ranks": 1, "lag": 0, "spread": 0.6},
    {"decode": 4, "train": 1.20, "slots": 8, "engines": 1, "ranks": 1, "lag": 0, "spread": 0.3},
    {"decode": 6, "train": 0.60, "slots": 32, "engines": 1, "ranks": 1, "lag": 1, "spread": 0.6},
    {"decode": 4, "train": 0.70, "slots": 8, "engines": 2, "ranks": 1, "lag": 0, "spread": 0.6},
    {"decode": 5, "train": 0.50, "slots": 16, "engines": 1, "ranks": 1, "lag": 1, "spread": 0.6},
)
GROUPS, GROUP = 4, 4


class Engine(simulated.Engine):
    """An engine with slots, whose decode step takes the same time with any number of sequences."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        case = json.loads(os.environ[RATES])
        self._step_s, self._free = case["decode"] / 1000, asyncio.Semaphore(int(case["slots"]))
        self._swaps: list[tuple[float, int]] = [(0.0, 0)]

    async def generate(self, prompt: Any, sampling: Any) -> Completion:
        async with self._free:
            began, count = time.monotonic(), sampling.max_tokens
            await asyncio.sleep(count * self._step_s)
        first = bisect_right(self._swaps, (began, 1 << 30)) - 1
        starts = [0] + [min(count, int((at - began) / self._step_s)) for at, _ in self._swaps[first + 1 :]]
        ends = [*starts[1:], count]
        versions = [version for _, version in self._swaps[first:]]
        spans = tuple(VersionSpan(v, a, b) for v, a, b in zip(versions, starts, ends, strict=True) if a < b)
        self._count += count
        return Completion(prompt, self._tokens[:count], self._logprobs[:count], spans, "length", sampling.temperature)

    async def swap(self, version: int) -> tuple[float, dict[str, float]]:
        self._swaps.append((time.monotonic(), version))
        return await super().swap(version)


class Student(simulated.Student):
    """A trainer whose step takes a time for each token, divided by the number of ranks."""

    async def step(self, batch: Any) -> StepStats:
        case, tokens = json.loads(os.environ[RATES]), batch.tokens
        seconds = case["train"] * tokens / (GROUPS * GROUP * TOKENS) / case["ranks"]
        await asyncio.sleep(seconds)
        self._steps += 1
        numbers: dict[str, Any] = dict.fromkeys(StepStats.__slots__, 0.0)
        numbers |= {"step": self._steps, "tokens": tokens, "packed_tokens": tokens, "seconds": seconds, "policies": {}}
        return StepStats(**numbers)

    async def save(self, path: Path, *_: Any) -> None:
        path.mkdir(exist_ok=True)  # of each rank
        (path / "weights").write_bytes(b"")


def flags(case: Mapping[str, float], model: Path, directory: Path, steps: int) -> list[str]:
    chosen = {
        "model.path": model, "environment.name": f"{HERE / 'work.py'}:Work", "run.dir": directory,
        "environment.options": f"{{prompt_tokens=4,spread={case['spread']}}}", "sampling.max_tokens": 4 * TOKENS,
        "loop.steps": steps, "loop.groups_per_step": GROUPS, "loop.group_size": GROUP,
        "loop.max_lag": int(case["lag"]), "generator.engine": f"{HERE / 'advice.py'}:Engine",
        "generator.replicas": int(case["engines"]), "generator.max_num_seqs": int(case["slots"]),
        "trainer.kind": f"{HERE / 'advice.py'}:Student", "trainer.ranks": int(case["ranks"]), "sync.verify": "off",
        "evaluation.tasks": 0, "checkpoint.every": 10**6, "observe.report": "false", "observe.health": "false",
    }  # fmt: skip
    return [f"--{name}={value}" for name, value in chosen.items()]


def play(case: Mapping[str, float], model: Path, directory: Path, steps: int) -> None:
    code = "import sys; from slipstream.run import train; from slipstream.config.loading import load_config; "
    code += "train(load_config(None, sys.argv[1:]), quiet=True)"
    command = [sys.executable, "-c", code, *flags(case, model, directory, steps)]
    done = subprocess.run(
        command, env=os.environ | {RATES: json.dumps(dict(case)), "PYTHONPATH": ":".join([str(HERE), *sys.path])},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"the run ended with {done.returncode}:\n{done.stderr[-3000:]}")


def compare(number: int, case: dict[str, float], model: Path, scratch: Path, steps: int) -> dict[str, Any]:
    """Play a case, take the advice, and play it again."""
    from slipstream.observe.advice import advise, fit_run  # not in the simulated workers, which import this file
    from slipstream.observe.run_data import load_run

    play(case, model, scratch / f"{number}", steps)
    first = load_run(scratch / f"{number}")
    found, reached = advise(first), fit_run(first)
    if found is None:
        return {"case": case, "change": None}
    option, _, value = found.change.partition(" = ")
    name = {"generator.replicas": "engines", "trainer.ranks": "ranks", "loop.max_lag": "lag"}[option]
    play(case | {name: int(value)}, model, scratch / f"{number}b", steps)
    gain = fit_run(load_run(scratch / f"{number}b")).tokens_per_s / reached.tokens_per_s
    return {
        "case": case, "change": found.change, "predicted": found.gain, "gain": gain, "error": found.error,
        "predicted_error": found.gain / gain - 1, "tokens_per_s": reached.tokens_per_s, "lag": reached.lag_mean,
        "trainer_busy": reached.trainer_busy, "engines_busy": reached.engines_busy,
    }  # fmt: skip


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--steps", type=int, default=30)
    found.add_argument("--cases", type=int, default=len(CASES), help="the first N")
    found.add_argument("--json", type=Path)
    return found


if __name__ == "__main__":
    from work import conditions, save_model

    options = parser().parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary)
        save_model("1M", scratch / "model")
        results = []
        for number, case in enumerate(CASES[: options.cases]):
            results.append(compare(number, case, scratch / "model", scratch, options.steps))
            print(json.dumps(results[-1]), flush=True)
    gains = [found["gain"] for found in results if found["change"]]
    record = conditions() | {
        "faster": sum(gain > 1 for gain in gains), "of": len(results), "median_gain": statistics.median(gains or [1.0]),
        "median_error": statistics.median(abs(f["predicted_error"]) for f in results if f["change"]),
        "results": results,
    }  # fmt: skip
    print(json.dumps(record, indent=1))
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
