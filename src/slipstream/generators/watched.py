"""Copies that others' code makes, watched once and then made again at one go.

vLLM brings an adapter into a slot by a thousand small operations. In a thread beside the passes each of them has to
have Python's lock back from the engine; made again, they are two.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
COPIES = {aten.copy_.default}
SCALINGS = {aten.mul_.Tensor, aten.mul_.Scalar}


class Watched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, notes what is done with `values`: scaled in place, and copied to other tensors."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._values = values
        self.scaled: list[tuple[Tensor, float]] = []
        self.copied: list[tuple[Tensor, Tensor]] = []  # to, from
        self.understood = True  # that this is all that was done with them

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(self._is_part(one) for one in tree_leaves((args, kwargs))):
            if func in COPIES and not self._is_part(args[0]) and args[0].dtype == args[1].dtype:
                self.copied.append((args[0], args[1]))
            elif func in SCALINGS and not self.copied and not isinstance(args[1], Tensor):
                self.scaled.append((args[0], float(args[1])))
            elif func._schema.is_mutable or not all(self._is_part(one) for one in tree_leaves(result)):
                self.understood = False  # else they are looked at in another shape
        return result

    def _is_part(self, one: Any) -> bool:
        return isinstance(one, Tensor) and one.untyped_storage().data_ptr() == self._values.untyped_storage().data_ptr()


class Copies:
    """What was watched, for any of `slots` places of the kind that was copied to; the values stay as they are.

    Each tensor that was copied to has to lie in memory of equal parts, one for each slot. Raises `ValueError` for what
    can't be made again so.
    """

    def __init__(self, watched: Watched, slot: int, slots: int) -> None:
        if not watched.understood or not watched.copied:
            raise ValueError("more was done with the values than can be done again")
        places = [place for place, _ in watched.copied]
        if any(place.storage_offset() // part_size(place, slots) != slot for place in places):
            raise ValueError("a copy went to another place than the slot")
        self._sources = [source for _, source in watched.copied]
        self._places = [[in_slot(place, number - slot, slots) for place in places] for number in range(slots)]
        factors = (prod(f for whole, f in watched.scaled if holds(whole, source)) for source in self._sources)
        self._factors = {number: factor for number, factor in enumerate(factors) if factor != 1}

    @torch.no_grad()
    def make(self, slot: int) -> None:
        """What `watched` saw done to that slot, with the values as they are now."""
        places = self._places[slot]
        torch._foreach_copy_(places, self._sources)
        if self._factors:
            torch._foreach_mul_([places[number] for number in self._factors], [*self._factors.values()])

    def wholes(self, slot: int) -> list[Tensor]:
        """All of a slot's memory that something is copied to, with what is around those places."""
        firsts = {place.untyped_storage().data_ptr(): place for place in self._places[slot]}.values()
        return [whole_slot(place, slot, len(self._places)) for place in firsts]

    def holds(self, slot: int, values: Tensor) -> bool:
        """Whether in that slot lies what was copied there of `values`, which is one of the tensors in them."""
        return all(
            torch.equal(self._places[slot][number], source * self._factors.get(number, 1))
            for number, source in enumerate(self._sources)
            if holds(values, source)
        )


def holds(whole: Tensor, part: Tensor) -> bool:
    """Whether a tensor without gaps has the first value of another of the same memory."""
    return whole.storage_offset() <= part.storage_offset() < whole.storage_offset() + whole.numel()


def whole_slot(place: Tensor, slot: int, slots: int) -> Tensor:
    """All of the part of its memory that belongs to a slot."""
    size = part_size(place, slots)
    return torch.as_strided(place, (size,), (1,), slot * size)


def in_slot(place: Tensor, further: int, slots: int) -> Tensor:
    """The same place in the part of its memory that lies `further` parts on."""
    offset = place.storage_offset() + further * part_size(place, slots)
    return torch.as_strided(place, place.size(), place.stride(), offset)


def part_size(place: Tensor, slots: int) -> int:
    elements, rest = divmod(place.untyped_storage().nbytes(), place.element_size() * slots)
    if rest:
        raise ValueError("memory is not of as many parts as there are slots")
    return elements
