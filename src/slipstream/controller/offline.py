"""Evaluate a model, or complete prompts with it, in this process: `slipstream eval` and `slipstream generate`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import torch

from slipstream.config.schema import Config, ConfigError
from slipstream.controller.evaluation import describe_failures, evaluate, evaluation_sampling
from slipstream.controller.finish import close_environment
from slipstream.environments.base import ChatTokenizer, Policy
from slipstream.environments.endpoint import Endpoint
from slipstream.environments.episode import episode_slots
from slipstream.environments.load import load_environment
from slipstream.errors import UserError
from slipstream.generators.torch.engine import Engine
from slipstream.generators.torch.generator import TorchGenerator
from slipstream.model.device import dtype_of, pick_device
from slipstream.model.inspection import max_model_len
from slipstream.model.loading import load_causal_lm, load_tokenizer
from slipstream.rollout import Completion
from slipstream.runtime.closing import closing
from slipstream.scoring.load import load_scoring


class EvaluationError(UserError):
    """Every held-out task failed."""


async def evaluate_model(config: Config) -> dict[str, Any]:
    """Evaluate the model at `model.path`, see `evaluate`. Raises `ConfigError`; `EvaluationError` if all fail."""
    environment = load_environment(config.environment)
    if not environment.test[: config.evaluation.tasks]:
        raise ConfigError(
            f"environment.name = {config.environment.name!r} has {len(environment.test)} held-out tasks, and "
            f"evaluation.tasks = {config.evaluation.tasks}: there is nothing to evaluate on"
        )
    generator, tokenizer = load_generator(config)
    chat_tokenizer = ChatTokenizer(tokenizer, max_model_len(config))
    endpoint = Endpoint(chat_tokenizer)
    scoring = load_scoring(config, chat_tokenizer)
    closers = [part.close for part in (scoring, endpoint) if part]
    async with closing(*closers, lambda: close_environment(environment)):
        if scoring:
            await scoring.start()
        slots = episode_slots(config, config.generator.max_num_seqs)
        result = await evaluate(config, environment, generator, chat_tokenizer, endpoint, scoring, slots)
        if result["eval/failed"] == result["eval/tasks"]:
            raise EvaluationError(describe_failures(result))
        return result


async def generate_texts(config: Config, prompts: Sequence[str]) -> list[Completion]:
    """Complete each prompt with the embedded engine in this process, sampling as evaluations do.

    Uses the chat template if the tokenizer has one. Raises `ConfigError`.
    """
    generator, tokenizer = load_generator(config)
    policy = Policy(generator, ChatTokenizer(tokenizer, max_model_len(config)), evaluation_sampling(config), "")
    seed = config.loop.seed
    return list(await asyncio.gather(*(policy.sample(p, seed=seed + i) for i, p in enumerate(prompts))))


def load_generator(config: Config) -> tuple[TorchGenerator, Any]:
    """An embedded engine in this process, and the tokenizer. Raises `ConfigError`, and as `Engine`."""
    if config.generator.threads:
        torch.set_num_threads(config.generator.threads)
    device = pick_device(config.generator.device, "generator.device")
    tokenizer = load_tokenizer(config.model.path)
    model = load_causal_lm(config.model.path, device=device, dtype=dtype_of(config))
    engine = Engine(
        model, slots=config.generator.max_num_seqs, context=config.generator.max_model_len, tokenizer=tokenizer
    )
    return TorchGenerator(engine), tokenizer
