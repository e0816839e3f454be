"""Changed elements of a block between two versions: found on its device, coded on the host, applied by an engine.

Blocks of words (`blocks`) are compared and coded in order. An entry has the indices of a block's changed words by Elias
and Fano (low bits as they are, high bits in unary), and differences, of one bit each if they are 1 or -1 as usual at a
small learning rate; or it has all words of some rows of a parameter.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from slipstream.errors import InvalidInput
from slipstream.sync import arrays
from slipstream.sync.arrays import Array
from slipstream.sync.blocks import Block, Segment, factors, matrix_shape, words
from slipstream.sync.checksum import checksum

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
        return Changes(*map(arrays.on_host, self))


class Coding(NamedTuple):
    """How changes are coded: `low` bits of indices as they are, `width` and `listed` as in `Entry`; `size` in bytes."""

    low: int
    width: int
    listed: int
    size: int


class Entry(NamedTuple):
    """Header of an entry: `size` bytes follow. `number` is of changed elements of the block `place`.

    If `low` is `WHOLE` it is of rows of the parameter `place`, from `row` on. `listed` differences don't fit `width`
    bytes; a width of 0 is a bit.
    """

    place: int
    row: int
    size: int
    number: int
    listed: int
    low: int
    width: int


def find_changes(old: Tensor, new: Tensor) -> Changes | None:
    """Changes between two flat tensors of words; None if so many changed that the new words are smaller."""
    before, after = arrays.as_array(old), arrays.as_array(new)
    most, wide = DENSE * len(new), "i4" if new.element_size() == 2 else "i8"
    if isinstance(before, Tensor):
        places = (before != after).nonzero().flatten()
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


def encode(block: int, length: int, changes: Changes, size: int) -> bytes:
    """An entry with the changes of a block of `length` words of `size` bytes, as NumPy's arrays."""
    indices, differences = changes
    count, amounts = len(indices), np.abs(differences)
    low, width, _, expected = choose_coding(length, count, arrays.to_ints(count_small(changes)), size)
    unary = np.zeros((length >> low) + count, np.uint8)
    unary[(indices >> low) + np.arange(count)] = 1
    listed = np.flatnonzero({0: amounts != 1, 1: amounts >= 128, size: np.zeros(count, np.bool_)}[width])
    parts = [
        np.packbits(unary),
        indices.astype(LOW[low]) if low else unary[:0],
        differences.astype(f"<i{width}") if width else np.packbits(differences > 0),
        listed.astype("<u4"),
        differences[listed].astype(f"<i{size}"),
    ]
    data = b"".join(part.tobytes() for part in parts)
    assert len(data) == expected
    return HEADER.pack(block, 0, len(data), count, len(listed), low, width) + data


def encode_rows(segment: Segment, block: Any) -> Iterator[bytes]:
    """Entries with all words of a segment of `block`, an array of NumPy's."""
    rows, step = segment.of(block), rows_per_entry(segment)
    for at in range(0, len(rows), step):
        part = rows[at : at + step]
        yield HEADER.pack(segment.parameter, segment.row + at, part.nbytes, len(part), 0, WHOLE, 0) + part.tobytes()


