"""Stochastic rounding to bfloat16 and to 8 bits: the mean of many roundings is the value itself.

The noise is a hash of the seed and of an element's index in its tensor. So it needs no state, ranks with copies of a
weight round alike, and shards round as the whole tensor does. Functions work on any device, compiled or not.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 64  # elements that share a scale, all in one row: any sharding by rows keeps blocks whole
SIGNED, UNSIGNED = 127, 255  # levels of int8 and uint8
LOW_BITS = 0xFFFF


def random_bits(index: Tensor, seed: Tensor) -> Tensor:
    """32 random bits for each element of `index`, int32. The mixer is lowbias32 (Wellons 2018)."""
    bits = index ^ seed
    bits = (bits ^ ((bits >> 16) & 0xFFFF)) * 0x7FEB352D
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * (0x846CA68B - 2**32)
    return bits ^ ((bits >> 16) & 0xFFFF)


def uniform(bits: Tensor) -> Tensor:
    """Numbers in (0, 1) from the low 16 bits, float32."""
    return ((bits & LOW_BITS).float() + 0.5) / 2**16


def round_to_bfloat16(values: Tensor, bits: Tensor) -> Tensor:
    """Finite float32 `values`, each rounded up or down by the low 16 of its random bits."""
    return ((values.view(torch.int32) + (bits & LOW_BITS)) & ~LOW_BITS).view(torch.float32).to(torch.bfloat16)


def quantize(values: Tensor, bits: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Codes as float32, with the sign of their value, and the scale of each row: the largest magnitude in it.

    A code c stands for (c / levels) ** 4 of the scale: nearly logarithmic, since values of a row differ much in size.
    """
    scale = values.abs().amax(-1, keepdim=True)
    share = values.abs() / scale.clamp_min(torch.finfo(torch.float32).tiny)
    low = (share.sqrt().sqrt() * levels).floor().clamp_max(levels - 1)
    below, above = _decode(low, levels), _decode(low + 1, levels)
    codes = low + (uniform(bits) < (share - below) / (above - below))
    return codes * values.sign(), scale


def dequantize(codes: Tensor, scale: Tensor, levels: int) -> Tensor:
    """The float32 values of `codes`."""
    codes = codes.float()
    return codes.sign() * _decode(codes, levels) * scale


def _decode(codes: Tensor, levels: int) -> Tensor:
    squared = (codes / levels) ** 2
    return squared * squared
