"""Changed elements between two versions of a parameter: found on its device, coded on the host, applied by an engine.

A parameter is a matrix of words, the bits of its elements as integers of the same size: rows are of its first
dimension, columns of all others. Blocks of rows are compared and coded in order, each as a separate entry. An
entry has the indices of changed words by Elias and Fano (low bits as they are, high bits in unary), and differences, of
one bit each if they are 1 or -1 as usual at a small learning rate; or it has all words of some rows.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from slipstream.errors import InvalidInput
from slipstream.sync.checksum import WORDS, checksum

if TYPE_CHECKING:
    from slipstream.sync.link import ParameterShard

DENSE = 0.4  # share of changed elements from which a block is sent whole without coding its changes
PIECE = 2**18  # words that are compared at a time: they fit the cache
LOW = {0: None, 8: np.uint8, 16: np.uint16}  # low bits of an index, and their type
HEADER = struct.Struct("<IQQIIBB")
WHOLE = 255  # in place of the low bits
Array = Any  # NumPy's on a CPU, where it is three times as fast as torch with one thread; else a tensor


class RolledBack(InvalidInput):
    """A swap failed, and the engine serves the version that it served before."""


class Changes(NamedTuple):
    """Ascending `indices` in a block as NumPy's int32, and `differences` of words there, maybe wrapped to words."""

    indices: Any
    differences: Any


class Entry(NamedTuple):
    """Header of an entry: `size` bytes follow. `number` is of changed elements, or of rows if `low` is `WHOLE`.

    `listed` differences don't fit `width` bytes; a width of 0 is a bit.
    """

    parameter: int
    row: int
    size: int
    number: int
    listed: int
    low: int
    width: int


