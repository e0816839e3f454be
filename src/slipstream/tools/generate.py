"""`slipstream generate`: complete prompts with a policy."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch

from slipstream.config.schema import Config
from slipstream.controller.evaluation import evaluation_sampling
from slipstream.environments.base import Policy
from slipstream.environments.chat_tokenizer import ChatTokenizer
from slipstream.generators.base import Generator
from slipstream.generators.torch.engine import MODEL_TYPES, Engine
from slipstream.generators.torch.generator import TorchGenerator
from slipstream.model.device import dtype_of, pick_device
from slipstream.model.inspection import max_model_len, model_type
from slipstream.model.loading import load_causal_lm
from slipstream.model.tokenizer import load_tokenizer
from slipstream.runtime.closing import run_bounded
from slipstream.runtime.placement import resolve_auto
from slipstream.runtime.runtime import current_runtime, open_runtime
from slipstream.tools.evaluate import for_engines_only, open_engines


def generate(config: Config, prompts: Sequence[str]) -> list[str]:
    """Complete each prompt, sampling as evaluations do. Returns prompts with their completions.

    With a chat template each prompt is sent as a user's message, and the reply follows on the next line. The embedded
    engine in this process serves all models that it supports, and ignores `generator.engine`. Other models need
    `generator.engine = "vllm"`. Raises `ConfigError`, and as `Generator.generate`.
    """
    embedded = model_type(config.lora.path or config.model.path) in MODEL_TYPES
    if embedded or config.generator.engine != "vllm":
        return asyncio.run(_complete(config, prompts, _embedded_engine(config)))
    with open_runtime(config.runtime):
        return run_bounded(_complete_by_vllm(for_engines_only(config), prompts))


async def _complete_by_vllm(config: Config, prompts: Sequence[str]) -> list[str]:
    runtime = current_runtime()
    config = resolve_auto(config, runtime.gpus, runtime.hosts)
    async with open_engines(config) as pool:
        return await _complete(config, prompts, pool)


async def _complete(config: Config, prompts: Sequence[str], generator: Generator) -> list[str]:
    """Each prompt with its completion, sampled as in an evaluation."""
    tokenizer = ChatTokenizer(load_tokenizer(config.model.path), max_model_len(config), config.model)
    policy = Policy(generator, tokenizer, evaluation_sampling(config, config.environment), "")
    seed = config.loop.seed
    completions = await asyncio.gather(*(policy.sample(p, seed=seed + i) for i, p in enumerate(prompts)))
    between = "\n" if tokenizer.has_chat_template else ""
    return [f"{prompt}{between}{completion.text}" for prompt, completion in zip(prompts, completions, strict=True)]


def _embedded_engine(config: Config) -> TorchGenerator:
    if config.generator.threads:
        torch.set_num_threads(config.generator.threads)
    device = pick_device(config.generator.device, "generator.device")
    model = load_causal_lm(config.lora.path or config.model.path, device=device, dtype=dtype_of(config))
    tokenizer = load_tokenizer(config.model.path)
    slots, context = config.generator.max_num_seqs, config.generator.max_model_len
    return TorchGenerator(Engine(model, slots=slots, context=context, tokenizer=tokenizer))
