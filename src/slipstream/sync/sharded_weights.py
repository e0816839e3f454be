"""Sharded parameters: full tensors and local parts, and gathering one parameter at a time for a weight link.

A sender on rank 0 reads parameters in its own order. Rank 0 broadcasts the index of each parameter that it reads, so
that the other ranks join the collective gather.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from slipstream.model.collectives import gather_rows

DONE = -1  # broadcast instead of a parameter's index: no more gathers


class GatheredParameters(Mapping[str, Tensor]):
    """Sharded parameters as a mapping on rank 0: reading a name gathers the full tensor in `dtype`.

    The other ranks call `serve_gathers`, which returns when rank 0 calls `end_gathers`. `group` is a CPU group.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], dtype: torch.dtype, group: Any) -> None:
        self._parameters, self._dtype, self._group = parameters, dtype, group
        self._names = list(parameters)

    def __getitem__(self, name: str) -> Tensor:
        self._broadcast(self._names.index(name))
        return self._gather(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def shapes(self) -> dict[str, list[int]]:
        """Shape of each full tensor, without a gather: a link may be opened while the shards are on the host."""
        return {name: list(parameter.shape) for name, parameter in self._parameters.items()}

    def serve_gathers(self) -> None:
        """On ranks other than 0: join every gather of rank 0 until `end_gathers`."""
        while (number := self._broadcast(DONE)) != DONE:
            self._gather(self._names[number])

    def end_gathers(self) -> None:
        """On rank 0: end `serve_gathers` of the other ranks."""
        self._broadcast(DONE)

    def _broadcast(self, number: int) -> int:
        """Rank 0's `number`, on every rank."""
        received = torch.tensor(number)
        dist.broadcast(received, 0, group=self._group)
        return int(received)

    def _gather(self, name: str) -> Tensor:
        return full_tensor(self._parameters[name].detach().to(self._dtype))


def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor of a DTensor, or `tensor` itself. A collective call: every rank must make it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def gather_into(outputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Write full tensors into `outputs` on every rank, each in the output's dtype. A collective call.

    Shards of rows are gathered in one transfer per group of ranks and dtype, and others one by one.
    """
    rows: dict[tuple[DeviceMesh, torch.dtype], list[tuple[Tensor, DTensor]]] = {}
    for output, tensor in zip(outputs, tensors, strict=True):
        if isinstance(tensor, DTensor) and tensor.placements == (Shard(0),):
            rows.setdefault((tensor.device_mesh, output.dtype), []).append((output, tensor))
        elif isinstance(tensor, DTensor):
            output.copy_(full_tensor(tensor.to(output.dtype)))
    whole = [(out, t) for out, t in zip(outputs, tensors, strict=True) if not isinstance(t, DTensor)]
    if whole:
        torch._foreach_copy_([out for out, _ in whole], [t for _, t in whole])
    for (mesh, _), pairs in rows.items():
        _gather_shards(mesh.get_group(), mesh.size(), pairs)


def _gather_shards(group: Any, ranks: int, pairs: Sequence[tuple[Tensor, DTensor]]) -> None:
    """As `gather_into`, for shards of rows and outputs of one dtype.

    All ranks have the same number of rows, except that the last ones may have fewer.
    """
    rows = [-(-len(output) // ranks) for output, _ in pairs]
    sizes = [count * output[0].numel() for count, (output, _) in zip(rows, pairs, strict=True)]
    mine = pairs[0][0].new_empty(sum(sizes))
    shards = [local_part(tensor).flatten() for _, tensor in pairs]
    parts = [part[: len(shard)] for part, shard in zip(torch.split(mine, sizes), shards, strict=True)]
    torch._foreach_copy_(parts, shards)
    targets, sources = [], []
    for rank, its in enumerate(torch.split(gather_rows(mine, group), len(mine))):
        for (output, _), count, part in zip(pairs, rows, torch.split(its, sizes), strict=True):
            targets.append(target := output[rank * count : (rank + 1) * count])
            sources.append(part[: target.numel()].view_as(target))
    torch._foreach_copy_(targets, sources)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, or `tensor` itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_part_like(tensor: Tensor, like: Tensor) -> Tensor:
    """The shard of a full tensor, laid out as `like` is. A collective call: rank 0's values are used."""
    return distribute_tensor(tensor, like.device_mesh, like.placements) if isinstance(like, DTensor) else tensor
