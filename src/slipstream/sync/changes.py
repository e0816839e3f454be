"""Changed elements between two versions of a parameter, found and coded on the parameter's device.

Elements are compared and coded as words: their bits as integers of the same size. The indices of changed words are
coded as gaps in bytes, the words as differences. A change of one unit in the last place, the usual one at a small
learning rate, is a difference of 1 or -1, so both streams compress well. The coding is exact.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from slipstream.errors import InvalidInput
from slipstream.sync.checksum import WORDS

DENSE = 0.4  # share of changed elements from which a parameter is sent whole without coding its changes
ESCAPE = 255  # in a stream of bytes: continued in the next byte (gaps), or listed after the stream (differences)
HEADER = struct.Struct("<III")  # bytes of the gaps, number of differences, number of those that are listed
MASK = 2**64 - 1


class RolledBack(InvalidInput):
    """A swap failed, and the engine serves the version that it served before."""


@dataclass(frozen=True)
class Changes:
    """Differences of words at ascending flat `indices` of a parameter, as int64 tensors on one device."""

    indices: Tensor
    differences: Tensor

    @classmethod
    def none(cls, device: torch.device) -> Changes:
        """No changes."""
        return cls(*(torch.empty(0, dtype=torch.int64, device=device) for _ in range(2)))

    def within(self, shape: tuple[int, ...], index: tuple[slice, ...]) -> Changes:
        """The changes in `parameter[index]`, which slices at most the first two dimensions of a parameter of `shape`.

        Indices of the result are flat indices of this part.
        """
        if not index:
            return self
        row = columns_of(shape)
        first, last, _ = index[0].indices(shape[0])
        begin, end = torch.searchsorted(self.indices, self.indices.new_tensor([first * row, last * row])).tolist()
        indices, differences = self.indices[begin:end] - first * row, self.differences[begin:end]
        if len(index) == 1:
            return Changes(indices, differences)
        inner = row // shape[1]  # elements of one column
        low, high, _ = (inner * bound for bound in index[1].indices(shape[1]))
        rows, columns = indices // row, indices % row
        kept = (columns >= low) & (columns < high)
        return Changes((rows * (high - low) + columns - low)[kept], differences[kept])

    def checksum(self, columns: int, start: tuple[int, int] = (0, 0)) -> int:
        """By how much these changes raise `checksum` of a part with `columns` columns that starts at this row and
        column of the parameter.

        Differences must be those of signed words, as `find_changes` returns them.
        """
        rows, cols = self.indices // columns + start[0], self.indices % columns + start[1]
        return int((self.differences * (2 * rows + 1) * (2 * cols + 1)).sum().item()) & MASK


@dataclass(frozen=True)
class Update:
    """New words of a tensor and the old ones, at the indices of `changes`, or all of them (None)."""

    changes: Changes | None
    old: Tensor
    new: Tensor

    @classmethod
    def of(cls, tensor: Tensor, changes: Changes) -> Update:
        """The update of `tensor` by `changes`."""
        old = words(tensor)[changes.indices]
        return cls(changes, old, (old.long() + changes.differences).to(old.dtype))

    @classmethod
    def replacing(cls, tensor: Tensor, new: Tensor) -> Update:
        """The update of all elements of `tensor`."""
        return cls(None, words(tensor).clone(), words(new))

    def apply(self, tensor: Tensor) -> None:
        self._write(tensor, self.new)

    def undo(self, tensor: Tensor) -> None:
        self._write(tensor, self.old)

    def is_applied(self, tensor: Tensor) -> Tensor:
        """Whether `tensor` has the new words, as a tensor of one boolean, so that a device need not be waited for."""
        return (self._read(tensor) == self.new).all()

    def is_undone(self, tensor: Tensor) -> Tensor:
        return (self._read(tensor) == self.old).all()

    def _read(self, tensor: Tensor) -> Tensor:
        return words(tensor)[self.changes.indices] if self.changes else words(tensor)

    def _write(self, tensor: Tensor, values: Tensor) -> None:
        if self.changes is None:
            words(tensor).copy_(values)
        elif len(values):
            words(tensor)[self.changes.indices] = values


def apply_all(updates: Sequence[tuple[Tensor, Update]]) -> None:
    """Apply updates to tensors and read the words back. Undoes all and raises `RolledBack` if any differs."""
    for tensor, update in updates:
        update.apply(tensor)
    if updates and not torch.stack([update.is_applied(tensor) for tensor, update in updates]).all():
        for tensor, update in updates:
            update.undo(tensor)
        raise RolledBack("a tensor had other values after the swap than were sent; it has the old ones again")


def words(tensor: Tensor) -> Tensor:
    """The bits of a contiguous tensor as a flat view of signed integers. Raises `RuntimeError` if not contiguous."""
    return tensor.detach().view(-1).view(WORDS[tensor.element_size()])


def columns_of(shape: tuple[int, ...] | list[int]) -> int:
    """Columns of a parameter as `checksum` counts them: elements of a row, 1 for a vector."""
    return prod(shape[1:])


def find_changes(old: Tensor, new: Tensor) -> Changes | None:
    """Changes between two flat tensors of words; None if so many changed that the whole parameter is smaller."""
    indices = (old != new).nonzero().flatten()
    if len(indices) > DENSE * len(new):
        return None
    return Changes(indices, new[indices].long() - old[indices].long())


def encode(changes: Changes, size: int) -> bytes:
    """The changes as bytes, for words of `size` bytes."""
    gaps = torch.diff(changes.indices, prepend=changes.indices.new_full((1,), -1)) - 1
    continued = gaps // ESCAPE
    ends = (continued + 1).cumsum(0) - 1
    stream = torch.full((int(ends[-1]) + 1 if len(ends) else 0,), ESCAPE, dtype=torch.uint8, device=gaps.device)
    stream[ends] = (gaps % ESCAPE).to(torch.uint8)
    folded = 2 * changes.differences.abs() - (changes.differences > 0).long()  # 1, -1, 2, -2 as 1, 2, 3, 4
    small = folded.clamp(max=ESCAPE).to(torch.uint8)
    listed = changes.differences[folded >= ESCAPE]
    listed = listed.to(torch.int32 if size == 2 else torch.int64)  # of signed words: one bit more than a word
    header = HEADER.pack(len(stream), len(folded), len(listed))
    return header + b"".join(_to_bytes(part) for part in (stream, small, listed))


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
    """Consecutive changes of a parameter as one. Differences that cancel stay, as zeros."""
    if len(chain) == 1:
        return chain[0]
    indices, places = torch.unique(torch.cat([c.indices for c in chain]), return_inverse=True)
    sums = torch.zeros_like(indices).index_add_(0, places, torch.cat([c.differences for c in chain]))
    return Changes(indices, sums)


def _to_bytes(tensor: Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()


def _from_bytes(data: memoryview, dtype: torch.dtype, device: torch.device) -> Tensor:
    if not len(data):
        return torch.empty(0, dtype=dtype, device=device)
    return torch.frombuffer(bytearray(data), dtype=dtype).to(device)
