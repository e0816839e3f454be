"""Policy-gradient losses: pure functions over the tokens of a micro-batch.

Every argument is one number a token, `[tokens]`; every loss is returned one number a token, and the caller divides the
sum by the tokens of the whole step, once, over all micro-batches and ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor


def grpo(
    logprobs: Tensor, behaviour: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, truncate: float
) -> Tensor:
    """Clipped surrogate on the ratio to the behaviour policy, with truncated importance weights.

    r = exp(logprobs - behaviour)
    loss = -min(w A, clip(r, 1 - clip_low, 1 + clip_high) A),   w = min(r, truncate), whose gradient is w grad(logprobs)

    The clip is PPO's (Schulman et al. 2017, arXiv:1707.06347) with DAPO's asymmetric bounds (Yu et al. 2025,
    arXiv:2503.14476). Without truncation a negative advantage has a weight without bound; truncating it keeps its
    direction and limits its size (Ionides 2008, doi:10.1198/106186008X320456). `truncate` 0 leaves it out.
    """
    ratio = torch.exp(logprobs - behaviour)
    weighted = ratio
    if truncate:
        weighted = ratio.detach().clamp(max=truncate) * torch.exp(logprobs - logprobs.detach())
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(weighted * advantages, clipped * advantages)


def kl_to_reference(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Unbiased, non-negative estimate of KL(policy || reference) from the policy's own samples.

    k3 = exp(d) - 1 - d,   d = reference - logprobs   (Schulman 2020, "Approximating KL divergence")
    """
    difference = reference - logprobs
    return torch.exp(difference) - 1 - difference


@torch.no_grad()
def off_policy_statistics(
    logprobs: Tensor, behaviour: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> dict[str, Tensor]:
    """Sums over tokens that describe how far the policy has moved from the one that drew them.

    `mismatch_kl` is k3 of KL(behaviour || policy) from samples of the behaviour policy; `clipped` counts the tokens
    whose gradient the clip removes; `ratio` and `ratio_squared` give the mean ratio and the effective sample size.
    """
    log_ratio = logprobs - behaviour
    ratio = log_ratio.exp()
    clipped = ((ratio > 1 + clip_high) & (advantages > 0)) | ((ratio < 1 - clip_low) & (advantages < 0))
    return {
        "mismatch_kl": (ratio - 1 - log_ratio).sum(),
        "clipped": clipped.sum(),
        "ratio": ratio.sum(),
        "ratio_squared": ratio.square().sum(),
    }
