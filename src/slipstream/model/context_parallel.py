"""Context parallelism (Ulysses, Jacobs et al. 2023, arXiv:2309.14509): ranks share the tokens of each micro-batch.

Each of N ranks runs every layer on 1/N of the tokens. For attention an all-to-all gives each rank 1/N of the heads and
all tokens; a second all-to-all restores 1/N of the tokens and all heads. It works with any attention kernel.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.model.collectives import all_to_all


class ContextParallelGroup:
    """The ranks that share micro-batches with this rank, in token order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.size, self.rank = group, dist.get_world_size(group), dist.get_rank(group)

    def shard(self, rows: Tensor) -> Tensor:
        """This rank's rows of a tensor with one row for each token of the micro-batch."""
        return rows.chunk(self.size)[self.rank]

    def own_count(self, tokens: int, count: int) -> int:
        """How many of the first `count` tokens of a micro-batch are in this rank's part."""
        part = tokens // self.size
        return min(max(count - self.rank * part, 0), part)

    def to_heads(self, tokens: Tensor) -> Tensor:
        """`[own tokens, heads, size]` to `[all tokens, own heads, size]`; fewer heads than ranks are repeated."""
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
        """All-to-all: `parts[n]` goes to rank n."""
        return all_to_all(parts.contiguous(), self.group)


def gather_at_positions(values: Tensor, positions: Tensor, count: int, group: Any) -> Tensor:
    """Tensor `[count]` with the `values` of all ranks at their `positions`; gradients return to the values' rank."""
    result: Tensor = _GatherAtPositions.apply(values, positions, count, group)  # type: ignore[no-untyped-call]
    return result


class _GatherAtPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, positions: Tensor, count: int, group: Any) -> Tensor:
        ctx.save_for_backward(positions)
        gathered = values.new_zeros(count).index_copy_(0, positions, values)
        dist.all_reduce(gathered, group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return grads[0][ctx.saved_tensors[0]], None, None, None
