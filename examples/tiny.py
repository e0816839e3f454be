"""What examples with a tiny model share: a weak start by imitation, then reinforcement learning, and what it gained.

The start model has seen dialogues that show the form of the game, played badly. Everything that makes it good at the
game it has to find out by playing.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch
from demo import build_model, build_tokenizer, configuration
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

import slipstream
from slipstream.environments.base import Codec
from slipstream.environments.load import load_environment
from slipstream.evaluation import evaluate
from slipstream.generators.torch import Engine, TorchGenerator
from slipstream.observe.report import report

Dialogue = list[tuple[str, bool]]  # what is said, and whether it is the policy that says it


def play(name: str, symbols: str, dialogue: Callable[[random.Random], Dialogue], warm_up_steps: int) -> None:
    """Warm up on dialogues, then run `examples/NAME.toml` from there."""
    parser = argparse.ArgumentParser(description=f"A tiny model learns: {name}. Any option of a run is a flag, too.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, default=Path("runs") / name)
    parser.add_argument("--quiet", action="store_true")
    options, flags = parser.parse_known_args()
    config = configuration(parser, name, options.dir, options.seed, flags)
    began = time.perf_counter()
    torch.set_num_threads(1)
    tokenizer = build_tokenizer(["<pad>", "<eos>", *symbols])
    model = build_model(options.seed, 16, len(tokenizer))
    imitate(model, tokenizer, dialogue, warm_up_steps, options.seed)
    start = options.dir / "start"
    model.save_pretrained(start)
    tokenizer.save_pretrained(start)
    before = success(model, tokenizer, config)
    print(f"start model in {start} after {time.perf_counter() - began:.0f} s; it wins {before:.0%} of its games")
    summary = slipstream.train(config, quiet=options.quiet)
    report(summary)
    after = summary["eval"]["final"]
    print(f"\nwins {before:.0%} before and {after:.0%} after, {time.perf_counter() - began:.0f} s in all")


def imitate(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    dialogue: Callable[[random.Random], Dialogue],
    steps: int,
    seed: int,
) -> None:
    """Supervised steps on the policy's part of dialogues; each of its turns ends with `<eos>`."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(1, steps + 1):
        rows = []
        for _ in range(64):
            parts = [(tokenizer.encode(f"{said}<eos>" if own else said), own) for said, own in dialogue(rng)]
            rows.append(([i for ids, _ in parts for i in ids], [i if own else -100 for ids, own in parts for i in ids]))
        longest = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([row + [0] * (longest - len(row)) for row, _ in rows])
        labels = torch.tensor([row + [-100] * (longest - len(row)) for _, row in rows])
        loss = model.train()(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"\rwarm-up step {step}: loss {loss.item():.2f}", end="", flush=True)
    print()


def success(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, config: slipstream.Config) -> float:
    """Share of the held-out games that the model wins, sampled as it is trained."""
    generator = TorchGenerator(Engine(copy.deepcopy(model), slots=256))
    environment = load_environment(config.environment)
    result = asyncio.run(evaluate(config, environment, generator, Codec(tokenizer)))
    return float(result["score"])
