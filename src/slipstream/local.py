"""A model in this process, for one question: how good is it, and what does it say?"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import torch

from slipstream.config import Config
from slipstream.environments.base import Codec, Policy
from slipstream.environments.load import load_environment
from slipstream.evaluation import evaluate
from slipstream.generators.torch import Engine, TorchGenerator
from slipstream.models import load_causal_lm, load_tokenizer, pick_device
from slipstream.rollout import Completion, Sampling


async def evaluate_model(config: Config, tasks: int) -> dict[str, Any]:
    """Play held-out tasks with the model at `config.model.path`; see `evaluation.evaluate`."""
    environment = load_environment(config.environment)
    generator, tokenizer = load_generator(config)
    sampling = Sampling(
        temperature=config.evaluation.temperature,
        max_tokens=config.sampling.max_tokens,
        stop_strings=tuple(config.sampling.stop),
    )
    try:
        return await evaluate(
            environment, environment.test[:tasks], generator, Codec(tokenizer), sampling,
            seed=config.loop.seed, time_limit=config.environment.time_limit,
        )  # fmt: skip
    finally:
        close = getattr(environment, "close", None)
        if close:
            await close()


async def generate_texts(
    config: Config, prompts: Sequence[str], max_tokens: int, temperature: float, seed: int
) -> list[Completion]:
    """Complete each prompt; the chat template is applied where the tokenizer has one."""
    generator, tokenizer = load_generator(config)
    policy = Policy(generator, Codec(tokenizer), Sampling(temperature=temperature, max_tokens=max_tokens), str(seed))
    return list(await asyncio.gather(*(policy.sample(p, seed=seed + i) for i, p in enumerate(prompts))))


def load_generator(config: Config) -> tuple[TorchGenerator, Any]:
    """An embedded generator in this process, and its tokenizer."""
    if config.generator.threads:
        torch.set_num_threads(config.generator.threads)
    device = pick_device(config.generator.device, "generator.device")
    tokenizer = load_tokenizer(config.model.path)
    model = load_causal_lm(config.model.path, device=device, dtype=getattr(torch, config.model.dtype))
    engine = Engine(model, slots=config.generator.slots, context=config.generator.context, tokenizer=tokenizer)
    return TorchGenerator(engine), tokenizer
