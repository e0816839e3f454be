"""Weights of off-policy tokens: pure functions from tokens to one weight per token, without a gradient.

A weight of 0 is a mask. The loss of a token is multiplied by the product of all corrections. r = policy / behaviour at
a token; its lag is the trainer's version minus the version that sampled it. Importance weights (`truncate_tokens`,
`truncate_sequences`, `icepop`) are for `reinforce`, whose loss has no ratio; masks and weights by lag go with any loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from slipstream.algorithms.tokens import Tokens

Correction = Callable[[Tokens], Tensor]


def combine(corrections: Sequence[Correction], tokens: Tokens) -> Tensor:
    """The product of the corrections: 1 without any, and 0 if any is 0, even if another is infinite."""
    weight = torch.ones_like(tokens.behaviour)
    for correction in corrections:
        weight = masked_product(weight, correction(tokens).detach())
    return weight


def masked_product(weight: Tensor, values: Tensor) -> Tensor:
    """weight x values, and 0 if either is 0, so that a masked infinity does not become NaN."""
    return torch.where((weight == 0) | (values == 0), torch.zeros_like(values), weight * values)


def truncate_tokens(tokens: Tokens, *, high: float = 2.0) -> Tensor:
    """w = min(r, high)

    Truncated importance sampling (Ionides 2008, doi:10.1198/106186008X320456), per token as in Yao et al. 2025,
    "Your efficient RL framework secretly brings you off-policy RL training".
    """
    return tokens.ratio.detach().clamp(max=high)


def truncate_sequences(tokens: Tokens, *, high: float = 2.0) -> Tensor:
    """w = min(product of r over the sequence, high)

    The unbiased ratio of a whole sequence, truncated; its variance grows with the length (Liu, Li et al. 2025, "When
    speed kills stability: demystifying RL collapse from the training-inference mismatch").
    """
    return _log_ratio(tokens, tokens.sequence_sum).exp().clamp(max=high)


def icepop(tokens: Tokens, *, low: float = 0.5, high: float = 5.0) -> Tensor:
    """w = r where low <= r <= high, else 0   (IcePop: Ling Team 2025, "Every step evolves", arXiv:2510.18855)"""
    ratio = tokens.ratio.detach()
    return ratio * _inside(ratio, low, high)


def mask_tokens(tokens: Tokens, *, low: float = 0.5, high: float = 5.0) -> Tensor:
    """w = 1 where low <= r <= high, else 0: the mask of IcePop (arXiv:2510.18855) for losses with a ratio inside."""
    return _inside(tokens.ratio.detach(), low, high)


def mask_sequences(tokens: Tokens, *, low: float = 0.99, high: float = 1.01) -> Tensor:
    """w = 1 where low <= geometric mean of r over the sequence <= high, else 0

    Rejection of whole sequences by a ratio that does not grow with their length (Liu, Li et al. 2025, "When speed kills
    stability").
    """
    return _inside(_log_ratio(tokens, tokens.sequence_mean).exp(), low, high)


def opsm(tokens: Tokens, *, bound: float = 0.1) -> Tensor:
    """w = 0 where A < 0 and the mean of -log r over the sequence > bound, else 1

    Off-policy sequence masking (DeepSeek-AI 2025, DeepSeek-V3.2, arXiv:2512.02556): leaves out
    sequences with a negative advantage that the policy would no longer sample.
    """
    far = -_log_ratio(tokens, tokens.sequence_mean) > bound
    return (~(far & (tokens.advantages < 0))).to(tokens.behaviour)


def mask_divergence(tokens: Tokens, *, bound: float = 0.05) -> Tensor:
    """w = 1 where the largest r - 1 - log r of the sequence <= bound, else 0

    Trust region masking (Li et al. 2025, arXiv:2512.23075): one token outside the trust region rejects its sequence.
    The divergence at a token is estimated from the sampled token (k3).
    """
    return (tokens.sequence_max(tokens.divergence) <= bound).to(tokens.behaviour)


def mask_lag(tokens: Tokens, *, most: float = 4) -> Tensor:
    """w = 1 where lag <= most, else 0: a sequence over several versions keeps its newer tokens

    AReaL's bound on staleness (Fu et al. 2025, arXiv:2505.24298) for each token instead of each sequence.
    """
    return (tokens.lag <= most).to(tokens.behaviour)


def discount_lag(tokens: Tokens, *, power: float = 1.0) -> Tensor:
    """w = 1 / max(lag, 1)^power

    The staleness-aware learning rate of asynchronous SGD (Zhang et al. 2016, arXiv:1511.05950), per token.
    """
    return tokens.lag.clamp(min=1).to(tokens.behaviour) ** -power


def _log_ratio(tokens: Tokens, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    return reduce((tokens.logprobs - tokens.behaviour).detach())


def _inside(values: Tensor, low: float, high: float) -> Tensor:
    return ((values >= low) & (values <= high)).to(values)
