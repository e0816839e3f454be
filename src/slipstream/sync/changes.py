"""Changed elements between two versions of a parameter, found and coded on the parameter's device.

Elements are compared and coded as words: their bits as integers of the same size. The indices of changed words are
coded as gaps in bytes, the words as differences. A change of one unit in the last place, the usual one at a small
learning rate, is a difference of 1 or -1, so both streams compress well. The coding is exact.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.errors import InvalidInput
from slipstream.sync.checksum import WORDS

DENSE = 0.4  # share of changed elements from which a parameter is sent whole without coding its changes
ESCAPE = 255  # in a stream of bytes: continued in the next byte (gaps), or listed after the stream (differences)
HEADER = struct.Struct("<QQQ")  # bytes of the gaps, number of differences, number of listed differences
PIECE = 2**18  # words
Index = tuple[slice, ...]


class RolledBack(InvalidInput):
    """A swap failed, and the engine serves the version that it served before."""


@dataclass(frozen=True, slots=True)
class Changes:
    """Differences of words at ascending `indices` of an `ElementSpace`, as int64 tensors on one device."""

    indices: Tensor
    differences: Tensor

    def without(self, part: slice) -> Changes:
        """The changes outside of these elements."""
        kept = (self.indices < part.start) | (self.indices >= part.stop)
        return Changes(self.indices[kept], self.differences[kept])

    def only(self, part: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The changes of these elements, numbered from 0, with differences as words."""
        kept = (self.indices >= part.start) & (self.indices < part.stop)
        return self.indices[kept] - part.start, self.differences[kept].to(dtype)

    @classmethod
    def join(cls, parts: Sequence[Changes], device: torch.device) -> Changes:
        """Changes of disjoint ascending ranges as one."""
        empty = torch.empty(0, dtype=torch.int64, device=device)
        indices, differences = ([*(getattr(part, name) for part in parts), empty] for name in cls.__slots__)
        return cls(torch.cat(indices), torch.cat(differences))


