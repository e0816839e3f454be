"""How good is a policy, and what does it say? Held-out tasks on any generator, and a model in this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import torch

from slipstream.config import Config
from slipstream.environments.base import Codec, Environment, Policy, Task
from slipstream.environments.endpoint import Endpoint
from slipstream.environments.guard import RolloutFailed, attempt
from slipstream.environments.load import load_environment
from slipstream.generators.base import Generator
from slipstream.generators.torch import Engine, TorchGenerator
from slipstream.models import load_causal_lm, load_tokenizer, pick_device
from slipstream.rollout import Completion, Rollout, Sampling, mean

SAMPLES = 3


async def evaluate(
    environment: Environment,
    tasks: Sequence[Task],
    generator: Generator,
    codec: Codec,
    sampling: Sampling,
    *,
    seed: int = 0,
    time_limit: float = 300.0,
    endpoint: Endpoint | None = None,
) -> dict[str, Any]:
    """Play each task once. `score` is the mean of the metric "correct" where the environment reports one, else of the
    reward; a failed episode counts as 0. `versions` are the oldest and newest weights that drew a token of it."""
    began = time.perf_counter()

    async def one(task: Task) -> tuple[Rollout | None, Policy]:
        policy = Policy(generator, codec, sampling, f"{seed}/evaluation/{task.id}", endpoint)
        try:
            return await attempt(environment, task, policy, time_limit), policy
        except RolloutFailed:
            return None, policy

    played = await asyncio.gather(*(one(task) for task in tasks))
    rollouts = [r for r, _ in played if r is not None]
    versions = [v for r in rollouts for c in r.completions for v in c.versions]
    total = max(1, len(played))
    scores = [r.metrics.get("correct", r.reward) for r in rollouts]
    names = sorted({name for r in rollouts for name in r.metrics})
    return {
        "versions": [min(versions, default=generator.version), max(versions, default=generator.version)],
        "score": sum(scores) / total,
        "reward": sum(r.reward for r in rollouts) / total,
        "tasks": len(played),
        "failed": len(played) - len(rollouts),
        "metrics": {n: mean([r.metrics[n] for r in rollouts if n in r.metrics]) for n in names},
        "completion_length": mean([float(r.tokens) for r in rollouts]),
        "seconds": time.perf_counter() - began,
        "samples": [_sample(t, r, codec) for t, (r, _) in zip(tasks[:SAMPLES], played, strict=False) if r],
    }


def _sample(task: Task, rollout: Rollout, codec: Codec) -> dict[str, Any]:
    first = rollout.completions[0]
    prompt = task.data.get("question") or codec.decode(first.prompt_ids)
    return {"prompt": prompt, "completion": rollout.completions[-1].text, "reward": rollout.reward}


async def evaluate_model(config: Config, tasks: int) -> dict[str, Any]:
    """Play held-out tasks with the model at `config.model.path`; see `evaluation.evaluate`."""
    environment = load_environment(config.environment)
    generator, tokenizer = load_generator(config)
    codec = Codec(tokenizer)
    endpoint = Endpoint(codec)
    sampling = Sampling(
        temperature=config.evaluation.temperature,
        max_tokens=config.sampling.max_tokens,
        stop_strings=tuple(config.sampling.stop),
    )
    try:
        return await evaluate(
            environment, environment.test[:tasks], generator, codec, sampling,
            seed=config.loop.seed, time_limit=config.environment.time_limit, endpoint=endpoint,
        )  # fmt: skip
    finally:
        await endpoint.close()
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
