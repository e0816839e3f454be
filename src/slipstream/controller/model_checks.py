"""Checks of models against the options of a run before workers start, on the meta device: without reading weights."""

from __future__ import annotations

from typing import Any

import torch

from slipstream.config.schema import Config, ConfigError
from slipstream.model.inspection import attention_heads, causal_lm, max_model_len
from slipstream.model.loading import load_causal_lm, load_model, validate_same_vocabulary

META = torch.device("meta")


def validate_models(config: Config) -> None:
    """Raise `ConfigError` for a policy, reference or teacher that can't be loaded, or that an option can't apply to."""
    context, longest = max_model_len(config), config.sampling.max_tokens
    if 0 < context <= longest:
        raise ConfigError(
            f"sampling.max_tokens = {longest} leaves no room for a prompt in the model's context of {context} tokens; "
            "lower it"
        )
    if config.trainer.kind == "pytorch":
        _validate_policy(config, causal_lm(load_model(config.model, config.lora, device=META, dtype=torch.float32)))
    others = {"teacher.path": config.teacher.path} if config.teacher.path else {}
    if config.algorithm.kl_coef and config.algorithm.reference not in ("start", "average"):
        others["algorithm.reference"] = config.algorithm.reference
    for option, path in others.items():
        if option != "teacher.path" or config.teacher.engine == "torch":  # vLLM knows other models than transformers
            load_causal_lm(path, device=META, dtype=torch.float32, option=option)
        validate_same_vocabulary(path, option, config.model.path)


def _validate_policy(config: Config, model: Any) -> None:
    """Raise `ConfigError` if `model` can't be trained, or ranks can't share its heads or experts."""
    from slipstream.trainers.experts import expert_modules
    from slipstream.trainers.tensor_parallel import plan_shards

    trainer, size = config.trainer, config.generator.tensor_parallel_size
    quantization = getattr(model.config, "quantization_config", None) or {}
    if quantization.get("quant_method") == "bitsandbytes" and not config.lora.rank:
        raise ConfigError(
            f"model.path = {config.model.path!r} has weights in the format of bitsandbytes, which can't be trained; "
            "train adapters (lora.rank = 16), or give the model with whole weights"
        )
    if trainer.parallel == "tensor" and trainer.ranks > 1:
        plan_shards(model, trainer.ranks)
    if trainer.expert_parallel > 1:
        expert_modules(model, trainer.expert_parallel)
    heads, keys, _ = attention_heads(model.config)
    if heads % size or (keys % size and size % keys):
        raise ConfigError(
            f"generator.tensor_parallel_size = {size} can't share {heads} attention heads and {keys} heads of keys and "
            "values; give a divisor"
        )