class ElementSpace:
    """Numbers the elements of parameters of these shapes, one parameter after the other.

    With `shards`, it numbers the elements of these parts of the parameters: slices of at most the first two dimensions.
    All work is done by a few operations on all parameters together: an engine that decodes in another thread would
    delay each operation.
    """

    def __init__(
        self, shapes: Mapping[str, Sequence[int]], device: torch.device, shards: Mapping[str, Index] | None = None
    ) -> None:
        self.names, self.device = list(shapes), device
        bounds = [_bounds(shapes[name], (shards or {}).get(name, ())) for name in self.names]
        self.starts = [0, *accumulate((r1 - r0) * (c1 - c0) for r0, r1, c0, c1 in bounds)]
        table = [[start, *bound] for start, bound in zip(self.starts, bounds, strict=False)]
        self._table = torch.tensor(table, device=device).T.contiguous()

    def counts(self, indices: Tensor) -> Tensor:
        """How many of these ascending elements each parameter has."""
        return torch.searchsorted(indices, torch.tensor(self.starts, device=self.device)).diff()

    def of(self, name: str) -> slice:
        """The numbers of a parameter's elements."""
        number = self.names.index(name)
        return slice(self.starts[number], self.starts[number + 1])

    def spread(self, counts: Tensor) -> list[Tensor]:
        """First number, rows and columns (first and end) of the parameter of each of so many elements of each."""
        return [values.repeat_interleave(counts) for values in self._table]

    def place(self, indices: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Row and column of each element in its whole parameter, as `checksum` counts them."""
        start, r0, _, c0, c1 = self.spread(counts)
        local, width = indices - start, c1 - c0
        rows = local // width
        return rows + r0, local - rows * width + c0

    def within(self, changes: Changes, whole: ElementSpace) -> Changes:
        """Those changes of the parameters `whole` that fall into these shards, numbered as in this space."""
        if torch.equal(self._table, whole._table):
            return changes
        counts = whole.counts(changes.indices)
        rows, columns = whole.place(changes.indices, counts)
        start, r0, r1, c0, c1 = self.spread(counts)
        kept = (rows >= r0) & (rows < r1) & (columns >= c0) & (columns < c1)
        return Changes((start + (rows - r0) * (c1 - c0) + columns - c0)[kept], changes.differences[kept])

    def checksum_changes(self, changes: Changes) -> list[int]:
        """By how much the changes raise the `checksum` of each parameter or shard, modulo 2^64."""
        counts = self.counts(changes.indices)
        rows, columns = self.place(changes.indices, counts)
        raised = _weighted(changes.differences, rows, columns).cumsum(0)
        totals = torch.cat([raised.new_zeros(1), raised])[torch.cat([counts.new_zeros(1), counts.cumsum(0)])]
        return [value % 2**64 for value in totals.diff().tolist()]


class Update:
    """Changes of tensors, with the words before and after, which are read when the update is made.

    `tensors` are flat words in the order of `space`; `whole` has new words of tensors that change as a whole.
    """

    def __init__(
        self, space: ElementSpace, tensors: Sequence[Tensor], changes: Changes, whole: Mapping[int, Tensor]
    ) -> None:
        counts = space.counts(changes.indices)
        local = changes.indices - space.spread(counts)[0]
        piece = PIECE // 4 if space.device.type == "cpu" else len(local) + 1  # read back from the cache
        self._places = [
            (tensors[i], part)
            for i, parts in enumerate(_split(local, counts.tolist()))
            for part in parts.split(piece)  # type: ignore[no-untyped-call]
            if len(part)
        ]
        read = [tensor[part] for tensor, part in self._places]
        old = torch.cat(read) if read else torch.empty(0, dtype=torch.int16)
        new = (old.long() + changes.differences).to(old.dtype) if read else old
        sizes = [len(part) for _, part in self._places]
        self._old, self._new = _split(old, sizes), _split(new, sizes)
        self._whole = [(tensors[i], tensors[i].clone(), words) for i, words in whole.items()]

    def apply(self) -> None:
        """Write the new words. Reads them back, and if any differs, writes the old ones and raises `RolledBack`."""
        if not self._write(self._new) or not all(torch.equal(t.copy_(new), new) for t, _, new in self._whole):
            self._write(self._old)
            for tensor, old, _ in self._whole:
                tensor.copy_(old)
            raise RolledBack("a tensor had other values after the swap than were sent; it has the old ones again")

    def _write(self, parts: Sequence[Tensor]) -> bool:
        """Write words to their places. Returns whether they are there afterwards."""
        same = []
        for (tensor, part), values in zip(self._places, parts, strict=True):
            tensor[part] = values
            same.append((tensor[part] == values).all())
        return not same or bool(torch.stack(same).all())


def _split(tensor: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    parts: Sequence[Tensor] = tensor.split(sizes)  # type: ignore[no-untyped-call]
    return parts


def words(tensor: Tensor) -> Tensor:
    """The bits of a contiguous tensor as a flat view of signed integers. Raises `RuntimeError` if not contiguous."""
    return tensor.detach().view(-1).view(WORDS[tensor.element_size()])


def _bounds(shape: Sequence[int], index: Index) -> tuple[int, int, int, int]:
    """First row, end of rows, first column and end of columns of a part of a parameter.

    Rows are of the first dimension; all others are columns. A vector has one column.
    """
    inner = prod(shape[2:])
    row, column = (*index, *(slice(None),) * (2 - len(index)))
    low, high, _ = column.indices(shape[1]) if len(shape) > 1 else (0, 1, 1)
    return (*row.indices(shape[0])[:2], low * inner, high * inner)


def find_changes(old: Tensor, new: Tensor) -> Changes | None:
    """Changes between two flat tensors of words; None if so many changed that the new words are smaller."""
    if old.device.type == "cpu":
        found = _find_on_cpu(old.numpy(), new.numpy())
    else:
        indices = (old != new).nonzero().flatten()
        found = Changes(indices, new[indices].long() - old[indices].long())
    return found if len(found.indices) <= DENSE * len(new) else None


def _find_on_cpu(old: Any, new: Any) -> Changes:
    """As `find_changes`, for NumPy arrays and in pieces that fit the cache: three times as fast as by tensors."""
    indices, differences = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for at in range(0, len(old), PIECE):
        before, after = old[at : at + PIECE], new[at : at + PIECE]
        places = np.flatnonzero(before != after)
        indices.append(places + at)
        differences.append(after[places].astype(np.int64) - before[places])
    return Changes(torch.from_numpy(np.concatenate(indices)), torch.from_numpy(np.concatenate(differences)))


def checksum_change(changes: Changes, columns: int) -> Tensor:
    """By how much changes of a parameter with so many columns raise its `checksum`, as a tensor of one int64."""
    rows, places = changes.indices // columns, changes.indices % columns
    return _weighted(changes.differences, rows, places).sum()


def _weighted(differences: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Differences of words times the factors of their row and column in `checksum`."""
    return differences * (2 * rows + 1) * (2 * columns + 1)


def encode(changes: Changes, size: int) -> bytes:
    """The changes as bytes, for words of `size` bytes."""
    gaps = torch.diff(changes.indices, prepend=changes.indices.new_full((1,), -1)) - 1
    if len(gaps) and int(changes.indices[-1]) < 2**31:
        gaps = gaps.int()  # twice as fast
    continued = gaps // ESCAPE
    ends = (continued + 1).cumsum(0) - 1
    stream = torch.full((int(ends[-1]) + 1 if len(ends) else 0,), ESCAPE, dtype=torch.uint8, device=gaps.device)
    stream[ends] = (gaps % ESCAPE).to(torch.uint8)
    differences = changes.differences.to(torch.int32 if size == 2 else torch.int64)  # one bit more than a word
    folded = 2 * differences.abs() - (differences > 0).to(differences.dtype)  # 1, -1, 2, -2 as 1, 2, 3, 4
    small = folded.clamp(max=ESCAPE).to(torch.uint8)
    listed = differences[folded >= ESCAPE]
    header = HEADER.pack(len(stream), len(folded), len(listed))
    return header + b"".join(to_bytes(part) for part in (stream, small, listed))


def decode(data: bytes | bytearray, size: int, device: torch.device) -> Changes:
    """The inverse of `encode`. Raises `ValueError` if the lengths in `data` contradict each other."""
    view = memoryview(data)
    if len(view) < HEADER.size:
        raise ValueError("changes without a header")
    gaps, count, many = HEADER.unpack(view[: HEADER.size])
    kind, width = (torch.int32, 4) if size == 2 else (torch.int64, 8)
    first, second = HEADER.size + gaps, HEADER.size + gaps + count
    if second + many * width != len(view):
        raise ValueError("changes of another length than their header says")
    stream = _from_bytes(view[HEADER.size : first], torch.uint8, device)
    ends = (stream < ESCAPE).nonzero().flatten()
    if len(ends) != count:
        raise ValueError(f"{len(ends)} indices for {count} differences")
    indices = stream.long().cumsum(0)[ends] + torch.arange(count, device=device)
    folded = _from_bytes(view[first:second], torch.uint8, device).long()
    differences = torch.where(folded % 2 == 1, (folded + 1) // 2, -(folded // 2))
    listed = _from_bytes(view[second:], kind, device).long()
    escaped = folded == ESCAPE
    if int(escaped.sum()) != many:
        raise ValueError("another number of listed differences than the header says")
    differences[escaped] = listed
    return Changes(indices, differences)


def merge(chain: list[Changes]) -> Changes:
    """Consecutive changes of the same elements as one. Differences that cancel stay, as zeros."""
    if len(chain) == 1:
        return chain[0]
    indices, places = torch.unique(torch.cat([c.indices for c in chain]), return_inverse=True)
    sums = torch.zeros_like(indices).index_add_(0, places, torch.cat([c.differences for c in chain]))
    return Changes(indices, sums)


def to_bytes(tensor: Tensor) -> bytes:
    """The bytes of a contiguous tensor."""
    return tensor.cpu().numpy().tobytes()


def _from_bytes(data: memoryview, dtype: torch.dtype, device: torch.device) -> Tensor:
    if not len(data):
        return torch.empty(0, dtype=dtype, device=device)
    return torch.frombuffer(bytearray(data), dtype=dtype).to(device)
