"""Context parallelism: ranks that share the tokens of each micro-batch, and trade tokens for heads in attention.

Each of N ranks runs every layer on one N-th of the row's tokens. Attention needs whole sequences, and no head needs
another: so there the ranks exchange what they hold, each attends with one N-th of the heads over all tokens, and they
exchange back (Ulysses, Jacobs et al. 2023, arXiv:2309.14509). Any attention kernel will do.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd


class Context:
    """The ranks that share micro-batches with this one, in the order of the tokens that they have."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.size, self.rank = group, dist.get_world_size(group), dist.get_rank(group)

    def part(self, rows: Tensor) -> Tensor:
        """This rank's rows, of those for all tokens of a micro-batch."""
        return rows.chunk(self.size)[self.rank]

    def to_heads(self, tokens: Tensor) -> Tensor:
        """`[own tokens, heads, size]` to `[all tokens, own heads, size]`; too few heads go to several ranks each."""
        if tokens.shape[1] < self.size:
            tokens = tokens.repeat_interleave(self.size // tokens.shape[1], 1)
        count, heads, size = tokens.shape
        parts = tokens.reshape(count, self.size, heads // self.size, size).transpose(0, 1)
        return self._exchange(parts).flatten(0, 1)

    def to_tokens(self, heads: Tensor) -> Tensor:
        """`[all tokens, own heads, size]` to `[own tokens, heads, size]`."""
        parts = heads.reshape(self.size, -1, *heads.shape[1:])
        return self._exchange(parts).transpose(0, 1).flatten(1, 2)

    def _exchange(self, parts: Tensor) -> Tensor:
        """Part n to rank n, for what rank n has for this one."""
        return all_to_all_single_autograd(parts.contiguous(), None, None, self.group)


def joined(values: Tensor, places: Tensor, count: int, group: Any) -> Tensor:
    """`[count]` of all ranks, each of which has the `values` at its `places` and keeps their gradient."""
    result: Tensor = _Joined.apply(values, places, count, group)  # type: ignore[no-untyped-call]
    return result


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, places: Tensor, count: int, group: Any) -> Tensor:
        ctx.save_for_backward(places)
        joined = values.new_zeros(count).index_copy_(0, places, values)
        dist.all_reduce(joined, group=group)
        return joined

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return grads[0][ctx.saved_tensors[0]], None, None, None
