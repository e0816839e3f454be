"""The options of low-rank adapters."""

from __future__ import annotations

from typing import Literal

from slipstream.config.section import Section, option

MAX_RANK = 4096


class LoraConfig(Section):
    """Low-rank adapters instead of full fine-tuning."""

    path: str = option("", "Trained adapter (PEFT directory) to start from; it sets rank, scale, targets and experts.")
    rank: int = option(0, "Rank of the adapters; 0 trains all weights.", ge=0, le=MAX_RANK)
    alpha: float = option(32.0, "Scale of the adapters: their product is multiplied by alpha / rank.", gt=0)
    use_rslora: bool = option(False, "Rank-stabilised scale: alpha / sqrt(rank) instead of alpha / rank.")
    dropout: float = option(0.0, "Share of an adapter's inputs that are zeroed in training passes.", ge=0, lt=1)
    bias: Literal["none", "lora_only", "all"] = option(
        "none", "Biases to train, too: those of adapted layers (lora_only), or all of the model."
    )
    targets: list[str] = option([], "Module names to adapt; empty means every linear layer but the head.")
    target_pattern: str = option(
        "", "Regular expression of the whole names of modules to adapt, such as `.*\\.(q|v)_proj`, in place of targets."
    )
    quantization: Literal["whole", "4bit"] = option(
        "whole", "Base weights: in model.dtype, or in 4 bits by bitsandbytes, in engines and trainer."
    )
    experts: bool = option(False, "Adapt the experts of a mixture of experts, too.")
