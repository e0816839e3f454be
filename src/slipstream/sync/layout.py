"""Where each parameter lies in one flat buffer, which both ends of a link compute alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes


class Layout:
    """Parameters of these shapes, one after the other, in number format `dtype`. Pure."""

    def __init__(self, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype) -> None:
        self.shapes, self.dtype = shapes, dtype
        self.offsets: dict[str, int] = {}
        self.size = 0
        for name, shape in shapes.items():
            self.offsets[name] = self.size
            self.size += -(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT

    def views(self, buffer: Tensor, start: int = 0, names: Sequence[str] = ()) -> dict[str, Tensor]:
        """Tensors in `buffer`, bytes whose first belongs at `start` of the layout; of all parameters or of `names`."""
        views = {}
        for name in names or self.shapes:
            at, shape = self.offsets[name] - start, self.shapes[name]
            views[name] = buffer[at : at + prod(shape) * self.dtype.itemsize].view(self.dtype).view(*shape)
        return views

    def buckets(self, size: int) -> list[tuple[int, int, list[str]]]:
        """Consecutive parameters in runs of about `size` bytes: first byte, end, names. No parameter is cut."""
        buckets: list[tuple[int, int, list[str]]] = []
        ends = [*list(self.offsets.values())[1:], self.size]
        for (name, start), end in zip(self.offsets.items(), ends, strict=True):
            if buckets and end - buckets[-1][0] <= size:
                first, _, names = buckets[-1]
                buckets[-1] = (first, end, [*names, name])
            else:
                buckets.append((start, end, [name]))
        return buckets
