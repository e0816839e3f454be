"""Experts of a mixture by grouped matrix products over tokens that are sorted by expert.

Transformers reorders tokens by indexing, whose gradient adds rows at repeated indices. Here the gradient of each
reordering is a reordering, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.integrations import moe

NAME = "slipstream"


def grouped_experts(experts: Any, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """A Hugging Face experts function: the weighted sum of each token's expert outputs, `[tokens, size]`.

    `tokens` is `[tokens, size]`; `chosen` experts and router `weights` are `[tokens, experts per token]`.
    """
    if experts.has_bias or not experts.has_gate:
        out: Tensor = moe.grouped_mm_experts_forward(experts, tokens, chosen, weights)
        return out
    by_expert, order = chosen.flatten().sort(stable=True)
    inverse = inverse_permutation(order)
    ends = torch.searchsorted(by_expert, torch.arange(experts.num_experts, device=order.device), right=True)
    offsets, transposed = ends.int(), experts.is_transposed
    rows = DispatchRows.apply(tokens, order, inverse, chosen.shape[1])  # type: ignore[no-untyped-call]
    inner = experts._apply_gate(moe._grouped_linear(rows, experts.gate_up_proj, offsets, is_transposed=transposed))
    outer = moe._grouped_linear(inner, experts.down_proj, offsets, is_transposed=transposed)
    returned: Tensor = ReorderRows.apply(outer, inverse, order)  # type: ignore[no-untyped-call]
    return (returned.view(*chosen.shape, -1) * weights[..., None]).sum(1).to(tokens.dtype)


def inverse_permutation(order: Tensor) -> Tensor:
    """The permutation that undoes `order`: `rows[order][inverse]` equals `rows`."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


class DispatchRows(torch.autograd.Function):
    """Each token, once for each expert that it chose, in the `order` of experts; `inverse` undoes the order."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, inverse: Tensor, choices: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.choices = choices
        return tokens.index_select(0, order // choices)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,), (grad,) = ctx.saved_tensors, grads
        return grad.index_select(0, inverse).view(-1, ctx.choices, grad.shape[1]).sum(1), None, None, None


class ReorderRows(torch.autograd.Function):
    """`rows[order]` for a permutation, whose `inverse` reorders the gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (inverse,), (grad,) = ctx.saved_tensors, grads
        return grad.index_select(0, inverse), None, None
