"""How much one token of each sequence counts: the denominator of the loss, once for the whole step.

`lengths` `[sequences]` are the tokens to be trained on of every sequence of the step, on all ranks and in all
micro-batches; a sequence that is left out has 0. The result `[sequences]` is the weight of each of their tokens. The
loss of the step is the sum of weight x loss over its tokens, however it is cut up.
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_mean(lengths: Tensor) -> Tensor:
    """w = 1 / (all tokens): long sequences count more   (DAPO, Yu et al. 2025, arXiv:2503.14476)"""
    return torch.ones_like(lengths) / lengths.sum().clamp(min=1)


def sequence_mean(lengths: Tensor) -> Tensor:
    """w = 1 / (sequences x own length): each sequence counts alike   (GRPO, Shao et al. 2024, arXiv:2402.03300)"""
    return 1 / ((lengths > 0).sum().clamp(min=1) * lengths.clamp(min=1))


def constant(lengths: Tensor, *, length: float) -> Tensor:
    """w = 1 / (sequences x length), `length` a constant such as the longest that may be

    Dr. GRPO (Liu et al. 2025, arXiv:2503.20783): no bias by the length of a sequence, or of its neighbours.
    """
    return torch.ones_like(lengths) / ((lengths > 0).sum().clamp(min=1) * length)
