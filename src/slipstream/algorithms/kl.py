"""Estimators of KL(policy ‖ reference) at a token from the sampled token, as a penalty on the loss.

d = logprobs - reference (Schulman 2020, "Approximating KL divergence"). A good estimate of the value may have another
gradient (Liu et al. 2025, "Rethinking KL regularization in RLHF", arXiv:2510.01555):

| | value | expected gradient on policy | expected gradient times the ratio r |
| --- | --- | --- | --- |
| k1 = d | unbiased | 0: useless as a loss | that of the divergence, off policy, too |
| k2 = d²/2 | biased | that of the divergence | |
| k3 = exp(-d) - 1 + d | unbiased, 0 or more | of KL(reference ‖ policy) | that of the divergence, off policy, too |
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.algorithms.tokens import Tokens


def k1(difference: Tensor) -> Tensor:
    """k1 = d"""
    return difference


def k2(difference: Tensor) -> Tensor:
    """k2 = d²/2"""
    return difference.square() / 2


def k3(difference: Tensor) -> Tensor:
    """k3 = exp(-d) - 1 + d"""
    return torch.exp(-difference) - 1 + difference


def kl_to_reference(tokens: Tokens, *, estimator: str = "k3", weighted: bool = False) -> Tensor:
    """k(logprobs - reference), or r k(logprobs - reference) with r = policy / behaviour if `weighted`

    `weighted` gives off-policy tokens the gradient of the divergence, too (DeepSeek-AI 2025, DeepSeek-V3.2,
    arXiv:2512.02556). Raises `ValueError` for tokens without a reference.
    """
    if tokens.reference is None:
        raise ValueError("the tokens have no log-probabilities under a reference")
    estimate = {"k1": k1, "k2": k2, "k3": k3}[estimator](tokens.logprobs - tokens.reference)
    return tokens.ratio * estimate if weighted else estimate
