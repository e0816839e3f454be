"""What is spread over ranks, read as if it were whole.

Rank 0's end of a link reads parameters in its own order and knows of no ranks; the others follow it through every
gather, told over a group of the CPU which is next.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

DONE = -1  # said by rank 0 instead of the number of a parameter


class Gathered(Mapping[str, Tensor]):
    """Sharded parameters as rank 0 reads them: whole, in the format `dtype`, each gathered when it is asked for.

    The others take part in every gather: they `follow` until rank 0 is `done`.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], dtype: torch.dtype, group: Any) -> None:
        self._parameters, self._dtype, self._group = parameters, dtype, group
        self._names = list(parameters)

    def __getitem__(self, name: str) -> Tensor:
        self._say(self._names.index(name))
        return self._gather(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def follow(self) -> None:
        """Gather what rank 0 asks for until it is done."""
        while (number := self._say(DONE)) != DONE:
            self._gather(self._names[number])

    def done(self) -> None:
        """Let the others go."""
        self._say(DONE)

    def _say(self, number: int) -> int:
        """What rank 0 says here."""
        said = torch.tensor(number)
        dist.broadcast(said, 0, group=self._group)
        return int(said)

    def _gather(self, name: str) -> Tensor:
        return whole(self._parameters[name].detach().to(self._dtype))


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor of which each rank may hold a part; every rank has to ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part_here(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part_of(tensor: Tensor, like: Tensor) -> Tensor:
    """Of a tensor that every rank holds whole, what it holds of `like`."""
    return distribute_tensor(tensor, like.device_mesh, like.placements) if isinstance(like, DTensor) else tensor
