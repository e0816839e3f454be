"""Tokens per second of a vLLM generator with and without deferral in its scheduler, in turns on one engine.

    python benchmarks/vllm_scheduler.py [--shape 1.7B] [--slots 256] [--rounds 3] [--json FILE] [config flags]

The first round warms up. Each round has twice as many sequences as slots. They have different lengths, so that they do
not end together. A scheduler defers on GPUs only: elsewhere both ways are the same.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
import vllm_scheduler  # this module, in the process of the benchmark and in that of vLLM's core
from work import conditions, mixed_prompt, sampling_rate, save_model, vllm_config

from slipstream.config.schema import Config
from slipstream.generators.vllm import scheduler
from slipstream.generators.vllm.engine import VllmEngine
from slipstream.rollout import Sampling

GPU = torch.cuda.is_available()
PROMPT, LENGTHS = 128, 64  # tokens of a prompt; number of different lengths
schedulers: list[Any] = []  # of this process


def create_scheduler(**arguments: Any) -> Any:
    vllm_scheduler.schedulers.append(scheduler.create_scheduler(**arguments))
    return vllm_scheduler.schedulers[-1]


def switch(worker: Any, defers: bool) -> None:
    """Run by vLLM's worker, which is in the process of the core."""
    [*_, last] = vllm_scheduler.schedulers
    last.defers = defers and scheduler.can_defer(last)


def configure(options: argparse.Namespace, model: str, flags: list[str]) -> Config:
    own = "--generator.engine_args.scheduler_cls=vllm_scheduler.create_scheduler"
    return vllm_config(model, options.slots, PROMPT, options.completion, [own, *flags])


def sample(engine: VllmEngine, options: argparse.Namespace, number: int) -> float:
    """Tokens per second of one round."""
    return sampling_rate(engine, (
        (mixed_prompt(options.shape, PROMPT, i, number),
         Sampling(max_tokens=options.completion - i % LENGTHS, seed=i, ignore_eos=True))
        for i in range(2 * options.slots)
    ))  # fmt: skip


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--shape", default="1.7B")
    found.add_argument("--slots", type=int, default=256)
    found.add_argument("--completion", type=int, default=512)
    found.add_argument("--rounds", type=int, default=3, help="of each way")
    found.add_argument("--json", type=Path)
    return found


def main() -> None:
    options, flags = parser().parse_known_args()
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # sends `switch` to the core
    found, rates = conditions(), {"deferred": list[float](), "at once": list[float]()}
    with tempfile.TemporaryDirectory() as folder:
        save_model(options.shape, Path(folder), torch.bfloat16 if GPU else torch.float32)
        engine = VllmEngine(configure(options, folder, flags))
        sample(engine, options, 0)
        for number in range(options.rounds):
            for way, measured in rates.items():
                engine._llm.collective_rpc(switch, args=(way == "deferred",))
                measured.append(sample(engine, options, number + 1))
                print(way, round(measured[-1]), "tokens/s", flush=True)
    ratio = statistics.median(rates["deferred"]) / statistics.median(rates["at once"])
    print(f"deferred: {ratio:.2f} times as many", flush=True)
    if options.json:
        options.json.write_text(json.dumps({**found, "ratio": ratio, "rates": rates}, indent=1) + "\n")


if __name__ == "__main__":
    main()
