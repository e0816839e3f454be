"""What the tokens of a step teach: the gradient of the loss by each of their log-probabilities.

Loss, corrections and penalty are functions of log-probabilities alone, so they are differentiated by these, and the
log-probabilities by the parameters elsewhere. So whether a token was clipped is read off its gradient, for any loss,
and a correction weighs gradients and not values, where a masked infinity would leave NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.algorithms.corrections import Correction, combine, masked_product
from slipstream.algorithms.tokens import Tokens


class Lesson(NamedTuple):
    """What each token teaches; all `[tokens]`, without a gradient.

    `loss` and its derivative by the log-probability, the `gradient`, have corrections and penalty in them; `slope` is
    the derivative of the loss alone, before the `correction`.
    """

    gradient: Tensor
    loss: Tensor
    kl: Tensor
    slope: Tensor
    correction: Tensor


def learn(
    tokens: Tokens,
    loss: Callable[[Tokens], Tensor],
    corrections: Sequence[Correction],
    penalty: Callable[[Tokens], Tensor],
    strength: float,
) -> Lesson:
    """correction x loss + strength x penalty, differentiated by `tokens.logprobs`; no penalty for a strength of 0."""
    value = loss(tokens)
    (slope,) = torch.autograd.grad(value.sum(), tokens.logprobs)
    correction = combine(corrections, tokens)
    cost, gradient = masked_product(correction, value.detach()), masked_product(correction, slope)
    kl = torch.zeros_like(cost)
    if strength:
        estimate = penalty(tokens)
        gradient = gradient + strength * torch.autograd.grad(estimate.sum(), tokens.logprobs)[0]
        kl = estimate.detach()
    return Lesson(gradient, cost + strength * kl, kl, slope, correction)
