"""Expected share of bfloat16 elements that a publish changes, from the learning rate and the magnitudes of the weights.

The trainer updates float32 master weights, and engines serve them rounded to bfloat16. Bfloat16 values of one exponent
are evenly spaced. An element changes if its master weight crosses a boundary between two bfloat16 values. With master
weights spread evenly between boundaries, the probability is the distance that the master weight moved, divided by the
spacing, at most 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

EXPONENTS = 256
BIAS, MANTISSA_BITS = 127, 7
PIECE = 2**22  # elements counted at once, as int64
MEAN_MANTISSA = 1 / math.log(2)  # of weights whose logarithms are evenly spread


@torch.no_grad()
def count_exponents(weights: Iterable[Tensor]) -> Tensor:
    """Number of elements by biased bfloat16 exponent, as 256 int64 on the CPU. Weights may have any float dtype."""
    counts = torch.zeros(EXPONENTS, dtype=torch.int64)
    for weight in weights:
        flat = weight.detach().reshape(-1)
        for start in range(0, len(flat), PIECE):
            bits = flat[start : start + PIECE].bfloat16().view(torch.int16).int()
            exponents = bits >> MANTISSA_BITS & EXPONENTS - 1
            counts += torch.bincount(exponents, minlength=EXPONENTS).cpu()
    return counts


def expected_changed_fraction(
    exponents: Tensor, learning_rate: float, steps: int = 1, *, taken: int = 1000, beta1: float = 0.9,
    weight_decay: float = 0.0, moving: float = 1.0,
) -> float:  # fmt: skip
    """Expected share of elements whose bfloat16 value differs after `steps` further steps of AdamW, from 0 to 1.

    `exponents` is the result of `count_exponents`. `taken` is the number of earlier steps: bias correction makes the
    first updates larger. `moving` is the mean of sqrt(v) / (sqrt(v) + eps) over the elements, as measured in training:
    eps damps updates by this factor. If it differs between parameters (rows of an embedding without gradients do not
    move), predict each parameter alone. The formula assumes noisy gradients: normal, and independent between steps.
    Masters that start on bfloat16 values change less at first.
    """
    spacing = 2.0 ** (torch.arange(EXPONENTS, dtype=torch.float64).clamp(min=1) - BIAS - MANTISSA_BITS)
    decay = learning_rate * weight_decay * steps * spacing * 2**MANTISSA_BITS * MEAN_MANTISSA
    walk = learning_rate * displacement_std(steps, taken, beta1)
    moved, damped = _crossing((walk**2 + decay**2).sqrt() / spacing), _crossing(decay / spacing)
    fractions = moving * moved + (1 - moving) * damped
    return float((fractions * exponents).sum() / exponents.sum())


def displacement_std(steps: int, taken: int, beta1: float) -> float:
    """Standard deviation of the sum of `steps` updates after `taken`, in learning rates.

    An update is the bias-corrected mean of all gradients so far, over their standard deviation. Consecutive updates
    share gradients: the sum grows linearly with few steps, and with the square root of many.
    """
    step = torch.arange(taken + 1, taken + steps + 1, dtype=torch.float64)[:, None]
    age = step - torch.arange(1, taken + steps + 1)
    weights = torch.where(age >= 0, (1 - beta1) * beta1 ** age.clamp(min=0) / (1 - beta1**step), 0)
    return float(weights.sum(0).norm())


def _crossing(ratio: Tensor) -> Tensor:
    """Mean of min(1, |d|) for a normal d of mean 0 and standard deviation `ratio`."""
    inverse = 1 / ratio
    within = math.sqrt(2 / math.pi) * ratio * -torch.expm1(-(inverse**2) / 2)
    return (within + torch.erfc(inverse / math.sqrt(2))).clamp(max=1)
