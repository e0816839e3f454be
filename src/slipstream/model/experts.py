"""Experts of a mixture by grouped matrix products over tokens that are sorted by expert.

Transformers reorders tokens by indexing, whose gradient adds rows at repeated indices. Here the gradient of each
reordering is a reordering, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation
from transformers.integrations import moe

NAME = "slipstream"
SILU = nn.SiLU, SiLUActivation


def grouped_experts(experts: Any, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """A Hugging Face experts function: the weighted sum of each token's expert outputs, `[tokens, size]`.

    `tokens` is `[tokens, size]`; `chosen` experts and router `weights` are `[tokens, experts per token]`. With expert
    parallelism, the index `experts.num_experts` stands for an expert of another rank: its output is 0.
    """
    if experts.has_bias or not experts.has_gate:
        out: Tensor = moe.grouped_mm_experts_forward(experts, tokens, chosen, weights)
        return out
    choices = len(chosen.unbind(1))  # a constant for the compiler, unlike the size: sums over it are unrolled
    by_expert, order = chosen.flatten().sort(stable=True)
    inverse = inverse_permutation(order)
    ends = torch.searchsorted(by_expert, torch.arange(experts.num_experts, device=order.device), right=True)
    offsets, transposed, here = ends.int(), experts.is_transposed, None
    if getattr(experts, "_is_expert_parallel", False):
        # Rows of other ranks' experts are the last: products don't write them. Nothing is read for them, and what they
        # hold is replaced by 0.
        here = chosen.flatten() < experts.num_experts
        order, inverse = order * (by_expert < experts.num_experts), inverse * here
    rows = DispatchRows.apply(tokens, order, inverse, choices, here)  # type: ignore[no-untyped-call]
    gate_up = moe._grouped_linear(rows, experts.gate_up_proj, offsets, is_transposed=transposed)
    # Weights are applied before the second product, which is linear: the backward pass doesn't need its output then.
    row_weights = ReorderRows.apply(weights.flatten(), order, inverse, None, here)  # type: ignore[no-untyped-call]
    inner = _weighted_gate(experts, gate_up, row_weights, offsets)
    outer = moe._grouped_linear(inner, experts.down_proj, offsets, is_transposed=transposed)
    returned: Tensor = ReorderRows.apply(outer, inverse, order, here, None)  # type: ignore[no-untyped-call]
    return returned.view(len(chosen), choices, -1).sum(1)


def _weighted_gate(experts: Any, gate_up: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """The gated activation of `gate_up` `[rows, 2 size]` times `weights` `[rows]`; `ends` are the ends of experts."""
    has_kernel = experts._apply_gate.__func__ is moe._default_apply_gate and isinstance(experts.act_fn, SILU)
    if has_kernel and gate_up.is_cuda:
        out: Tensor = WeightedGate.apply(gate_up, weights, ends)  # type: ignore[no-untyped-call]
        return out
    gated: Tensor = experts._apply_gate(gate_up)
    return (gated * weights[:, None]).to(gate_up.dtype)


class WeightedGate(torch.autograd.Function):
    """Values times weights times the SiLU of gates, by kernels that skip rows beyond the last end."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        from slipstream.model import expert_kernels  # hosts without GPUs may lack Triton

        ctx.save_for_backward(gate_up, weights, ends)
        return expert_kernels.weighted_gate(gate_up, weights, ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        from slipstream.model import expert_kernels

        gate_up, weights, ends = ctx.saved_tensors
        return *expert_kernels.weighted_gate_gradients(gate_up, weights, ends, grads[0].contiguous()), None


def inverse_permutation(order: Tensor) -> Tensor:
    """The permutation that undoes `order`: `rows[order][inverse]` equals `rows`."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def _select(rows: Tensor, index: Tensor, kept: Tensor | None) -> Tensor:
    """`rows[index]`, with 0 for rows that are not `kept` (None: all are)."""
    found = rows.index_select(0, index)
    return found if kept is None else torch.where(kept.view(-1, *[1] * (found.ndim - 1)), found, 0)


class DispatchRows(torch.autograd.Function):
    """Each token, once for each expert that it chose, in the `order` of experts; `inverse` undoes the order.

    The gradient of the choices that are not `here` is 0 (None: all are).
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, inverse: Tensor, choices: int, here: Tensor | None) -> Tensor:
        ctx.save_for_backward(inverse, here)
        ctx.choices = choices
        return tokens.index_select(0, order // choices)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        (inverse, here), (grad,) = ctx.saved_tensors, grads
        return _select(grad, inverse, here).view(-1, ctx.choices, grad.shape[1]).sum(1), None, None, None, None


class ReorderRows(torch.autograd.Function):
    """`rows[order]` for a permutation, whose `inverse` reorders the gradient.

    The output has 0 for rows that are not `kept`, and the gradient for those that are not `trained` (None: all are).
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor, kept: Tensor | None, trained: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(inverse, trained)
        return _select(rows, order, kept)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        (inverse, trained), (grad,) = ctx.saved_tensors, grads
        return _select(grad, inverse, trained), None, None, None, None
