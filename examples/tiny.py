"""Common code of the tiny-model examples: pre-train by imitation, then train by RL and report the gain.

The start model is trained on dialogues with the format of the game and bad moves. It learns good moves by RL alone.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from demo import build_model, build_tokenizer, configuration
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3ForCausalLM

import slipstream
from slipstream.controller.evaluation import evaluate
from slipstream.environments.chat_tokenizer import ChatTokenizer
from slipstream.environments.load import load_environments
from slipstream.generators.torch.engine import Engine
from slipstream.generators.torch.generator import TorchGenerator
from slipstream.observe.report import report

Dialogue = list[tuple[str, bool]]  # texts, and whether the policy writes each
BATCH = 64  # dialogues of a warm-up step


def play(name: str, symbols: str, dialogue: Callable[[random.Random], Dialogue], warm_up_steps: int) -> None:
    """Pre-train on dialogues, then run `examples/NAME.toml` from the result."""
    options, config = arguments(name)
    began = time.perf_counter()
    torch.set_num_threads(1)
    tokenizer = build_tokenizer(["<pad>", "<eos>", *symbols])
    model = build_model(options.seed, 16, len(tokenizer))
    if config.lora.rank:  # adapters do not train the head, whose scale bounds how sure the policy can be
        model.model.embed_tokens.weight.data.mul_(5)
    imitate(model, lambda rng: text_batch(tokenizer, dialogue, rng), warm_up_steps, options.seed)
    start = options.dir / "start"
    model.save_pretrained(start)
    tokenizer.save_pretrained(start)
    print(f"start model in {start} after {time.perf_counter() - began:.0f} s")
    if not config.policies:
        before = success(model, tokenizer, config)
        print(f"it wins {before:.0%} of its games")
    summary = slipstream.train(config, quiet=options.quiet)
    report(slipstream.load_run(summary["directory"]))
    if config.policies:
        print_rewards(summary)
        return
    final = summary["eval"]["final"]
    after = "not measured" if final is None else f"{final:.0%}"
    print(f"\nwins {before:.0%} before, {after} after; {time.perf_counter() - began:.0f} s in total")


def arguments(name: str, **paths: str) -> tuple[argparse.Namespace, slipstream.Config]:
    """Options of the command line, and the configuration of `examples/NAME.toml` with its flags.

    `paths` are options of the section `environment` that name a path in `--dir`.
    """
    parser = argparse.ArgumentParser(description=f"A tiny model learns: {name}. Any option of a run is a flag, too.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, default=Path("runs") / name)
    parser.add_argument("--quiet", action="store_true")
    options, flags = parser.parse_known_args()
    own = [f"--environment.{option}={options.dir / path}" for option, path in paths.items()]
    return options, configuration(parser, name, options.dir, options.seed, [*own, *flags])


def print_rewards(summary: Mapping[str, Any]) -> None:
    """Print the mean reward of each policy at the start and at the end, also with the others as at the start."""
    first, last = summary["eval"]["history"][0], summary["eval"]["history"][-1]
    for name in sorted(name for name in last if name.startswith("eval/policies/")):
        print(f"{name.removeprefix('eval/policies/')}: {first[name]:.3f} before, {last[name]:.3f} after")


def imitate(
    model: PreTrainedModel, batch: Callable[[random.Random], Mapping[str, torch.Tensor]], steps: int, seed: int
) -> None:
    """Supervised training; `batch` returns arguments of the model's forward method, with labels."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(1, steps + 1):
        loss = model.train()(**batch(rng)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"\rwarm-up step {step}: loss {loss.item():.2f}", end="", flush=True)
    print()


def text_batch(
    tokenizer: PreTrainedTokenizerFast, dialogue: Callable[[random.Random], Dialogue], rng: random.Random
) -> dict[str, torch.Tensor]:
    """Token ids of dialogues, with the policy's turns as labels; each turn ends with `<eos>`."""
    rows = []
    for _ in range(BATCH):
        parts = [(tokenizer.encode(f"{said}<eos>" if own else said), own) for said, own in dialogue(rng)]
        rows.append(([i for ids, _ in parts for i in ids], [i if own else -100 for ids, own in parts for i in ids]))
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([row + [0] * (longest - len(row)) for row, _ in rows])
    labels = torch.tensor([row + [-100] * (longest - len(row)) for _, row in rows])
    return {"input_ids": ids, "labels": labels}


def success(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, config: slipstream.Config) -> float:
    """Share of the held-out games that the model wins, with the sampling of training."""
    generator = TorchGenerator(Engine(copy.deepcopy(model), slots=256))
    result = asyncio.run(evaluate(config, load_environments(config), generator, ChatTokenizer(tokenizer)))
    return float(result["eval/score"])
