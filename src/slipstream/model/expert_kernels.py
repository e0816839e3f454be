"""Triton kernels for the weighted gate of experts. They skip rows that no product writes (`experts.grouped_experts`).

A row of `gate_up` holds gate g and value u; the output is w silu(g) u, for the row's router weight w.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # columns that a program reads at once


@triton.jit
def _read(gate_up, row, at, size):  # type: ignore[no-untyped-def]
    """Gates, values, and the sigmoids of the gates."""
    inside = at < size
    gate = tl.load(gate_up + row * 2 * size + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (row * 2 + 1) * size + at, mask=inside, other=0.0).to(tl.float32)
    return gate, up, tl.sigmoid(gate)


@triton.jit  # type: ignore[untyped-decorator]
def _gate_kernel(  # type: ignore[no-untyped-def]
    gate_up, weights, ends, outputs, size, experts, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(ends + experts - 1):
        weight = tl.load(weights + row).to(tl.float32)
        for start in range(0, size, BLOCK):
            at = start + tl.arange(0, BLOCK)
            gate, up, sigmoid = _read(gate_up, row, at, size)
            values = weight * gate * sigmoid * up
            tl.store(outputs + row * size + at, values.to(outputs.dtype.element_ty), mask=at < size)


@triton.jit  # type: ignore[untyped-decorator]
def _gradients_kernel(  # type: ignore[no-untyped-def]
    gate_up, weights, ends, gradients, to_gate_up, to_weights, size, experts, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(ends + experts - 1):
        weight = tl.load(weights + row).to(tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, size, BLOCK):
            at = start + tl.arange(0, BLOCK)
            inside = at < size
            gate, up, sigmoid = _read(gate_up, row, at, size)
            gradient = tl.load(gradients + row * size + at, mask=inside, other=0.0).to(tl.float32)
            silu = gate * sigmoid
            total += gradient * silu * up
            by_gate = weight * gradient * up * sigmoid * (1.0 + gate - silu)
            dtype = to_gate_up.dtype.element_ty
            tl.store(to_gate_up + row * 2 * size + at, by_gate.to(dtype), mask=inside)
            tl.store(to_gate_up + (row * 2 + 1) * size + at, (weight * gradient * silu).to(dtype), mask=inside)
        tl.store(to_weights + row, tl.sum(total).to(to_weights.dtype.element_ty))


def weighted_swiglu(gate_up: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """`weights * silu(gate) * up`, `[rows, size]`, of `gate_up` `[rows, 2 size]` and router `weights` `[rows]`.

    `ends` are the ends of the experts' rows, int32 `[experts]`. Rows from the last end on are not written.
    """
    rows, size = len(gate_up), gate_up.shape[1] // 2
    outputs = gate_up.new_empty(rows, size)
    _gate_kernel[(rows,)](gate_up, weights, ends, outputs, size, len(ends), BLOCK=BLOCK)
    return outputs


def weighted_swiglu_gradients(
    gate_up: Tensor, weights: Tensor, ends: Tensor, gradients: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of `gate_up` and `weights` for those of the output; shapes and rows as in `weighted_swiglu`."""
    to_gate_up, to_weights = torch.empty_like(gate_up), torch.empty_like(weights)
    size = gradients.shape[1]
    _gradients_kernel[(len(gate_up),)](
        gate_up, weights, ends, gradients, to_gate_up, to_weights, size, len(ends), BLOCK=BLOCK
    )
    return to_gate_up, to_weights
