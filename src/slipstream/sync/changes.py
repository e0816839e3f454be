"""Changed elements between two versions of a parameter: found, coded, decoded and applied on the devices that hold it.

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
from slipstream.sync import arrays
from slipstream.sync.arrays import Array
from slipstream.sync.checksum import WORDS, checksum

if TYPE_CHECKING:
    from slipstream.sync.link import ParameterShard

DENSE = 0.4  # share of changed elements from which a block is sent whole without coding its changes
PIECE = 2**18  # words that are compared at a time: they fit the cache
LOW = {0: None, 8: np.uint8, 16: np.uint16}  # low bits of an index, and their type
HEADER = struct.Struct("<IQQIIBB")
WHOLE = 255  # in place of the low bits


class RolledBack(InvalidInput):
    """A swap failed, and the engine serves the version that it served before."""


class Changes(NamedTuple):
    """Ascending `indices` in a block as int32, and `differences` of words there, maybe wrapped to words."""

    indices: Array
    differences: Array

    def on_host(self) -> Changes:
        """The same as NumPy's arrays."""
        return Changes(*(a if isinstance(a, np.ndarray) else a.cpu().numpy() for a in self))


class Coding(NamedTuple):
    """How changes are coded: `low` bits of indices as they are, `width` and `listed` as in `Entry`; `size` in bytes."""

    low: int
    width: int
    listed: int
    size: int


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

    def pieces(self, length: int) -> int:
        """Entries of a block of `length` words that is sent whole."""
        return -(-(length // max(self.columns, 1)) // self.piece)

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
    before, after = arrays.as_array(old), arrays.as_array(new)
    most, wide = DENSE * len(new), "i4" if new.element_size() == 2 else "i8"
    if isinstance(before, Tensor):
        places = arrays.places_of(before != after)
        if len(places) > most:
            return None
        return Changes(places.int(), arrays.cast(after[places], wide) - before[places])
    parts, count = [Changes(np.empty(0, np.int32), np.empty(0, wide))], 0
    for at in range(0, len(before), PIECE):
        one, other = before[at : at + PIECE], after[at : at + PIECE]
        places = arrays.few_places(one != other)
        count += len(places)
        if count > most:
            return None
        parts.append(Changes(arrays.cast(places + at, "i4"), arrays.cast(other[places], wide) - one[places]))
    return Changes(*(np.concatenate(part) for part in zip(*parts, strict=True)))


def factors(indices: Array, columns: int, row: int = 0, column: int = 0) -> Array:
    """Factors in `checksum` of the words at these int64 indices of a part, which begins at `row` and `column`."""
    rows = indices // columns
    return (2 * (rows + row) + 1) * (2 * (indices - rows * columns + column) + 1)


def raised(changes: Changes, columns: int, row: int) -> Array:
    """By how much the changes of a block from `row` on raise the `checksum` of its parameter. They are not wrapped."""
    return (factors(arrays.cast(changes.indices, "i8"), columns, row) * changes.differences).sum()


def count_small(changes: Changes) -> tuple[Array, Array]:
    """The numbers of differences that are 1 or -1, and of those that fit a byte."""
    amounts = abs(changes.differences)
    return (amounts == 1).sum(), (amounts < 128).sum()


def choose_coding(length: int, count: int, small: Sequence[int], size: int) -> Coding:
    """The smallest coding of `count` changes in `length` words of `size` bytes, by the numbers of `count_small`."""
    low = min(LOW, key=lambda bits: count * bits + (length >> bits))
    fits = {0: small[0], 1: small[1], size: count}
    costs = {width: -(-count * (8 * width or 1) // 8) + (count - fit) * (4 + size) for width, fit in fits.items()}
    width = min(costs, key=lambda w: costs[w])
    unary = -(-((length >> low) + count) // 8)
    return Coding(low, width, count - fits[width], unary + count * low // 8 + costs[width])


def encode(parameter: int, row: int, length: int, changes: Changes, size: int) -> bytes:
    """An entry with the changes of a block of `length` words of `size` bytes."""
    indices, differences = changes
    count = len(indices)
    low, width, _, length_coded = choose_coding(length, count, arrays.to_ints(count_small(changes)), size)
    amounts = abs(differences)
    listed = arrays.places_of(~((amounts == 1) if not width else (amounts < 128) | (width == size)))
    parts = [
        arrays.pack_bits(arrays.cast(indices >> low, "i8") + arrays.counting(indices), (length >> low) + count),
        arrays.cast(indices, f"i{low // 8}") if low else indices[:0],
        arrays.cast(differences, f"i{width}") if width else arrays.pack_bits(arrays.places_of(differences > 0), count),
        arrays.cast(listed, "i4"),
        arrays.cast(differences[listed], f"i{size}"),
    ]
    data = arrays.join_bytes(parts)
    assert len(data) == length_coded
    return HEADER.pack(parameter, row, len(data), count, len(listed), low, width) + data


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


def decode(entry: Entry, data: memoryview, length: int, like: Array) -> Changes:
    """The changes of a block of `length` words of the kind of `like`, where it is.

    Raises `ValueError` if `data` contradicts itself.
    """
    size = like.itemsize
    if entry.low not in LOW or entry.width not in (0, 1, size):
        raise ValueError("changes in an unknown coding")
    bits = (length >> entry.low) + entry.number
    types = ("u1", f"<u{entry.low // 8 or 1}", f"<i{entry.width}" if entry.width else "u1", "<u4", f"<i{size}")
    counts = (-(-bits // 8), entry.number * (entry.low > 0), entry.number if entry.width else -(-entry.number // 8),
              entry.listed, entry.listed)  # fmt: skip
    if sum(np.dtype(kind).itemsize * count for kind, count in zip(types, counts, strict=True)) != len(data):
        raise ValueError("changes of another length than their header says")
    parts, at = [], 0
    for kind, count in zip(types, counts, strict=True):
        parts.append(np.frombuffer(data, kind, count, at))
        at += parts[-1].nbytes
    if (parts[3] >= entry.number).any():
        raise ValueError("a difference of a change that does not exist")
    unary, lows, small, listed, values = (
        arrays.like(like, p if p.itemsize < 2 or p.dtype.kind == "i" else p.astype("i8")) for p in parts
    )
    high = arrays.places_of(arrays.unpack_bits(unary, bits))
    if len(high) != entry.number:
        raise ValueError(f"{len(high)} indices for {entry.number} differences")
    indices = arrays.cast(high - arrays.counting(high), "i4") << entry.low
    if entry.low:
        indices |= arrays.cast(lows, "i4")
    if bool((indices >= length).any()) or bool((indices[1:] <= indices[:-1]).any()):
        raise ValueError("a change of an element that the block does not have")
    differences = arrays.cast(small if entry.width else arrays.unpack_bits(small, entry.number), f"i{size}")
    differences = differences if entry.width else 2 * differences - 1
    differences[listed] = values
    return Changes(indices, differences)


def merge(first: Changes, second: Changes) -> Changes:
    """Consecutive wrapped changes of a block as one. Differences that cancel stay, as zeros."""
    both = [first.indices, second.indices], [first.differences, second.differences]
    if isinstance(first.indices, Tensor):
        indices, places = torch.unique(torch.cat(both[0]), return_inverse=True)
        differences = torch.zeros(len(indices), dtype=second.differences.dtype, device=indices.device)
        return Changes(indices, differences.index_add_(0, places, torch.cat(both[1])))
    unique, inverse = np.unique(np.concatenate(both[0]), return_inverse=True)
    summed = np.zeros(len(unique), second.differences.dtype)
    np.add.at(summed, inverse, np.concatenate(both[1]))
    return Changes(unique, summed)


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
        first, last = arrays.search(changes.indices, [(low - row) * width, (high - row) * width])
        indices, differences = changes.indices[first:last] - (low - row) * width, changes.differences[first:last]
        if self.columns == width:
            return Changes(indices, differences)
        rows = indices // width
        columns = indices - rows * width - self.column
        kept = (columns >= 0) & (columns < self.columns)
        return Changes((rows * self.columns + columns)[kept], differences[kept])


class _Changed:
    """Changed words of a block, before and after: with words of 2 bytes 8 bytes per element, 12 on a GPU."""

    def __init__(self, part: Part, low: int, high: int, changes: Changes) -> None:
        self._served = arrays.as_array(part.words_of(low, high))
        # A GPU's 64-bit indices need no conversion in the swap.
        self._indices = changes.indices if isinstance(self._served, np.ndarray) else changes.indices.long()
        self._old = self._served[self._indices]
        self._new = self._old + changes.differences
        weights = factors(arrays.cast(self._indices, "i8"), part.columns, low, part.column)
        self.raised = ((arrays.cast(self._new, "i8") - self._old) * weights).sum()

    def changes(self) -> Changes:
        return Changes(arrays.cast(self._indices, "i4"), self._new - self._old)

    def swap(self) -> tuple[Array, Array]:
        """Write the new words. Returns what the tensor has then, and what it should have."""
        self._served[self._indices] = self._new
        return self._served[self._indices], self._new

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
        new, indices = arrays.as_array(self._new), changes.indices
        old, weights = (
            new[indices],
            factors(arrays.cast(indices, "i8"), self._part.columns, self._low, self._part.column),
        )
        new[indices] = old + changes.differences
        self.raised += int(((arrays.cast(new[indices], "i8") - old) * weights).sum())

    def swap(self) -> tuple[Array, Array]:
        """Exchange old and new words. Returns as `_Changed.swap`."""
        old, new = self._served.clone(), self._new
        self._served.copy_(new)
        self._new = old
        return arrays.as_array(self._served), arrays.as_array(new)

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
            if entry.low == WHOLE and entry.row + entry.number > stop:
                raise ValueError("an entry with more rows than its block")
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
        changes = part.within(decode(entry, data, length, arrays.as_array(part.words)), key[1], low, high)
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
        pairs = [staged.swap() for staged in self._staged.values()]
        if pairs and isinstance(pairs[0][0], Tensor):  # one comparison, since each operation on a GPU takes some us
            has, expected = map(torch.cat, zip(*pairs, strict=True))
            self._same = (has == expected).all()
        else:
            self._same = all((has == expected).all() for has, expected in pairs)

    def confirm(self) -> None:
        """Wait for the comparison. If a word differs, write the old ones and raise `RolledBack`."""
        if not bool(self._same):
            for staged in self._staged.values():
                staged.undo()
            raise RolledBack("a tensor had other values after the swap than were sent; it has the old ones again")
