"""The weight of a token of each sequence: the denominator of the loss, computed once for the whole step.

`lengths` `[sequences]` are the trained tokens of every sequence of the step, over all ranks and micro-batches; 0 for a
sequence that is left out. Each function returns the weight of each token, `[sequences]`. The loss of the step is the
sum of weight x loss over its tokens, for any split into micro-batches.
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_mean(lengths: Tensor) -> Tensor:
    """w = 1 / (all tokens): long sequences count more   (DAPO, Yu et al. 2025, arXiv:2503.14476)"""
    return torch.ones_like(lengths) / lengths.sum().clamp(min=1)


def sequence_mean(lengths: Tensor) -> Tensor:
    """w = 1 / (sequences x own length): all sequences count equally   (GRPO, Shao et al. 2024, arXiv:2402.03300)"""
    return 1 / ((lengths > 0).sum().clamp(min=1) * lengths.clamp(min=1))


def constant(lengths: Tensor, *, length: float) -> Tensor:
    """w = 1 / (sequences x length), `length` a constant such as the maximum length

    Dr. GRPO (Liu et al. 2025, arXiv:2503.20783): no bias by the length of any sequence.
    """
    return torch.ones_like(lengths) / ((lengths > 0).sum().clamp(min=1) * length)
