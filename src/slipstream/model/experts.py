"""Experts of a mixture by grouped matrix products over tokens that are sorted by expert.

Transformers reorders tokens by indexing, whose gradient adds rows at repeated indices. Here the gradient of each
reordering is a reordering, too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation
from transformers.integrations import moe

NAME = "slipstream"
SILU = nn.SiLU, SiLUActivation


def grouped_experts(experts: Any, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """A Hugging Face experts function: the weighted sum of each token's expert outputs, `[tokens, size]`.

    `tokens` is `[tokens, size]`; `chosen` experts and router `weights` are `[tokens, experts per token]`. With expert
    parallelism `experts.num_experts` is a sentinel index: the expert is of another rank, and its output is 0 here.
    """
    if experts.has_bias or not experts.has_gate:
        out: Tensor = moe.grouped_mm_experts_forward(experts, tokens, chosen, weights)
        return out
    choices, transposed = experts_per_token(chosen), experts.is_transposed
    order, inverse, ends, is_local = _sort_by_expert(experts, chosen)
    rows = DispatchRows.apply(tokens, order, inverse, choices, is_local)  # type: ignore[no-untyped-call]
    gate_up = moe._grouped_linear(rows, experts.gate_up_proj, ends, is_transposed=transposed)
    # Weights are applied before the second product, which is linear: the backward pass doesn't need its output then.
    row_weights = ReorderRows.apply(weights.flatten(), order, inverse, None, is_local)  # type: ignore[no-untyped-call]
    inner = _weighted_gate(experts, gate_up, row_weights, ends)
    outer = moe._grouped_linear(inner, experts.down_proj, ends, is_transposed=transposed)
    returned: Tensor = ReorderRows.apply(outer, inverse, order, is_local, None)  # type: ignore[no-untyped-call]
    return returned.view(len(chosen), choices, -1).sum(1).to(tokens.dtype)


def experts_per_token(chosen: Tensor) -> int:
    """The number of columns: for the compiler a constant, unlike the size, so that it unrolls sums over it."""
    return len(chosen.unbind(1))


class RowOrder(NamedTuple):
    """One row for each choice of each token, sorted by expert.

    `order` has the choice of each row, `inverse` the row of each choice, and `ends` the end of each expert's rows
    (int32). `is_local` says which choices are of experts in this module (None: all).
    """

    order: Tensor
    inverse: Tensor
    ends: Tensor
    is_local: Tensor | None


def _sort_by_expert(experts: Any, chosen: Tensor) -> RowOrder:
    """Rows of sentinels are the last, and no product reads or writes them. Their entries in `order` are 0, and so are
    those of their choices in `inverse`."""
    by_expert, order = chosen.flatten().sort(stable=True)
    inverse, is_local = inverse_permutation(order), None
    ends = torch.searchsorted(by_expert, torch.arange(experts.num_experts, device=order.device), right=True)
    if getattr(experts, "_is_expert_parallel", False):
        is_local = chosen.flatten() < experts.num_experts
        order = torch.where(by_expert < experts.num_experts, order, 0)
        inverse = torch.where(is_local, inverse, 0)
    return RowOrder(order, inverse, ends.int(), is_local)


def inverse_permutation(order: Tensor) -> Tensor:
    """The permutation that undoes `order`: `rows[order][inverse]` equals `rows`."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def _weighted_gate(experts: Any, gate_up: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """The gated activation of `gate_up` `[rows, 2 size]` times `weights` `[rows]`; `ends` are the ends of experts."""
    has_kernel = type(experts)._apply_gate is moe._default_apply_gate and isinstance(experts.act_fn, SILU)
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

        gate_up, weights = gate_up.contiguous(), weights.contiguous()
        ctx.save_for_backward(gate_up, weights, ends)
        return expert_kernels.weighted_swiglu(gate_up, weights, ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        from slipstream.model import expert_kernels

        gate_up, weights, ends = ctx.saved_tensors
        return *expert_kernels.weighted_swiglu_gradients(gate_up, weights, ends, grads[0].contiguous()), None


def _select(rows: Tensor, index: Tensor, mask: Tensor | None) -> Tensor:
    """`rows[index]`, with 0 where `mask` is false (None: it is true)."""
    found = rows.index_select(0, index)
    return found if mask is None else torch.where(mask.view(-1, *[1] * (found.ndim - 1)), found, 0)


class DispatchRows(torch.autograd.Function):
    """Each token, once for each expert that it chose, in the `order` of experts; `inverse` undoes the order.

    The gradient of choices that are not `is_local` is 0 (None: all are).
    """

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, order: Tensor, inverse: Tensor, choices: int, is_local: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(inverse, is_local)
        ctx.choices = choices
        return tokens.index_select(0, order // choices)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        (inverse, is_local), (grad,) = ctx.saved_tensors, grads
        return _select(grad, inverse, is_local).view(-1, ctx.choices, grad.shape[1]).sum(1), None, None, None, None


class ReorderRows(torch.autograd.Function):
    """`rows[order]` for a permutation, whose `inverse` reorders the gradient.

    The output has 0 where `mask` is false, and the gradient where `gradient_mask` is (None: they are true).
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor, mask: Tensor | None, gradient_mask: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(inverse, gradient_mask)
        return _select(rows, order, mask)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        (inverse, gradient_mask), (grad,) = ctx.saved_tensors, grads
        return _select(grad, inverse, gradient_mask), None, None, None, None
