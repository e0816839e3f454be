"""Tokens per second of a vLLM generator with vLLM's core in the generator's process, and in a separate process.

    python benchmarks/vllm_core.py [--shape 1.7B] [--sequences 768] [--rounds 3] [--json FILE] [config flags]

A separate core sends its tokens and log-probabilities to the generator's process as messages. Each variant runs in an
engine and process of its own, one after the other. All sequences have the same length, and there are more sequences
than slots. With `--batches` there are as many sequences as given, which decode at the same time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from work import conditions, mixed_prompt, sampling_rate, save_model, vllm_config

from slipstream.config.schema import Config
from slipstream.generators.vllm.engine import VllmEngine
from slipstream.rollout import Sampling

GPU = torch.cuda.is_available()
WAYS = {"one process": "0", "two processes": "1"}  # of `VLLM_ENABLE_V1_MULTIPROCESSING`


def configure(options: argparse.Namespace, flags: list[str]) -> Config:
    return vllm_config(options.model, options.slots, options.prompt, options.completion, flags)


def measure(options: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    """Rates of one engine, by the number of sequences of a round."""
    engine = VllmEngine(configure(options, flags))
    return {str(count): measure_rounds(engine, options, count) for count in options.batches or [options.sequences]}


def measure_rounds(engine: VllmEngine, options: argparse.Namespace, sequences: int) -> dict[str, Any]:
    sampling = Sampling(max_tokens=options.completion)
    rounds = []
    for number in range(options.rounds + 1):
        mark = sequences * 1000 + number  # no prompt is in the prefix cache
        prompts = (mixed_prompt(options.shape, options.prompt, i, mark) for i in range(sequences))
        rounds.append(sampling_rate(engine, ((prompt, sampling) for prompt in prompts)))
    rounds = rounds[1:]  # the first one warms up
    return {"tokens_per_s": statistics.median(rounds), "rounds": rounds}


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--shape", default="1.7B")
    found.add_argument("--model", type=Path, help="a model saved before, instead of one of this shape")
    found.add_argument("--slots", type=int, default=256)
    found.add_argument("--sequences", type=int, default=768)
    found.add_argument("--batches", type=int, nargs="+", help="numbers of sequences, at most --slots each")
    found.add_argument("--prompt", type=int, default=128)
    found.add_argument("--completion", type=int, default=512)
    found.add_argument("--rounds", type=int, default=3)
    found.add_argument("--way", choices=WAYS, help="measure this way alone")
    found.add_argument("--in-this-process", action="store_true", help=argparse.SUPPRESS)
    found.add_argument("--json", type=Path)
    return found


def main() -> None:
    options, flags = parser().parse_known_args()
    if options.in_this_process:
        options.json.write_text(json.dumps(measure(options, flags)))  # vLLM says things of its own
        return
    with tempfile.TemporaryDirectory() as folder:
        if not options.model:
            save_model(options.shape, Path(folder), torch.bfloat16 if GPU else torch.float32)
        found = {}
        for way in [options.way] if options.way else WAYS:
            told = Path(folder) / "found.json"
            command = [
                sys.executable,
                *sys.argv,
                "--in-this-process",
                f"--model={options.model or folder}",
                f"--json={told}",
            ]
            environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": WAYS[way]}
            subprocess.run(command, env=environment, check=True)
            found[way] = json.loads(told.read_text())
            print(way, json.dumps(found[way]), flush=True)
    if options.json:
        options.json.write_text(json.dumps({**conditions(), "results": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
