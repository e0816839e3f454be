"""Tokens per second follow the number of engines of a running run, and no rollout is lost.

    python benchmarks/elastic.py [--engines 1 4 2] [--seconds 30] [--json FILE]

A run waits for generation: simulated engines of 8 slots sample 400 tokens/s in each slot, and the trainer answers at
once. `slipstream scale` changes the number of engines while the run goes on. The rate of each part is that of
`seconds` from the time at which all its engines serve. Afterwards the records are audited as in kill.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import simulated
from kill import GROUPS, MODULE, SIZE, WORK, audit
from work import at_least_one, conditions, save_model

from slipstream.client import RunHandle, attach
from slipstream.rollout import Completion

SLOTS, RATE, TOKENS = 8, 400.0, 200  # RATE in tokens/s of a slot
START_TIMEOUT_S = 120.0


class Engine(simulated.Engine):
    """A simulated engine in which requests wait for a slot."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._slots = asyncio.Semaphore(SLOTS)

    async def generate(self, prompt: Any, sampling: Any) -> Completion:
        async with self._slots:
            return await super().generate(prompt, sampling)


def command(model: Path, directory: Path, engines: int) -> list[str]:
    chosen = {
        "model.path": model, "environment.name": f"{WORK}:Work", "run.dir": directory, "loop.steps": 1_000_000,
        "loop.groups_per_step": GROUPS, "loop.group_size": SIZE, "loop.max_lag": 8, "sampling.max_tokens": TOKENS,
        "generator.engine": "elastic:Engine", "generator.replicas": engines, "generator.max_num_seqs": SLOTS,
        "generator.max_model_len": 0, "trainer.kind": "simulated:Student", "evaluation.tasks": 0, "sync.verify": "off",
    }  # fmt: skip
    path = directory.with_suffix(".toml")
    path.write_text("")
    return [*MODULE, "train", str(path), *(f"--{name}={value}" for name, value in chosen.items())]


def wait_for(run: RunHandle, engines: int) -> float:
    """Seconds until as many engines serve the current version."""
    began = time.monotonic()
    while True:
        status = run.status()
        newest = max(1, status["version"] - 1)  # an engine may be in the middle of a publish
        serving = [engine for engine in status["engines"] if engine["alive"] and engine["version"] >= newest]
        if len(serving) == len(status["engines"]) == engines:
            return time.monotonic() - began
        assert time.monotonic() - began < START_TIMEOUT_S, f"{engines} engines do not serve: {status['engines']}"
        time.sleep(0.1)


def rate(run: RunHandle, seconds: float) -> float:
    """Tokens/s that the engines sample, over the steps of the next `seconds`."""
    first = run.metrics()[-1]
    time.sleep(seconds)
    last = run.metrics()[-1]
    tokens = last["gen/total_tokens"] - first["gen/total_tokens"]
    return float(tokens / (last["time/wall_s"] - first["time/wall_s"]))


def measure(counts: list[int], seconds: float, scratch: Path) -> list[dict[str, Any]]:
    save_model("tiny", scratch / "model")
    directory, parts = scratch / "run", []
    environment = os.environ | {simulated.RATE: str(RATE), "PYTHONPATH": str(Path(__file__).parent)}
    with (
        (scratch / "output").open("w") as output,
        subprocess.Popen(
            command(scratch / "model", directory, counts[0]), stdout=output, stderr=output, env=environment
        ) as process,
    ):
        try:
            while not (directory / "metrics.jsonl").exists():
                assert process.poll() is None, (scratch / "output").read_text()
                time.sleep(0.1)
            run = attach(directory)
            for number, engines in enumerate(counts):
                if number:
                    run.scale(engines)
                waited = wait_for(run, engines)
                parts.append({"engines": engines, "seconds": round(waited, 1), "tokens_per_s": rate(run, seconds)})
                print(f"{engines} engines, {waited:.1f} s later: {parts[-1]['tokens_per_s']:,.0f} tokens/s", flush=True)
            run.stop()
            assert process.wait(60) == 0, (scratch / "output").read_text()
        finally:
            process.kill()
    steps = (directory / "metrics.jsonl").read_bytes().count(b"\n")
    parts.append({"rollouts": audit(directory, steps)["rollouts"], "steps": steps})
    return parts


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--engines", type=at_least_one, nargs="+", default=[1, 4, 2])
    found.add_argument("--seconds", type=float, default=30.0)
    found.add_argument("--json", type=Path)
    return found


def main() -> None:
    options = parser().parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        *parts, end = measure(options.engines, options.seconds, Path(temporary))
    first = parts[0]["tokens_per_s"] / parts[0]["engines"]
    ratios = ", ".join(f"{p['engines']} engines {p['tokens_per_s'] / first:.2f}" for p in parts)
    print(f"tokens/s by those of one engine: {ratios}; {end['steps']} steps, every rollout is accounted for")
    if options.json:
        options.json.write_text(json.dumps({**conditions(), "parts": parts, **end}, indent=1) + "\n")


if __name__ == "__main__":
    main()