@dataclass(frozen=True, slots=True)
class Matrix:
    """A parameter of `rows` and `columns`. Blocks have `block` rows, and entries of blocks sent whole `piece` rows."""

    rows: int
    columns: int
    block: int
    piece: int

    @classmethod
    def of(cls, shape: Sequence[int], size: int) -> Matrix:
        """The matrix of a parameter, in blocks of at most `size` words or one row."""
        columns = prod(shape[1:])
        return cls(shape[0] if shape else 1, columns, *(max(1, most // max(columns, 1)) for most in (size, PIECE)))

    def blocks(self) -> Iterator[tuple[int, int]]:
        """First row and end of each block."""
        return ((row, min(row + self.block, self.rows)) for row in range(0, self.rows, self.block))

    def encode(self, parameter: int, row: int, block: Array) -> Iterator[bytes]:
        """Entries with all words of a block from `row` on."""
        for at in range(0, len(block) // max(self.columns, 1), self.piece):
            data = block[at * self.columns : (at + self.piece) * self.columns]
            header = HEADER.pack(parameter, row + at, data.nbytes, len(data) // self.columns, 0, WHOLE, 0)
            yield header + data.tobytes()


def words(tensor: Tensor) -> Tensor:
    """The bits of a contiguous tensor as a flat view of signed integers. Raises `RuntimeError` if not contiguous."""
    return tensor.detach().view(-1).view(WORDS[tensor.element_size()])


def find_changes(old: Tensor, new: Tensor) -> Changes | None:
    """Changes between two flat tensors of words; None if so many changed that the new words are smaller."""
    most, wide = DENSE * len(new), torch.int32 if new.element_size() == 2 else torch.int64
    if old.device.type != "cpu":
        indices = (old != new).nonzero().flatten()
        if len(indices) > most:
            return None
        return Changes(indices.int().cpu().numpy(), (new[indices].to(wide) - old[indices]).cpu().numpy())
    before, after, count = old.numpy(), new.numpy(), 0
    parts = [Changes(np.empty(0, np.int32), np.empty(0, (np.int32 if wide == torch.int32 else np.int64)))]
    for at in range(0, len(before), PIECE):
        one, other = before[at : at + PIECE], after[at : at + PIECE]
        places = _true_places(one != other)
        count += len(places)
        if count > most:
            return None
        parts.append(
            Changes((places + at).astype(np.int32), other[places].astype(parts[0].differences.dtype) - one[places])
        )
    return Changes(*(np.concatenate(part) for part in zip(*parts, strict=True)))


def _true_places(mask: Array) -> Array:
    """As `np.flatnonzero`, faster if few are true: it looks at eight at a time."""
    if len(mask) % 8:
        return np.flatnonzero(mask)
    eights = mask.view(np.uint64)
    some = np.flatnonzero(eights != 0)
    places = np.flatnonzero(eights[some].view(np.bool_))
    return (some[places >> 3] << 3) + (places & 7)


def factors(indices: Array, columns: int, row: int = 0, column: int = 0) -> Array:
    """Factors in `checksum` of the words at these int64 indices of a part, which begins at `row` and `column`."""
    rows = indices // columns
    return (2 * (rows + row) + 1) * (2 * (indices - rows * columns + column) + 1)


def raised(changes: Changes, columns: int, row: int) -> int:
    """By how much the changes of a block from `row` on raise the `checksum` of its parameter. They are not wrapped."""
    return int(np.dot(factors(changes.indices.astype(np.int64), columns, row), changes.differences.astype(np.int64)))


def encode(parameter: int, row: int, length: int, changes: Changes, size: int) -> bytes:
    """An entry with the changes of a block of `length` words of `size` bytes."""
    indices, differences = changes
    count, amounts, word = len(indices), np.abs(differences), f"<i{size}"
    low = min(LOW, key=lambda bits: count * bits + (length >> bits))
    unary = np.zeros((length >> low) + count, np.uint8)
    unary[(indices >> low) + np.arange(count)] = 1
    fits = {0: amounts == 1, 1: amounts < 128, size: np.ones(count, np.bool_)}
    costs = {w: count * (w or 1 / 8) + (count - np.count_nonzero(fit)) * (4 + size) for w, fit in fits.items()}
    width = min(costs, key=lambda w: costs[w])
    listed = np.flatnonzero(~fits[width])
    parts = [
        np.packbits(unary),
        indices.astype(LOW[low]) if low else unary[:0],
        differences.astype(f"<i{width}") if width else np.packbits(differences > 0),
        listed.astype("<u4"),
        differences[listed].astype(word),
    ]
    header = HEADER.pack(parameter, row, sum(part.nbytes for part in parts), count, len(listed), low, width)
    return b"".join([header, *(part.tobytes() for part in parts)])


def entries(frame: memoryview) -> Iterator[tuple[Entry, memoryview]]:
    """The entries of a frame: header and data. Raises `ValueError` if they don't fill it."""
    at = 0
    while at < len(frame):
        if len(frame) - at < HEADER.size:
            raise ValueError("a frame that ends in a header")
        entry, at = Entry(*HEADER.unpack_from(frame, at)), at + HEADER.size
        if entry.size > len(frame) - at:
            raise ValueError("a frame that ends in an entry")
        yield entry, frame[at : at + entry.size]
        at += entry.size


def decode(entry: Entry, data: memoryview, length: int, size: int) -> Changes:
    """The changes of a block of `length` words of `size` bytes. Raises `ValueError` if `data` contradicts itself."""
    if entry.low not in LOW or entry.width not in (0, 1, size):
        raise ValueError("changes in an unknown coding")
    bits = (length >> entry.low) + entry.number
    types = ("u1", f"<u{entry.low // 8 or 1}", f"<i{entry.width or 1}", "<u4", f"<i{size}")
    counts = (-(-bits // 8), entry.number * (entry.low > 0), entry.number if entry.width else -(-entry.number // 8),
              entry.listed, entry.listed)  # fmt: skip
    if sum(np.dtype(kind).itemsize * count for kind, count in zip(types, counts, strict=True)) != len(data):
        raise ValueError("changes of another length than their header says")
    parts, at = [], 0
    for kind, count in zip(types, counts, strict=True):
        parts.append(np.frombuffer(data, kind, count, at))
        at += parts[-1].nbytes
    unary, lows, small, listed, values = parts
    high = np.flatnonzero(np.unpackbits(unary, count=bits).view(np.bool_))
    if len(high) != entry.number or (listed >= entry.number).any():
        raise ValueError(f"{len(high)} indices for {entry.number} differences")
    indices = (high - np.arange(entry.number)).astype(np.int32) << entry.low
    if entry.low:
        indices |= lows
    if (indices >= length).any() or (np.diff(indices) <= 0).any():
        raise ValueError("a change of an element that the block does not have")
    if entry.width:
        differences = small.astype(f"<i{size}")
    else:
        differences = 2 * np.unpackbits(small.view(np.uint8), count=entry.number).astype(f"<i{size}") - 1
    differences[listed] = values
    return Changes(indices, differences)


def merge(first: Changes, second: Changes) -> Changes:
    """Consecutive wrapped changes of a block as one. Differences that cancel stay, as zeros."""
    indices, places = np.unique(np.concatenate([first.indices, second.indices]), return_inverse=True)
    differences = np.zeros(len(indices), second.differences.dtype)
    np.add.at(differences, places, np.concatenate([first.differences, second.differences]))
    return Changes(indices, differences)


class Part:
    """The words of an engine's tensor, which holds `rows` and `columns` of a parameter."""

    def __init__(self, shard: ParameterShard, size: int) -> None:
        self.matrix, inner = Matrix.of(shard.shape, size), prod(shard.shape[2:])
        row, column = (*shard.index, *(slice(None),) * (2 - len(shard.index)))[:2]
        self.start, self.stop, _ = row.indices(self.matrix.rows)
        first, last, _ = column.indices(shard.shape[1] if len(shard.shape) > 1 else 1)
        self.column, self.columns = first * inner, (last - first) * inner
        self.words, self.whole = words(shard.tensor), shard.tensor.numel() == prod(shard.shape)

    def rows(self, row: int, stop: int) -> tuple[int, int]:
        """Those of these rows that the tensor holds; first and end are equal if it holds none."""
        low, high = max(row, self.start), min(stop, self.stop)
        return low, max(low, high)

    def words_of(self, low: int, high: int) -> Tensor:
        """The words of rows that the tensor holds, as a flat view."""
        return self.words[(low - self.start) * self.columns : (high - self.start) * self.columns]

    def within(self, changes: Changes, row: int, low: int, high: int) -> Changes:
        """The changes of a block from `row` on that fall into the rows from `low` to `high` of the tensor."""
        width = self.matrix.columns
        first, last = np.searchsorted(changes.indices, [(low - row) * width, (high - row) * width])
        indices, differences = changes.indices[first:last] - (low - row) * width, changes.differences[first:last]
        if self.columns == width:
            return Changes(indices, differences)
        rows = indices // width
        columns = indices - rows * width - self.column
        kept = (columns >= 0) & (columns < self.columns)
        return Changes((rows * self.columns + columns)[kept], differences[kept])


class _Changed:
    """Changed words of a block, before and after: 8 bytes per element with words of 2 bytes."""

    def __init__(self, part: Part, low: int, high: int, changes: Changes) -> None:
        self._served = _array(part.words_of(low, high))
        self._indices = _like(self._served, changes.indices)
        self._old = self._served[self._indices]
        self._new = self._old + _like(self._served, changes.differences)
        weights = factors(_long(self._indices), part.columns, low, part.column)
        self.raised = ((_long(self._new) - _long(self._old)) * weights).sum()

    def changes(self) -> Changes:
        return Changes(
            *(a if isinstance(a, np.ndarray) else a.cpu().numpy() for a in (self._indices, self._new - self._old))
        )

    def swap(self) -> Any:
        """Write the new words. Returns whether the tensor has them, maybe as a tensor that is not computed yet."""
        self._served[self._indices] = self._new
        return (self._served[self._indices] == self._new).all()

    def undo(self) -> None:
        self._served[self._indices] = self._old


class _Replaced:
    """All words of a block."""

    def __init__(self, part: Part, low: int, high: int) -> None:
        self._part, self._low, self._served = part, low, part.words_of(low, high)
        self._new, self.raised = torch.empty_like(self._served), 0

    def write(self, row: int, values: Array, replaces: bool) -> None:
        """Stage rows from `row` on. `replaces`: the checksum of the tensor rises by the difference to the old words."""
        first = (row - self._low) * self._part.columns
        old, new = (tensor[first : first + values.size].view(len(values), -1) for tensor in (self._served, self._new))
        new.copy_(torch.tensor(values))
        at = slice(row, None), slice(self._part.column, None)
        self.raised += checksum(new, at) - (checksum(old, at) if replaces else 0)

    def add(self, changes: Changes) -> None:
        """Change staged words."""
        new = _array(self._new)
        indices = _like(new, changes.indices)
        old, weights = new[indices], factors(_long(indices), self._part.columns, self._low, self._part.column)
        new[indices] = old + _like(new, changes.differences)
        self.raised += int(((_long(new[indices]) - _long(old)) * weights).sum())

    def swap(self) -> Any:
        """Exchange old and new words. Returns as `_Changed.swap`."""
        old = self._served.clone()
        self._served.copy_(self._new)
        same = (self._served == self._new).all()
        self._new.copy_(old)
        return same

    def undo(self) -> None:
        self._served.copy_(self._new)


class Update:
    """A version for the tensors that an engine serves, staged block by block. `fresh`: it brings all weights."""

    def __init__(self, parts: Mapping[str, Part], fresh: bool) -> None:
        self._parts, self._fresh = parts, fresh
        self._numbered = list(parts.values())
        self._staged: dict[tuple[int, int], _Changed | _Replaced] = {}
        self._same: Any = True

    def add(self, frame: memoryview) -> None:
        """Stage the entries of a frame, and of them what the tensors hold. Raises `ValueError` for a wrong one."""
        for entry, data in entries(frame):
            if entry.parameter >= len(self._numbered) or entry.row >= self._numbered[entry.parameter].matrix.rows:
                raise ValueError("an entry of rows that no parameter has")
            part = self._numbered[entry.parameter]
            start = entry.row // part.matrix.block * part.matrix.block
            stop = min(start + part.matrix.block, part.matrix.rows)
            low, high = part.rows(start, stop)
            if low < high:
                stage = self._add_rows if entry.low == WHOLE else self._add_changes
                stage((entry.parameter, start), entry, data, low, high)

    def _add_rows(self, key: tuple[int, int], entry: Entry, data: memoryview, low: int, high: int) -> None:
        part = self._numbered[entry.parameter]
        staged = self._staged.get(key)
        if not isinstance(staged, _Replaced) or entry.row == key[1]:
            staged = self._staged[key] = _Replaced(part, low, high)
        first, last = part.rows(entry.row, entry.row + entry.number)
        values = np.frombuffer(data, f"<i{part.words.element_size()}").reshape(entry.number, part.matrix.columns)
        if first < last:
            values = values[first - entry.row : last - entry.row, part.column : part.column + part.columns]
            staged.write(first, values, not self._fresh)

    def _add_changes(self, key: tuple[int, int], entry: Entry, data: memoryview, low: int, high: int) -> None:
        part = self._numbered[entry.parameter]
        length = (min(key[1] + part.matrix.block, part.matrix.rows) - key[1]) * part.matrix.columns
        changes = part.within(decode(entry, data, length, part.words.element_size()), key[1], low, high)
        staged = self._staged.get(key)
        if isinstance(staged, _Replaced):
            staged.add(changes)
        elif len(changes.indices):
            self._staged[key] = _Changed(part, low, high, merge(staged.changes(), changes) if staged else changes)

    def checksums(self, before: Mapping[str, int]) -> dict[str, int]:
        """The checksum of each tensor with the update, from those before it."""
        sums = [0 if self._fresh else before[name] for name in self._parts]
        for (number, _), staged in self._staged.items():
            sums[number] += int(staged.raised)
        return {name: value % 2**64 for name, value in zip(self._parts, sums, strict=True)}

    def apply(self) -> None:
        """Write the new words, and start to compare what the tensors hold afterwards."""
        same = [staged.swap() for staged in self._staged.values()]
        tensors = [flag for flag in same if isinstance(flag, Tensor)]
        on_host = all(flag for flag in same if not isinstance(flag, Tensor))
        self._same = torch.stack(tensors).all() & on_host if tensors else on_host

    def confirm(self) -> None:
        """Wait for the comparison. If a word differs, write the old ones and raise `RolledBack`."""
        if not bool(self._same):
            for staged in self._staged.values():
                staged.undo()
            raise RolledBack("a tensor had other values after the swap than were sent; it has the old ones again")


def _array(tensor: Tensor) -> Array:
    return tensor.numpy() if tensor.device.type == "cpu" else tensor


def _like(array: Array, values: Any) -> Array:
    """NumPy's values where `array` is."""
    return values if isinstance(array, np.ndarray) else torch.tensor(values, device=array.device)


def _long(array: Array) -> Array:
    return array.astype(np.int64) if isinstance(array, np.ndarray) else array.long()
