"""Mismatch of trainer and generator with and without replay of sampling masks and of routing.

    python benchmarks/replay.py --json benchmarks/results/replay.json

Masks: a dense Qwen3 samples with top-p 0.9. Routing: a Qwen3-MoE samples. The generator computes in bfloat16 and the
trainer in float32, on equal weights, so they round differently, as different kernels and batches do in practice.
Tokens of the first weights are scored at these weights and after one and two updates of the trainer, which train on
them with replay. Mismatch KL is k3 of KL(behaviour || trainer), the mean over sampled tokens. The remaining mismatch
with replay is rounding, and after updates the policy's own change, which grows with the learning rate.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from work import conditions

from slipstream.algorithms.advantages import group_mean, make_batch
from slipstream.config.loading import load_config
from slipstream.generators.torch.engine import Engine
from slipstream.rollout import Completion, Group, Rollout, Sampling
from slipstream.trainers.trainer import Trainer

PROMPTS, GROUP, TOKENS, VOCABULARY = 16, 4, 48, 512
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
EXPERTS = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 64, "norm_topk_prob": True}
WORK: dict[str, tuple[str, dict[str, Any], Sampling, str]] = {
    "sampling masks": ("qwen3", {}, Sampling(max_tokens=TOKENS, top_p=0.9, record_sampling_mask=True), "sampling_mask"),
    "routing": ("qwen3_moe", EXPERTS, Sampling(max_tokens=TOKENS, record_routing=True), "experts"),
}


def build(kind: str, more: dict[str, Any], spread: float) -> Any:
    """A model of random weights that bfloat16 holds exactly; `spread` times those of a fresh one."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SHAPE, **more))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((parameter * (spread if parameter.ndim > 1 else 1)).bfloat16())
    return model


def draw(model: Any, sampling: Sampling) -> list[Completion]:
    """Groups of completions, by the embedded engine in bfloat16."""
    engine, rng = Engine(model.bfloat16(), slots=32), random.Random(0)
    for prompt in range(PROMPTS):
        ids = [rng.randrange(VOCABULARY) for _ in range(rng.randint(4, 24))]
        for member in range(GROUP):
            key = prompt * GROUP + member
            engine.submit(key, ids, dataclasses.replace(sampling, seed=key))
    drawn: dict[Any, Completion] = {}
    while engine.busy:
        drawn |= dict(engine.step())
    return [drawn[key] for key in sorted(drawn)]


def mismatch(trainer: Trainer, completions: list[Completion]) -> float:
    """Mean k3 over the tokens."""
    scored = np.concatenate(trainer.score(completions))
    difference = scored - np.concatenate([c.logprobs for c in completions])
    return float((np.exp(difference) - 1 - difference).mean())


def measure(name: str, spread: float, rate: float) -> dict[str, Any]:
    kind, more, sampling, record = WORK[name]
    with tempfile.TemporaryDirectory() as folder:
        model = build(kind, more, spread)
        model.save_pretrained(folder)
        flags = ["--environment.name=addition", f"--trainer.learning_rate={rate}", "--trainer.schedule=constant"]
        trainer = Trainer(load_config(None, [f"--model.path={folder}", *flags]))
        drawn = draw(model, sampling)
    bare = [dataclasses.replace(c, **{record: None}) for c in drawn]
    members = [drawn[i : i + GROUP] for i in range(0, len(drawn), GROUP)]
    groups = [
        Group(i, str(i), tuple(Rollout((c,), sum(c.token_ids) % 7 / 6) for c in m)) for i, m in enumerate(members)
    ]
    rows = []
    for updates in range(3):
        row: dict[str, Any] = {"updates": updates, "with": mismatch(trainer, drawn), "without": mismatch(trainer, bare)}
        stats = trainer.step(make_batch(groups, partial(group_mean, normalize=True)))
        rows.append(
            row | {"drop": row["without"] / row["with"], "expert_changed_fraction": stats.expert_changed_fraction}
        )
    return {"tokens": sum(len(c.token_ids) for c in drawn), "learning_rate": rate, "mismatch_kl": rows}


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    found.add_argument(
        "--spread", type=float, default=3.0, help="size of the random weights, in those of a fresh model"
    )
    found.add_argument("--learning-rates", type=float, nargs="+", default=[1e-6, 1e-5])
    found.add_argument("--json", type=Path)
    return found


def main() -> None:
    options = parser().parse_args()
    torch.set_num_threads(1)
    found = {name: [measure(name, options.spread, rate) for rate in options.learning_rates] for name in WORK}
    text = json.dumps({**conditions(), "shape": SHAPE, "experts": EXPERTS, "spread": options.spread, **found}, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
