"""Records the in-place operations that fill tensors from others, so that they can be repeated in three calls.

vLLM loads an adapter by thousands of small operations. A background thread that executes them waits for the interpreter
lock at each operation, because the engine's thread holds the lock.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
ZEROING = (aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor)


class RecordedCopies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, records operations that scale `sources`, copy them elsewhere, or set tensors to zero.

    `complete` is False if other operations wrote into a tensor, or copied from other tensors.
    """

    def __init__(self, sources: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._own = {source.untyped_storage().data_ptr() for source in sources}
        self._zeroed: list[Tensor] = []
        self._scaled: list[tuple[Tensor, float]] = []
        self._copied: list[tuple[Tensor, Tensor]] = []
        self.complete = True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is aten.copy_.default and self._is_source(args[1]):
            self._copied.append(args[:2])
        elif function in ZEROING and not any(args[1:]):
            self._zeroed.append(args[0])
        elif function in (aten.mul_.Tensor, aten.mul_.Scalar) and self._is_source(args[0]):
            self._scaled.append((args[0], float(args[1])))
        elif function._schema.is_mutable:
            self.complete = False
        return function(*args, **(kwargs or {}))

    def _is_source(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._own

    def repeat(self) -> None:
        """Do the same with the values that the sources have now."""
        torch._foreach_zero_(self._zeroed)
        if self._scaled:
            tensors, factors = zip(*self._scaled, strict=True)
            torch._foreach_mul_(tensors, factors)
        if self._copied:
            targets, sources = zip(*self._copied, strict=True)
            torch._foreach_copy_(targets, sources, non_blocking=True)


def load_kernels(like: Tensor) -> None:
    """Repeat an example of copies on new tensors of the device and dtype of `like`.

    CUDA loads a kernel at its first use, and no thread can start other kernels meanwhile, which takes up to 30 ms.
    """
    source, wide = like.new_ones(8, 16), like.new_empty(8, 32)
    with RecordedCopies([source]) as copies:
        wide.zero_()
        source.mul_(2.0)
        wide[:, :16].copy_(source)  # an adapter of a lower rank than its slot
    copies.repeat()
    torch._foreach_copy_([like.new_empty(8, 16)], [source])  # of the slot's rank
