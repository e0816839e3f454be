"""A version that an engine receives: changed and whole segments of blocks are staged, then swapped with its tensors.

On a CPU changes are staged by segments. On a GPU, where each operation takes some microseconds whatever its size, they
are staged by blocks: `Tensors.memory` lets one operation read or write words of many tensors.
"""

from __future__ import annotations

import ctypes
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
from slipstream.sync.blocks import Block, Segment, factors, matrix_shape, sums_between, words
from slipstream.sync.changes import WHOLE, Changes, Entry, decode, entries, merge
from slipstream.sync.checksum import checksum

if TYPE_CHECKING:
    from slipstream.sync.link import ParameterShard


SLICE = 2**21  # changes that are staged at a time on a GPU, in 150 bytes each


class RolledBack(InvalidInput):
    """A swap failed, and the engine serves the version that it served before."""


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


class Place(NamedTuple):
    """Where an engine has the words of a segment of a block. Of several segments, arrays with a number per change.

    The segment begins at index `start` of the block, in `row` of a parameter of `columns`. The engine's tensor holds
    its rows from `low` to `high`, and of each `width` columns from `column` on; `offset` is the index of their first
    word in an array of words.
    """

    start: Any
    columns: Any
    row: Any
    low: Any
    high: Any
    column: Any
    width: Any
    offset: Any

    def locate(self, indices: Array, whole: bool) -> tuple[Array, Array, Array | None]:
        """Where words at these indices of the block are, their factors in `checksum`, and whether the tensor has each.

        The first are indices in the array of words. The last is None for `whole` tensors, which have all words.
        """
        local = indices - self.start
        rows = local // self.columns
        columns = local - rows * self.columns
        weights = factors(arrays.cast(rows, "i8") + self.row, arrays.cast(columns, "i8"))
        if whole:
            return local + self.offset, weights, None
        rows, columns = rows + (self.row - self.low), columns - self.column
        held = (rows >= 0) & (rows < self.high - self.low) & (columns >= 0) & (columns < self.width)
        return rows * self.width + columns + self.offset, weights, held


class _Memory:
    """An address range of a GPU, for `torch.as_tensor`."""

    def __init__(self, address: int, length: int, kind: str) -> None:
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (length,), "typestr": kind, "version": 2}


