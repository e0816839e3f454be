"""Collectives whose gradients are collectives, too: compiled code traces torch's functional ones, eager code blocks.

An eager functional collective returns before its end, and activation checkpointing may repeat it and drop the result.
With torch 2.13 that crashed processes on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional

BLOCKING: Any = dist
FUNCTIONAL: Any = functional
IS_RENAMED = hasattr(dist, "all_gather_single")  # since torch 2.13


def all_gather(rows: Tensor, group: Any) -> Tensor:
    """The rows of all ranks of `group`, in the order of ranks. Its gradient is `reduce_scatter`."""
    if not torch.compiler.is_compiling():
        found: Tensor = _AllGather.apply(rows, group)  # type: ignore[no-untyped-call]
    elif IS_RENAMED:
        found = FUNCTIONAL.all_gather_single_autograd(rows, 0, group)
    else:
        found = FUNCTIONAL.all_gather_tensor_autograd(rows, 0, group)
    return found


def reduce_scatter(rows: Tensor, group: Any) -> Tensor:
    """This rank's part of the rows, summed over `group`. Its gradient is `all_gather`."""
    if not torch.compiler.is_compiling():
        found: Tensor = _ReduceScatter.apply(rows, group)  # type: ignore[no-untyped-call]
    elif IS_RENAMED:
        found = FUNCTIONAL.reduce_scatter_single_autograd(rows, "sum", 0, group)
    else:
        found = FUNCTIONAL.reduce_scatter_tensor_autograd(rows, "sum", 0, group)
    return found


def all_to_all(parts: Tensor, group: Any) -> Tensor:
    """`parts[n]` goes to rank n of `group`; the result has a part from each rank. Its gradient is `all_to_all`."""
    if torch.compiler.is_compiling():
        found: Tensor = FUNCTIONAL.all_to_all_single_autograd(parts, None, None, group)
    else:
        found = _AllToAll.apply(parts, group)  # type: ignore[no-untyped-call]
    return found


def _gathered(rows: Tensor, group: Any) -> Tensor:
    everyone = rows.new_empty(len(rows) * dist.get_world_size(group), *rows.shape[1:])
    gather = BLOCKING.all_gather_single if IS_RENAMED else BLOCKING.all_gather_into_tensor
    gather(everyone, rows.contiguous(), group=group)
    return everyone


def _scattered(rows: Tensor, group: Any) -> Tensor:
    own = rows.new_empty(len(rows) // dist.get_world_size(group), *rows.shape[1:])
    scatter = BLOCKING.reduce_scatter_single if IS_RENAMED else BLOCKING.reduce_scatter_tensor
    scatter(own, rows.contiguous(), group=group)
    return own


def _exchanged(parts: Tensor, group: Any) -> Tensor:
    received = torch.empty_like(parts, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, parts.contiguous(), group=group)
    return received


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _gathered(rows, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _scattered(grads[0], ctx.group), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _scattered(rows, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _gathered(grads[0], ctx.group), None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _exchanged(parts, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _exchanged(grads[0], ctx.group), None