def rows_per_entry(segment: Segment) -> int:
    return max(1, PIECE // max(segment.columns, 1))


def entries_of(block: Block) -> int:
    """Entries of a block that is sent whole."""
    return sum(-(-(s.stop - s.row) // rows_per_entry(s)) for s in block.segments)


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
    """Two consecutive changes of a block as one, for a receiver that missed a version.

    Differences are wrapped: they add modulo the word size. Those that cancel stay, as zeros.
    """
    indices, places = np.unique(np.concatenate([first.indices, second.indices]), return_inverse=True)
    differences = np.zeros(len(indices), second.differences.dtype)
    np.add.at(differences, places, np.concatenate([first.differences, second.differences]))
    return Changes(indices, differences)


class Part:
    """The words of an engine's tensor, which holds `rows` and `columns` of a parameter."""

    def __init__(self, shard: ParameterShard) -> None:
        inner = prod(shard.shape[2:])
        self.all_rows, self.all_columns = matrix_shape(shard.shape)
        row, column = (*shard.index, *(slice(None),) * (2 - len(shard.index)))[:2]
        self.start, self.stop, _ = row.indices(self.all_rows)
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
        width = self.all_columns
        first, last = np.searchsorted(changes.indices, [(low - row) * width, (high - row) * width])
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
        indices = arrays.like(self._served, changes.indices)
        # A GPU's 64-bit indices need no conversion in the swap.
        self._indices = indices if isinstance(indices, np.ndarray) else indices.long()
        self._old = self._served[self._indices]
        self._new = self._old + arrays.like(self._served, changes.differences)
        weights = factors(arrays.cast(self._indices, "i8"), part.columns, low, part.column)
        self.raised = ((arrays.cast(self._new, "i8") - self._old) * weights).sum()

    def changes(self) -> Changes:
        return Changes(arrays.cast(self._indices, "i4"), self._new - self._old).on_host()

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

    def write(self, row: int, values: Array, subtract_old: bool) -> None:
        """Stage rows from `row` on. The checksum rises by that of the new words, maybe less that of the old ones."""
        first = (row - self._low) * self._part.columns
        old, new = (tensor[first : first + values.size].view(len(values), -1) for tensor in (self._served, self._new))
        new.copy_(torch.tensor(values))
        at = slice(row, None), slice(self._part.column, None)
        self.raised += checksum(new, at) - (checksum(old, at) if subtract_old else 0)

    def add(self, changes: Changes) -> None:
        """Change staged words."""
        new = arrays.as_array(self._new)
        indices = arrays.like(new, changes.indices)
        old, weights = (
            new[indices],
            factors(arrays.cast(indices, "i8"), self._part.columns, self._low, self._part.column),
        )
        new[indices] = old + arrays.like(new, changes.differences)
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
    """A version for the tensors that an engine serves, staged by segments of blocks. `fresh`: it brings all weights."""

    def __init__(self, parts: Mapping[str, Part], blocks: Sequence[Block], fresh: bool) -> None:
        self._parts, self._blocks, self._fresh = parts, blocks, fresh
        self._numbered = list(parts.values())
        self._segments: list[list[Segment]] = [[] for _ in parts]
        for segment in (segment for block in blocks for segment in block.segments):
            self._segments[segment.parameter].append(segment)
        self._staged: dict[Segment, _Changed | _Replaced] = {}
        self._same: Any = True

    def add(self, frame: memoryview) -> None:
        """Stage the entries of a frame, and of them what the tensors hold. Raises `ValueError` for a wrong one."""
        for entry, data in entries(frame):
            (self._add_rows if entry.low == WHOLE else self._add_changes)(entry, data)

    def _add_rows(self, entry: Entry, data: memoryview) -> None:
        if entry.place >= len(self._numbered) or not entry.number:
            raise ValueError("an entry of a parameter that does not exist")
        part = self._numbered[entry.place]
        segments = self._segments[entry.place]
        segment = segments[bisect_right(segments, entry.row, key=lambda segment: segment.row) - 1]
        if entry.row + entry.number > segment.stop:
            raise ValueError("an entry with more rows than its block")
        values = np.frombuffer(data, f"<i{part.words.element_size()}").reshape(entry.number, part.all_columns)
        low, high = part.rows(segment.row, segment.stop)
        first, last = part.rows(entry.row, entry.row + entry.number)
        if first < last:
            staged = self._staged.get(segment)
            if not isinstance(staged, _Replaced) or entry.row == segment.row:
                staged = self._staged[segment] = _Replaced(part, low, high)
            values = values[first - entry.row : last - entry.row, part.column : part.column + part.columns]
            staged.write(first, values, not self._fresh)

    def _add_changes(self, entry: Entry, data: memoryview) -> None:
        if entry.place >= len(self._blocks):
            raise ValueError("an entry of a block that does not exist")
        block = self._blocks[entry.place]
        indices, differences = decode(entry, data, block.length, self._numbered[0].words.element_size())
        ends = np.searchsorted(indices, [s.end for s in block.segments])
        for segment, first, last in zip(block.segments, [0, *ends], ends, strict=False):
            part = self._numbered[segment.parameter]
            low, high = part.rows(segment.row, segment.stop)
            if first < last and low < high:
                changes = Changes(indices[first:last] - segment.start, differences[first:last])
                self._stage(segment, part, low, high, part.within(changes, segment.row, low, high))

    def _stage(self, segment: Segment, part: Part, low: int, high: int, changes: Changes) -> None:
        staged = self._staged.get(segment)
        if isinstance(staged, _Replaced):
            staged.add(changes)
        elif len(changes.indices):
            self._staged[segment] = _Changed(part, low, high, merge(staged.changes(), changes) if staged else changes)

    def checksums(self, before: Mapping[str, int]) -> dict[str, int]:
        """The checksum of each tensor with the update, from those before it."""
        sums = [0 if self._fresh else before[name] for name in self._parts]
        changed = {segment: staged for segment, staged in self._staged.items() if isinstance(staged, _Changed)}
        for segment, rise in zip(changed, arrays.to_ints([s.raised for s in changed.values()]), strict=True):
            sums[segment.parameter] += rise
        for segment, staged in self._staged.items():
            sums[segment.parameter] += staged.raised if isinstance(staged, _Replaced) else 0
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
