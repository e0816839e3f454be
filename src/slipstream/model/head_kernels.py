"""Triton kernels for the softmax of the language-model head's logits.

Each function reads a logit once; gradients overwrite the logits. With `compiled` the module `logprobs` calls these
functions, else its own functions of the same names. `trainer.compile` sets `compiled` on a GPU, for dtypes other than
float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192  # logits that a program reads at once
# Arguments that are parts of arrays and begin anywhere: else a kernel would be compiled for each alignment.
PARTS, PARTS_WITH_RESULTS = ["targets", "temperatures"], ["targets", "temperatures", "normalisers", "scales"]


@triton.jit  # type: ignore[untyped-decorator]
def _read(logits, excluded, row, at, size, scale, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Logits times `scale` in float32; -inf for excluded ids and beyond the vocabulary."""
    inside = at < size
    values = tl.load(logits + row * size + at, mask=inside, other=-float("inf")).to(tl.float32) * scale
    if MASKED:
        drop = tl.load(excluded + row * size + at, mask=inside, other=1)
        values = tl.where(drop != 0, -float("inf"), values)
    return values


@triton.jit(do_not_specialize_on_alignment=PARTS)  # type: ignore[untyped-decorator]
def _statistics_kernel(  # type: ignore[no-untyped-def]
    logits, targets, temperatures, excluded, logprobs, normalisers, entropies, size, MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    scale = 1.0 / tl.load(temperatures + row)
    top, total, expected = -1e30, 0.0, 0.0  # the first is below any logit but those of excluded ids, which are -inf
    for start in range(0, size, BLOCK):
        values = _read(logits, excluded, row, start + tl.arange(0, BLOCK), size, scale, MASKED)
        higher = tl.maximum(top, tl.max(values))
        weights = tl.exp(values - higher)
        shrink = tl.exp(top - higher)
        total = total * shrink + tl.sum(weights)
        expected = expected * shrink + tl.sum(tl.where(values == -float("inf"), 0.0, weights * values))
        top = higher
    target = tl.load(targets + row)
    own = _read(logits, excluded, row, target, size, scale, MASKED)
    normaliser = tl.log(total) + top
    tl.store(normalisers + row, normaliser)
    tl.store(logprobs + row, own - normaliser)
    tl.store(entropies + row, normaliser - expected / total)


@triton.jit(do_not_specialize_on_alignment=PARTS_WITH_RESULTS)  # type: ignore[untyped-decorator]
def _gradients_kernel(  # type: ignore[no-untyped-def]
    logits, targets, temperatures, excluded, normalisers, scales, size, MASKED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = _read(logits, excluded, row, at, size, 1.0 / tl.load(temperatures + row), MASKED)
    probabilities = tl.exp(values - tl.load(normalisers + row))
    is_target = (at == tl.load(targets + row)).to(tl.float32)
    gradients = tl.load(scales + row) * (is_target - probabilities)
    tl.store(logits + row * size + at, gradients.to(logits.dtype.element_ty), mask=at < size)


def logprobs_and_entropy(
    logits: Tensor, targets: Tensor, temperatures: Tensor, excluded: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """As `logprobs.logprobs_and_entropy`."""
    rows, size = logits.shape
    found = tuple(torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(3))
    masked = excluded is not None
    inputs = logits, targets, temperatures, excluded if masked else logits
    _statistics_kernel[(rows,)](*inputs, *found, size, MASKED=masked, BLOCK=BLOCK, num_warps=8)
    return found  # type: ignore[return-value]


def logit_gradients(
    logits: Tensor, targets: Tensor, temperatures: Tensor, excluded: Tensor | None, normaliser: Tensor, scale: Tensor
) -> Tensor:
    """As `logprobs.logit_gradients`; overwrites `logits` by the result."""
    rows, size = logits.shape
    masked = excluded is not None
    inputs = logits, targets, temperatures, excluded if masked else logits, normaliser, scale
    _gradients_kernel[rows, triton.cdiv(size, BLOCK)](*inputs, size, MASKED=masked, BLOCK=BLOCK, num_warps=8)
    return logits
