"""Collectives whose gradients are collectives, too: compiled code traces torch's functional ones, eager code blocks.

An eager functional collective returns before its end, and activation checkpointing may repeat it and drop the result.
With torch 2.13 that crashed processes on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional

IS_RENAMED = hasattr(dist, "all_gather_single")  # since torch 2.13
_gather: Any = dist.all_gather_single if IS_RENAMED else dist.all_gather_into_tensor
_scatter: Any = dist.reduce_scatter_single if IS_RENAMED else dist.reduce_scatter_tensor
_traced_gather: Any = functional.all_gather_single_autograd if IS_RENAMED else functional.all_gather_tensor_autograd
_traced_scatter: Any = (
    functional.reduce_scatter_single_autograd if IS_RENAMED else functional.reduce_scatter_tensor_autograd
)
_traced_exchange: Any = functional.all_to_all_single_autograd


def all_gather(rows: Tensor, group: Any) -> Tensor:
    """The rows of all ranks of `group`, in the order of ranks. Its gradient is `reduce_scatter`."""
    if torch.compiler.is_compiling():
        found: Tensor = _traced_gather(rows, 0, group)
        return found
    return _blocking(rows, group, gather_rows, _scatter_rows)


def reduce_scatter(rows: Tensor, group: Any) -> Tensor:
    """This rank's part of the rows, summed over `group`. Its gradient is `all_gather`."""
    if torch.compiler.is_compiling():
        found: Tensor = _traced_scatter(rows, "sum", 0, group)
        return found
    return _blocking(rows, group, _scatter_rows, gather_rows)


def all_to_all(parts: Tensor, group: Any) -> Tensor:
    """`parts[n]` goes to rank n of `group`; the result has a part from each rank. Its gradient is `all_to_all`."""
    if torch.compiler.is_compiling():
        found: Tensor = _traced_exchange(parts, None, None, group)
        return found
    return _blocking(parts, group, _exchange_parts, _exchange_parts)


Collective = Callable[[Tensor, Any], Tensor]


def _blocking(rows: Tensor, group: Any, collective: Collective, gradient: Collective) -> Tensor:
    found: Tensor = _Blocking.apply(rows, group, collective, gradient)  # type: ignore[no-untyped-call]
    return found


class _Blocking(torch.autograd.Function):
    """A collective over `group`, whose gradient is that of the collective `gradient`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any, collective: Collective, gradient: Collective) -> Tensor:
        ctx.group, ctx.gradient = group, gradient
        return collective(rows, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.gradient(grads[0], ctx.group), None, None, None


def gather_rows(rows: Tensor, group: Any) -> Tensor:
    """As `all_gather`, without a gradient."""
    everyone = rows.new_empty(len(rows) * dist.get_world_size(group), *rows.shape[1:])
    _gather(everyone, rows.contiguous(), group=group)
    return everyone


def _scatter_rows(rows: Tensor, group: Any) -> Tensor:
    own = rows.new_empty(len(rows) // dist.get_world_size(group), *rows.shape[1:])
    _scatter(own, rows.contiguous(), group=group)
    return own


def _exchange_parts(parts: Tensor, group: Any) -> Tensor:
    received = torch.empty_like(parts, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, parts.contiguous(), group=group)
    return received