def map_memory(tensors: Sequence[Tensor]) -> tuple[int, Tensor]:
    """The address of the first of these words, and a tensor that reaches from there to the last: a view of both."""
    first = min(tensor.data_ptr() for tensor in tensors)
    size = max(tensor.data_ptr() + tensor.nbytes for tensor in tensors) - first
    kind = f"<i{tensors[0].element_size()}"
    if tensors[0].device.type == "cuda":
        return first, torch.as_tensor(_Memory(first, size // tensors[0].element_size(), kind))
    return first, torch.as_tensor(np.frombuffer(memoryview((ctypes.c_char * size).from_address(first)), kind))


class Tensors:
    """The tensors of an engine by name of their parameter, which a version's `blocks` update.

    On a GPU `memory` is the address range of all of them as words. Other indices than those of their words are
    invalid.
    """

    def __init__(self, parts: Mapping[str, Part], blocks: Sequence[Block]) -> None:
        self.parts, self.numbered, self.blocks = parts, list(parts.values()), blocks
        self.segments: list[list[tuple[Segment, int]]] = [[] for _ in parts]  # by parameter, each with its block
        for number, block in enumerate(blocks):
            for segment in block.segments:
                self.segments[segment.parameter].append((segment, number))
        self.word = self.numbered[0].words.element_size() if parts else 1
        self.device = self.numbered[0].words.device if parts else torch.device("cpu")
        held = [part.words for part in self.numbered if part.words.numel()]
        self.memory: Tensor | None = None
        if held and isinstance(arrays.as_array(held[0]), Tensor):
            self._first, self.memory = map_memory(held)
            self._places = [self._block_places(block, held[0].device) for block in blocks]

    def _block_places(self, block: Block, device: torch.device) -> tuple[Tensor, Tensor, bool]:
        """End of each segment in the block, its `Place` in memory, and whether all of their rows are held whole."""
        places, whole = [], True
        for segment in block.segments:
            part, place = self.numbered[segment.parameter], self.place(segment)
            first = part.words.data_ptr() + (place.low - part.start) * part.columns * self.word
            places.append(place._replace(offset=(first - self._first) // self.word))
            whole &= part.whole
        ends = torch.tensor([segment.end for segment in block.segments], device=device)
        return ends, torch.tensor(places, device=device), whole

    def place(self, segment: Segment) -> Place:
        """Where `words_of` this segment are in the tensor; its `offset` is 0."""
        part = self.numbered[segment.parameter]
        low, high = part.rows(segment.row, segment.stop)
        return Place(segment.start, segment.columns, segment.row, low, high, part.column, part.columns, 0)

    def words_of(self, segment: Segment) -> Tensor:
        """The words of a segment that the tensor holds, as a flat view."""
        place = self.place(segment)
        return self.numbered[segment.parameter].words_of(place.low, place.high)

    def stage(self, number: int, changes: Changes) -> list[_Changed]:
        """Stage changes of a block."""
        block = self.blocks[number]
        if self.memory is None:
            return list(self._stage_segments(block, changes.on_host()))
        slices = range(0, len(changes.indices), SLICE)
        return [self._stage_slice(number, *(part[at : at + SLICE] for part in changes)) for at in slices]

    def _stage_slice(self, number: int, indices: Array, differences: Array) -> _Changed:
        assert self.memory is not None
        ends, places, whole = self._places[number]
        at, by = (torch.as_tensor(array).to(self.memory.device) for array in (indices, differences))
        bounds = torch.searchsorted(at, ends.to(at.dtype))
        counts = torch.diff(bounds, prepend=bounds.new_zeros(1))
        place = Place(*places.repeat_interleave(counts, 0, output_size=len(at)).unbind(1))
        return _Changed(self.memory, self.blocks[number].segments, bounds, place.locate(at.long(), whole), by)

    def _stage_segments(self, block: Block, changes: Changes) -> Iterator[_Changed]:
        for segment, part in split(block, changes):
            served = arrays.as_array(self.words_of(segment))
            if len(part.indices) and len(served):
                located = self.place(segment).locate(part.indices, self.numbered[segment.parameter].whole)
                yield _Changed(served, (segment,), None, located, part.differences)


def split(block: Block, changes: Changes) -> Iterator[tuple[Segment, Changes]]:
    """The changes of each segment, at indices of the block, of NumPy's arrays."""
    for segment, at in block.slices(changes.indices):
        yield segment, Changes(changes.indices[at], changes.differences[at])


class _Changed:
    """Changed words of `segments`, before and after: with words of 2 bytes 12 bytes per element.

    `located` is of `Place.locate`; `bounds` are the numbers of changes up to the end of each segment, if several.
    """

    def __init__(
        self, served: Array, segments: Sequence[Segment], bounds: Tensor | None,
        located: tuple[Array, Array, Array | None], differences: Array,
    ) -> None:  # fmt: skip
        indices, weights, held = located
        if held is not None:
            indices, weights, differences = indices[held], weights[held], differences[held]
            bounds = None if bounds is None else torch.cat([bounds.new_zeros(1), held.cumsum(0)])[bounds]
        # Of 8 bytes: NumPy would convert others in each use, and so lengthen the swap by a third.
        self.segments, self._served, self._indices = segments, served, arrays.cast(indices, "i8")
        self._old = served[self._indices]
        self._new = self._old + differences
        rises = (arrays.cast(self._new, "i8") - self._old) * weights
        self.rises = rises.sum() if bounds is None else sums_between(rises, bounds)  # of the checksum of each segment

    def swap(self) -> tuple[Array, Array]:
        """Write the new words. Returns what the tensors have then, and what they should have."""
        self._served[self._indices] = self._new
        return self._served[self._indices], self._new

    def undo(self) -> None:
        self._served[self._indices] = self._old


class _Replaced:
    """All words of a segment that a tensor holds."""

    def __init__(self, served: Tensor, place: Place) -> None:
        self._served, self._place = served, place
        self._new, self.rise = torch.empty_like(served), 0

    def write(self, row: int, values: Array, subtract_old: bool) -> None:
        """Stage rows from `row` on. The checksum rises by that of the new words, maybe less that of the old ones."""
        first = (row - self._place.low) * self._place.width
        old, new = (tensor[first : first + values.size].view(len(values), -1) for tensor in (self._served, self._new))
        new.copy_(torch.tensor(values))
        at = slice(row, None), slice(self._place.column, None)
        self.rise += checksum(new, at) - (checksum(old, at) if subtract_old else 0)

    def add(self, changes: Changes) -> None:
        """Change staged words, by the changes of the segment."""
        indices, weights, held = self._place.locate(changes.indices, whole=False)
        new = arrays.as_array(self._new)
        at, weights = arrays.like(new, indices[held]), arrays.like(new, weights[held])
        old = new[at]
        new[at] = old + arrays.like(new, changes.differences[held])
        self.rise += int(((arrays.cast(new[at], "i8") - old) * weights).sum())

    def swap(self) -> tuple[Array, Array]:
        """Exchange old and new words. Returns as `_Changed.swap`."""
        old, new = self._served.clone(), self._new
        self._served.copy_(new)
        self._new = old
        return arrays.as_array(self._served), arrays.as_array(new)

    def undo(self) -> None:
        self._served.copy_(self._new)


class Update:
    """A version for the tensors of an engine. `fresh`: it brings all weights; else the changes of `steps` versions."""

    def __init__(self, tensors: Tensors, fresh: bool, steps: int = 1) -> None:
        self._tensors, self._fresh, self._several = tensors, fresh, steps > 1
        self._changed: dict[int, list[_Changed]] = {}  # by block
        self._replaced: dict[Segment, _Replaced] = {}
        self._earlier: dict[int, Changes] = {}  # by block, if a later step may change it again
        self._same: Any = True

    def decode(self, frame: memoryview) -> list[tuple[Entry, memoryview | Changes]]:
        """The entries of a frame, for `add`, with decoded changes. Raises `ValueError` for a wrong one."""
        return [(entry, data if entry.low == WHOLE else self._decode(entry, data)) for entry, data in entries(frame)]

    def _decode(self, entry: Entry, data: memoryview) -> Changes:
        if entry.place >= len(self._tensors.blocks):
            raise ValueError("an entry of a block that does not exist")
        return decode(entry, data, self._tensors.blocks[entry.place].length, self._tensors.word, self._tensors.device)

    def add(self, decoded: Sequence[tuple[Entry, memoryview | Changes]]) -> None:
        """Stage what the tensors hold of these entries. Raises `ValueError` for a wrong one."""
        for entry, data in decoded:
            if isinstance(data, Changes):
                self._add_changes(entry.place, data)
            else:
                self._add_rows(entry, data)

    def _add_rows(self, entry: Entry, data: memoryview) -> None:
        """Stage all words of `entry.number` rows from `entry.row` on, in place of earlier changes of their block."""
        if entry.place >= len(self._tensors.numbered) or not entry.number:
            raise ValueError("an entry of a parameter that does not exist")
        part, segments = self._tensors.numbered[entry.place], self._tensors.segments[entry.place]
        segment, number = segments[bisect_right(segments, entry.row, key=lambda known: known[0].row) - 1]
        if entry.row + entry.number > segment.stop:
            raise ValueError("an entry with more rows than its block")
        values = np.frombuffer(data, f"<i{self._tensors.word}").reshape(entry.number, part.all_columns)
        self._changed.pop(number, None)  # of an earlier step: all of the block is sent
        self._earlier.pop(number, None)
        first, last = part.rows(entry.row, entry.row + entry.number)
        if first < last:
            if segment not in self._replaced or entry.row == segment.row:
                self._replaced[segment] = _Replaced(self._tensors.words_of(segment), self._tensors.place(segment))
            values = values[first - entry.row : last - entry.row, part.column : part.column + part.columns]
            self._replaced[segment].write(first, values, not self._fresh)

    def _add_changes(self, number: int, changes: Changes) -> None:
        block = self._tensors.blocks[number]
        if any(segment in self._replaced for segment in block.segments):
            for segment, part in split(block, changes.on_host()):
                if segment in self._replaced:
                    self._replaced[segment].add(part)
        else:
            if self._several:
                changes = changes.on_host()
                if number in self._earlier:
                    changes = merge(self._earlier[number], changes)
                self._earlier[number] = changes
            self._changed[number] = self._tensors.stage(number, changes)

    def checksums(self, before: Mapping[str, int]) -> dict[str, int]:
        """The checksum of each tensor with the update, from those before it."""
        sums = {name: 0 if self._fresh else before[name] for name in self._tensors.parts}
        changed = [staged for listed in self._changed.values() for staged in listed]
        rises = iter(arrays.to_ints([staged.rises for staged in changed]))
        for segment in (segment for staged in changed for segment in staged.segments):
            sums[segment.name] += next(rises)
        for segment, replaced in self._replaced.items():
            sums[segment.name] += replaced.rise
        return {name: value % 2**64 for name, value in sums.items()}

    def _staged(self) -> Iterator[_Changed | _Replaced]:
        for listed in self._changed.values():
            yield from listed
        yield from self._replaced.values()

    def apply(self) -> None:
        """Write the new words, and start to compare what the tensors hold afterwards."""
        pairs = [staged.swap() for staged in self._staged()]
        if pairs and self._tensors.memory is not None:  # one comparison, since each operation on a GPU takes some us
            has, expected = (torch.cat([*map(torch.as_tensor, side)]) for side in zip(*pairs, strict=True))
            self._same = (has == expected).all()
        else:
            self._same = all((has == expected).all() for has, expected in pairs)

    def confirm(self) -> None:
        """Wait for the comparison. If a word differs, write the old ones and raise `RolledBack`."""
        if not bool(self._same):
            for staged in self._staged():
                staged.undo()
            raise RolledBack("a tensor had other values after the swap than were sent; it has the old ones again")
