"""Records the copies vLLM makes to load a LoRA adapter and replays them as one batched copy.

vLLM fills a slot by about a thousand small operations. In a background thread each of them waits for Python's global
lock, which the forward passes hold. The replay takes two operations.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
SCALINGS = {aten.mul_.Tensor, aten.mul_.Scalar}


class CopyRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context that records the operations on `values`: scalings in place, and copies to other tensors."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._values = values
        self.scalings: list[tuple[Tensor, float]] = []
        self.copies: list[tuple[Tensor, Tensor]] = []  # target, source
        self.complete = True  # False after any other operation that changes or reads the values

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(self._is_part(leaf) for leaf in tree_leaves((args, kwargs))):
            if func is aten.copy_.default and not self._is_part(args[0]) and args[0].dtype == args[1].dtype:
                self.copies.append((args[0], args[1]))
            elif func in SCALINGS and not self.copies and not isinstance(args[1], Tensor):
                self.scalings.append((args[0], float(args[1])))
            elif func._schema.is_mutable or not all(self._is_part(leaf) for leaf in tree_leaves(result)):
                self.complete = False  # views of the values are fine
        return result

    def _is_part(self, leaf: Any) -> bool:
        memory = self._values.untyped_storage().data_ptr()
        return isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() == memory


class RecordedCopies:
    """The copies of a `CopyRecorder`, to be replayed into any of `slots` slots from the same `values` tensor.

    Each target must lie in memory of equal parts, one a slot. Raises `ValueError` if the record can't be replayed.
    """

    def __init__(self, recorder: CopyRecorder, slot: int, slots: int) -> None:
        if not recorder.complete or not recorder.copies:
            raise ValueError("more was done with the values than can be done again")
        targets = [target for target, _ in recorder.copies]
        if any(target.storage_offset() // part_size(target, slots) != slot for target in targets):
            raise ValueError("a copy went to another place than the slot")
        self._sources = [source for _, source in recorder.copies]
        self._targets = [[shift_slot(target, number - slot, slots) for target in targets] for number in range(slots)]
        factors = (prod(f for whole, f in recorder.scalings if contains(whole, source)) for source in self._sources)
        self._factors = {number: factor for number, factor in enumerate(factors) if factor != 1}

    @torch.no_grad()
    def replay(self, slot: int) -> None:
        """Copy the current values into a slot, scaled as recorded."""
        targets = self._targets[slot]
        torch._foreach_copy_(targets, self._sources)
        if self._factors:
            torch._foreach_mul_([targets[number] for number in self._factors], [*self._factors.values()])

    def slot_memory(self, slot: int) -> list[Tensor]:
        """All memory of a slot in the tensors that the copies write to, padding included."""
        firsts = {target.untyped_storage().data_ptr(): target for target in self._targets[slot]}.values()
        sizes = [(target, part_size(target, len(self._targets))) for target in firsts]
        return [torch.as_strided(target, (size,), (1,), slot * size) for target, size in sizes]

    def slot_holds(self, slot: int, values: Tensor) -> bool:
        """Whether a slot holds these values, scaled as recorded; `values` is one tensor of the adapter."""
        return all(
            torch.equal(self._targets[slot][number], source * self._factors.get(number, 1))
            for number, source in enumerate(self._sources)
            if contains(values, source)
        )


def contains(whole: Tensor, part: Tensor) -> bool:
    """Whether the contiguous tensor `whole` has the first value of `part`, a tensor of the same memory."""
    return whole.storage_offset() <= part.storage_offset() < whole.storage_offset() + whole.numel()


def shift_slot(target: Tensor, by: int, slots: int) -> Tensor:
    """The same tensor in another slot, `by` slots further on."""
    offset = target.storage_offset() + by * part_size(target, slots)
    return torch.as_strided(target, target.size(), target.stride(), offset)


def part_size(target: Tensor, slots: int) -> int:
    """Elements of one slot in the memory of a tensor. Raises `ValueError` if the slots are unequal."""
    elements, rest = divmod(target.untyped_storage().nbytes(), target.element_size() * slots)
    if rest:
        raise ValueError("memory is not of as many parts as there are slots")
    return elements
