"""Facts about a model: its parts, sizes, attention heads, layers, experts, and limits.

Functions with a `path` read the configuration files of that model, and those with a `config` of all models of a run.
The others inspect the object that they are given. An unreadable configuration gives None or an empty result;
`load_model` reports why.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn

from slipstream.config.schema import Config, ConfigError
from slipstream.model.paths import adapter_config, may_be_model

SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
)  # fmt: skip
INVALID_CONFIG = (  # what transformers raises for a config.json that describes no model
    TypeError, AttributeError, LookupError, ArithmeticError, AssertionError, ImportError, StrictDataclassError,
)  # fmt: skip


def causal_lm(model: Any) -> Any:
    """The Hugging Face model, without PEFT's wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def text_decoder(model: Any) -> Any:
    """The text decoder of a model: without adapters, head and vision tower."""
    whole = causal_lm(model)
    found = whole.get_decoder()
    return whole.model if found is whole else found  # Llama 4 returns itself


def has_tied_head(model: Any) -> bool:
    """Whether the head of a Hugging Face model has the weight of its token embedding."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return getattr(head, "weight", None) is getattr(embedding, "weight", head)


class AttentionHeads(NamedTuple):
    """Number of query heads, number of key/value heads, and head dimension; zeros if the model has no attention."""

    query_heads: int
    key_value_heads: int
    head_dim: int


def attention_heads(config: Any) -> AttentionHeads:
    """The attention heads of the text decoder that a Hugging Face `config` describes."""
    text = config.get_text_config()
    if not (queries := getattr(text, "num_attention_heads", 0)):
        return AttentionHeads(0, 0, 0)
    key_values = getattr(text, "num_key_value_heads", None) or queries
    return AttentionHeads(queries, key_values, getattr(text, "head_dim", None) or text.hidden_size // queries)


def can_share_heads(config: Any, ranks: int) -> bool:
    """Whether `ranks` can split the query heads, and split or copy the key/value heads, of a Hugging Face `config`."""
    heads, key_values, _ = attention_heads(config)
    return not heads % ranks and not (key_values % ranks and ranks % key_values)


class LogitMap(NamedTuple):
    """Logits of the outputs x of a model's head: scale x, or scale softcap tanh(x / softcap) if `softcap` is not 0.

    `softcap` is `final_logit_softcapping` of a Hugging Face configuration over `scale`.
    """

    scale: float
    softcap: float


def logit_map(config: Any) -> LogitMap:
    """The map from outputs of the head to logits that a Hugging Face `config` describes."""
    text = config.get_text_config()
    scale = 1.0 / (getattr(text, "logits_scaling", None) or 1.0)  # Granite
    for name in ("logit_scale", "lm_head_multiplier"):  # Cohere, Falcon-H1
        factor = getattr(text, name, None)
        scale *= 1.0 if factor is None else factor
    return LogitMap(scale, (getattr(text, "final_logit_softcapping", None) or 0.0) / scale)


def adapter_dropouts(model: nn.Module) -> list[nn.Module]:
    """The dropout layers of adapters; an empty list for adapters without dropout, which have identities instead."""
    return [m for name, m in model.named_modules() if ".lora_dropout." in name and isinstance(m, nn.Dropout)]


def decoder_layers(model: nn.Module) -> list[Any]:
    """The decoder layers of a Hugging Face model, with or without adapters, and without those of a vision tower."""
    names = set(causal_lm(model)._no_split_modules or ())
    tower = {id(part) for name, module in model.named_modules() if name.endswith("visual") for part in module.modules()}
    # Compare base classes: FSDP replaces a layer's class by a subclass.
    layers = (module for module in model.modules() if names & {kind.__name__ for kind in type(module).__mro__})
    return [layer for layer in layers if id(layer) not in tower]


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trained parameters by name: all weights, or the adapters. Tied weights appear once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def policy_parameters(parameters: Mapping[str, nn.Parameter], policy: str) -> dict[str, nn.Parameter]:
    """The same parameters under names that no other policy has: the adapter "default" is `policy-NAME`, and names of a
    whole model's weights begin with `policy-NAME.`"""
    own = adapter_name(policy)
    return {
        name.replace(".default.", f".{own}.") if ".default." in name else f"{own}.{name}": p
        for name, p in parameters.items()
    }


def adapter_name(policy: str) -> str:
    """PEFT's name of a policy's adapter; no attribute of a module has it."""
    return f"policy-{policy}"


