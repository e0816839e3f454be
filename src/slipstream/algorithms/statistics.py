"""Metrics of a step, as sums over tokens that micro-batches and ranks add up.

| name | value over all tokens of the step |
| --- | --- |
| `loss` | sum of weight x loss, which is the loss of the step |
| `entropy`, `kl` | mean entropy of the policy, and mean estimate of its divergence from the reference |
| `mismatch_kl` | estimate of KL(behaviour ‖ policy): mean of r - 1 - log r |
| `ratio_mean`, `ratio_max` | mean and largest r = policy / behaviour |
| `effective_sample_size` | (sum of r)² / (tokens x sum of r²), 1 on policy (Kong 1992) |
| `clip_fraction` | share of the tokens with an advantage whose loss has no gradient |
| `masked_fraction` | share of tokens with a correction of 0 |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from slipstream.algorithms.token_gradients import TokenGradients
from slipstream.algorithms.tokens import Tokens

SUMS = ("tokens", "loss", "entropy", "kl", "divergence", "ratio", "square", "signal", "clipped", "masked")


def sums(tokens: Tokens, gradients: TokenGradients, entropy: Tensor, weights: Tensor) -> Tensor:
    """The `SUMS` of these tokens, float64; `weights` `[tokens]` are their weights in the loss."""
    ratio, signal = tokens.ratio.detach().double(), tokens.advantages != 0
    columns = (
        torch.ones_like(ratio), weights * gradients.loss, entropy, gradients.kl, tokens.divergence, ratio,
        ratio.square(), signal, signal & (gradients.loss_gradient == 0), gradients.correction == 0,
    )  # fmt: skip
    return torch.stack([column.double().sum() for column in columns])


def means(summed: Mapping[str, float], ratio_max: float) -> dict[str, Any]:
    """The metrics of a step from the `SUMS` of all its tokens."""
    count = summed["tokens"]
    if not count:
        on_policy = {"ratio_mean": 1.0, "ratio_max": 1.0, "effective_sample_size": 1.0}
        zero = ("loss", "entropy", "kl", "mismatch_kl", "clip_fraction", "masked_fraction")
        return dict.fromkeys(zero, 0.0) | on_policy
    return {
        "loss": summed["loss"],
        "entropy": summed["entropy"] / count,
        "kl": summed["kl"] / count,
        "mismatch_kl": summed["divergence"] / count,
        "ratio_mean": summed["ratio"] / count,
        "ratio_max": ratio_max,
        "effective_sample_size": summed["ratio"] ** 2 / (count * summed["square"]),
        "clip_fraction": summed["clipped"] / max(1.0, summed["signal"]),
        "masked_fraction": summed["masked"] / count,
    }
