"""The numbers of a step, as sums over its tokens that micro-batches and ranks add up. Returned, never logged here.

| name | what it is, over all tokens of the step |
| --- | --- |
| `loss` | sum of weight x loss, which is the loss of the step |
| `entropy`, `kl` | mean entropy of the policy, and mean estimate of its divergence from the reference |
| `mismatch_kl` | estimate of KL(behaviour ‖ policy): mean of r - 1 - log r |
| `ratio`, `ratio_max` | mean and largest r = policy / behaviour |
| `effective_sample_size` | (sum of r)² / (tokens x sum of r²), 1 on policy (Kong 1992) |
| `clipped` | share of the tokens with an advantage whose loss has no gradient, whatever loss it is |
| `masked` | share of tokens to which a correction gave the weight 0 |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from slipstream.algorithms.learning import Lesson
from slipstream.algorithms.tokens import Tokens

SUMS = ("tokens", "loss", "entropy", "kl", "divergence", "ratio", "square", "signal", "clipped", "masked")


def sums(tokens: Tokens, lesson: Lesson, entropy: Tensor, weights: Tensor) -> Tensor:
    """The `SUMS` of some tokens, float64; `weights` is what each of them counts in the loss."""
    ratio, signal = tokens.ratio.detach().double(), tokens.advantages != 0
    columns = (
        torch.ones_like(ratio), weights * lesson.loss, entropy, lesson.kl, tokens.divergence, ratio, ratio.square(),
        signal, signal & (lesson.slope == 0), lesson.correction == 0,
    )  # fmt: skip
    return torch.stack([column.double().sum() for column in columns])


def means(summed: Mapping[str, float], ratio_max: float) -> dict[str, Any]:
    """What the `SUMS` of all tokens of a step say."""
    count = summed["tokens"]
    if not count:
        on_policy = {"ratio": 1.0, "ratio_max": 1.0, "effective_sample_size": 1.0}
        return dict.fromkeys(("loss", "entropy", "kl", "mismatch_kl", "clipped", "masked"), 0.0) | on_policy
    return {
        "loss": summed["loss"],
        "entropy": summed["entropy"] / count,
        "kl": summed["kl"] / count,
        "mismatch_kl": summed["divergence"] / count,
        "ratio": summed["ratio"] / count,
        "ratio_max": ratio_max,
        "effective_sample_size": summed["ratio"] ** 2 / (count * summed["square"]),
        "clipped": summed["clipped"] / max(1.0, summed["signal"]),
        "masked": summed["masked"] / count,
    }
