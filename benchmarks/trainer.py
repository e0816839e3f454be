"""The speed of one full GRPO step (forward, loss, backward, optimizer) on rollouts of log-normal lengths.

    python benchmarks/trainer.py --shape 1.7B [--tokens 65536] [--steps 5] [--vocabulary N] [--json FILE] [config flags]
    python benchmarks/trainer.py --lengths 128 512      # prompts of 128 tokens, completions of 512
    torchrun --nproc-per-node N benchmarks/trainer.py --shape 8B --tokens ALL --trainer.ranks N

Token counts are those of all ranks, `utilisation` and `memory_gb` those of one.

Tokens are counted as by a trainer without shared prompts: prompt and completion of every sequence. `utilisation` is
the model's arithmetic on computed tokens (shared prompts once, recomputation excluded), relative to that of a matrix
product measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from work import SHAPES, conditions, save_model

from slipstream.algorithms.advantages import group_mean, make_batch
from slipstream.config.loading import load_config
from slipstream.config.schema import Config
from slipstream.model.device import current_device
from slipstream.rollout import Batch, Completion, Group, Rollout, VersionSpan
from slipstream.trainers.trainer import Trainer

FIRST = os.environ.get("RANK", "0") == "0"
GPU = torch.cuda.is_available()
DTYPE = "bfloat16" if GPU else "float32"
GROUP, MEDIAN, SIGMA, LONGEST, PROMPT = 8, 400, 0.6, 2048, (64, 256)


def make_rollouts(tokens: int, vocabulary: int, seed: int, lengths: Sequence[int] = ()) -> Batch:
    """Groups of 8 completions with random log-probabilities near the policy's, until `tokens` are reached.

    `lengths` are fixed lengths of prompts and completions; by default they are random.
    """
    draw, groups, total = random.Random(seed), [], 0
    near = -math.log(vocabulary)
    while total < tokens:
        prompt = tuple(draw.randrange(vocabulary) for _ in range(lengths[0] if lengths else draw.randint(*PROMPT)))
        rollouts = []
        for _ in range(GROUP):
            drawn_length = min(LONGEST, max(8, int(draw.lognormvariate(math.log(MEDIAN), SIGMA))))
            count = lengths[1] if lengths else drawn_length
            drawn = tuple(draw.randrange(vocabulary) for _ in range(count))
            logprobs = tuple(near + draw.gauss(0, 0.3) for _ in drawn)
            rollouts.append(
                Rollout((Completion(prompt, drawn, logprobs, (VersionSpan(0, 0, count),), "stop"),), draw.random())
            )
            total += len(prompt) + count
        groups.append(Group(len(groups), str(len(groups)), tuple(rollouts)))
    return make_batch(groups, partial(group_mean, normalize=True))


def synchronize() -> None:
    if GPU:
        torch.cuda.synchronize()


def configure(model: Path, flags: list[str]) -> Config:
    own = [f"--model.path={model}", f"--model.dtype={DTYPE}", "--environment.name=addition"]
    return load_config(None, [*own, *flags])


def measure(model: Path, options: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    config = configure(model, flags)
    began = time.perf_counter()
    trainer = Trainer(config)
    loaded = time.perf_counter() - began
    vocabulary = trainer.model.config.vocab_size
    steps = []
    for seed in range(options.warmup + options.steps):
        batch = make_rollouts(options.tokens, vocabulary, seed, options.lengths)
        sequence_tokens = sum(len(s.token_ids) for s in batch.samples())
        synchronize()
        began = time.perf_counter()
        stats = trainer.step(batch)
        synchronize()
        seconds = time.perf_counter() - began
        share = stats.seconds / seconds  # the trainer's own time may exclude the end of the optimizer's work on a GPU
        steps.append(
            {
                "seconds": seconds, "tokens": sequence_tokens, "trained_tokens": batch.tokens,
                "packed_tokens": stats.packed_tokens, "tokens_per_s": sequence_tokens / seconds,
                "trained_tokens_per_s": batch.tokens / seconds, "tflops": stats.tflops * share,
                "utilisation": stats.matmul_utilisation and stats.matmul_utilisation * share,
                "memory_gb": stats.max_memory_gb, "loss": stats.loss,
            }
        )  # fmt: skip
        if FIRST:
            print(json.dumps(steps[-1]), flush=True)
    if options.profile:
        with torch.profiler.profile() as profile:
            trainer.step(batch)
            synchronize()
        table = profile.key_averages().table(sort_by="self_cuda_time_total", row_limit=40, max_name_column_width=70)
        options.profile.write_text(table)
    timed = steps[options.warmup :]
    known = [name for name, value in timed[0].items() if value is not None]
    medians = {name: statistics.median(step[name] for step in timed) for name in known}
    return {"load_s": loaded, "first_step_s": steps[0]["seconds"], **medians}


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--shape", default="1.7B")
    found.add_argument("--vocabulary", type=int, default=0)
    found.add_argument("--model", type=Path, help="a model saved before, instead of one of this shape")
    found.add_argument("--tokens", type=int, default=65536)
    found.add_argument("--lengths", type=int, nargs=2, default=(), metavar=("PROMPT", "COMPLETION"))
    found.add_argument("--steps", type=int, default=5)
    found.add_argument("--warmup", type=int, default=3)
    found.add_argument("--profile", type=Path, help="write a profile of one more step")
    found.add_argument("--json", type=Path)
    return found


def main() -> None:
    options, flags = parser().parse_known_args()
    if options.vocabulary:
        SHAPES[options.shape]["vocab_size"] = options.vocabulary
    with tempfile.TemporaryDirectory() as folder:
        if GPU:
            torch.cuda.set_device(current_device())
        torch.manual_seed(0)  # the same model on every rank
        if not options.model:
            save_model(options.shape, Path(folder), getattr(torch, DTYPE))
        if GPU:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        found = measure(options.model or Path(folder), options, flags)
    if not FIRST:
        return
    result = {**conditions(), "shape": options.shape, **found}
    print(json.dumps(result), flush=True)
    if options.json:
        before = json.loads(options.json.read_text()) if options.json.exists() else []
        options.json.write_text(json.dumps([*before, result], indent=1) + "\n")


if __name__ == "__main__":
    main()