def find_routers(model: nn.Module) -> dict[str, Any]:
    """The routers of a mixture of experts by name, in the order of layers; empty for a dense model.

    A router maps hidden states `[.., hidden size]` to logits `[tokens, experts]`, and to the weights and the indices
    of the chosen experts, both `[tokens, experts per token]`. Its `weight` is `[experts, hidden size]`.
    """
    return {name: m for name, m in model.named_modules() if type(m).__name__.lower().endswith("topkrouter")}


def expert_parameters(model: nn.Module) -> list[str]:
    """Names of the expert weights: one tensor `[experts, .., ..]` holds all experts of a layer."""
    return [name for name, p in model.named_parameters() if p.ndim == 3 and ".experts." in name]


@torch.no_grad()
def first_not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """Name of the first tensor with a value that is not finite, or None.

    Each tensor is read once, and each device is synchronised once. Formats of 8 bits and less are skipped.
    """
    floats = {n: t for n, t in tensors.items() if t.is_floating_point() and t.element_size() > 1 and t.numel()}
    named = {t.data_ptr(): (n, t) for n, t in reversed(floats.items())}  # tied weights once, by their first name
    for device in {t.device for _, t in named.values()}:
        found = [(name, t) for name, t in named.values() if t.device == device]
        # Both extremes of a tensor with a NaN are NaN.
        finite = torch.stack([torch.stack(t.aminmax()).double() for _, t in found]).isfinite().all(1).tolist()
        if not all(finite):
            return found[finite.index(False)][0]
    return None


def max_model_len(config: Config) -> int:
    """Largest number of tokens of prompt and completion together; 0 if neither the run nor a model limits it."""
    return _smallest_limit(model_context(config), config.generator.max_model_len)


def model_context(config: Config) -> int:
    """Tokens of the smallest context of the run's models; 0 if no model has a limit."""
    models = (_text_config(own.model.path) for own in config.each_model)
    return _smallest_limit(*(getattr(own, "max_position_embeddings", 0) for own in models))


def _smallest_limit(*limits: int) -> int:
    """The smallest of these limits; 0 means that there is no limit."""
    return min((limit for limit in limits if limit), default=0)


def validate_lengths(config: Config) -> None:
    """Raise `ConfigError` for lengths that exceed the model's context."""
    context, asked = model_context(config), config.generator.max_model_len
    if config.generator.engine == "torch" and 0 < context < asked:  # vLLM decides itself
        raise ConfigError(
            f"generator.max_model_len = {asked} exceeds the model's context of {context} tokens; lower it"
        )
    limit, longest = _smallest_limit(context, asked), config.longest_completion
    if 0 < limit <= longest:
        raise ConfigError(
            f"sampling.max_tokens = {longest} leaves no room for a prompt in the model's context of {limit} tokens; "
            "lower it"
        )


def has_experts(path: str) -> bool:
    """Whether the model at `path`, or the base model of the adapter there, is a mixture of experts."""
    config = _text_config(path)
    counts = (getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    return any((count or 0) > 1 for count in counts)


def model_type(path: str) -> str:
    """`model_type` of the model at `path`, or of the adapter's base; "" if the configuration is not on this host."""
    return getattr(_text_config(path, local_files_only=True), "model_type", "")


def model_sizes(path: str) -> dict[str, int | None]:
    """`config_sizes` of the model at `path`, or of the adapter's base; empty if the configuration can't be read."""
    return config_sizes(config) if (config := _text_config(path)) else {}


def config_sizes(config: Any) -> dict[str, int | None]:
    """The values of `SIZES` in the text part of `config`: models with equal sizes have parameters of equal shapes."""
    text = config.get_text_config()
    return {name: getattr(text, name, None) for name in SIZES}


def _text_config(path: str, **options: Any) -> Any:
    config = model_config(path, **options)
    return config and config.get_text_config()


def model_config(path: str, **options: Any) -> Any:
    """The configuration of the model at `path`, or of the adapter's base. None if it can't be read: `load_model`
    reports the reason."""
    from transformers import AutoConfig

    if adapter := adapter_config(path):
        path = adapter.get("base_model_name_or_path") or path
    elif not may_be_model(path):  # transformers would ask the Hub for it, six times in 23 s
        return None
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False, **options)
    except (OSError, ValueError, *INVALID_CONFIG):
        return None


def generation_config(path: str) -> Any:
    """The model's `generation_config.json`, or None."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:
        return None


def end_of_sequence(*configs: Any) -> frozenset[int]:
    """The end-of-sequence ids of the first configuration that has any; give the generation configuration first."""
    for config in configs:
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()
