"""Gradients of the loss with respect to the log-probability of each token.

Loss, corrections and penalty depend on the parameters through log-probabilities alone; the trainer differentiates
these. A token with an advantage and without a gradient is clipped, whatever the loss. Corrections multiply gradients
instead of values, so that a masked infinity does not become NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.algorithms.corrections import Correction, combine, masked_product
from slipstream.algorithms.tokens import Tokens


class TokenGradients(NamedTuple):
    """Loss and gradient of each token; all `[tokens]`, detached.

    `loss`, and `gradient`, its derivative with respect to the log-probability, include corrections and penalty;
    `loss_gradient` is the derivative of the loss without correction and penalty.
    """

    gradient: Tensor
    loss: Tensor
    kl: Tensor
    loss_gradient: Tensor
    correction: Tensor


def token_gradients(
    tokens: Tokens,
    loss: Callable[[Tokens], Tensor],
    corrections: Sequence[Correction],
    penalty: Callable[[Tokens], Tensor],
    strength: float,
) -> TokenGradients:
    """Loss and gradient of correction x loss + strength x penalty at each token; `strength` 0 skips the penalty."""
    value = loss(tokens)
    (loss_gradient,) = torch.autograd.grad(value.sum(), tokens.logprobs)
    correction = combine(corrections, tokens)
    cost, gradient = masked_product(correction, value.detach()), masked_product(correction, loss_gradient)
    kl = torch.zeros_like(cost)
    if strength:
        estimate = penalty(tokens)
        gradient = gradient + strength * torch.autograd.grad(estimate.sum(), tokens.logprobs)[0]
        kl = estimate.detach()
    return TokenGradients(gradient, cost + strength * kl, kl, loss_gradient, correction)
