"""Changed elements of a block between two versions: found, coded and decoded on its device.

Blocks of words (`blocks`) are compared and coded in order. An entry has the indices of a block's changed words by Elias
and Fano (low bits as they are, high bits in unary), and differences, of one bit each if they are 1 or -1 as usual at a
small learning rate; or it has all words of some rows of a parameter.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from slipstream.sync import arrays
from slipstream.sync.arrays import Array
from slipstream.sync.blocks import Block, Segment

DENSE = 0.4  # share of changed elements from which a block is sent whole without coding its changes
PIECE = 2**18  # words that are compared at a time: they fit the cache
LOW = {0: "u1", 8: "u1", 16: "i2"}  # low bits of an index, and their kind
HEADER = struct.Struct("<IQQIIBB")
WHOLE = 255  # in place of the low bits


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


def copy_changes(old: Tensor, new: Tensor) -> Changes | None:
    """Copy those words of `new` to `old` that differ, both flat tensors of words. Returns the changes.

    Returns None, and leaves `old` as it was, if so many changed that the new words are smaller.
    """
    before, after = arrays.as_array(old), arrays.as_array(new)
    most, wide = DENSE * len(new), "i4" if new.element_size() == 2 else "i8"
    parts, count = [Changes(arrays.cast(before[:0], "i4"), arrays.cast(before[:0], wide))], 0
    piece = len(new) if isinstance(before, Tensor) else PIECE
    for at in range(0, len(new), piece):
        one, other = before[at : at + piece], after[at : at + piece]
        places = arrays.nonzero_sparse(one != other)
        count += len(places)
        if count > most:
            for part in parts:
                before[part.indices] -= part.differences
            return None
        values = other[places]
        parts.append(Changes(arrays.cast(places + at, "i4"), arrays.cast(values, wide) - one[places]))
        one[places] = values
    return Changes(*map(arrays.concatenate, zip(*parts, strict=True)))


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


def encode(block: int, length: int, changes: Changes, size: int, coding: Coding) -> bytes:
    """An entry with the changes of a block of `length` words of `size` bytes."""
    indices, differences = changes
    count, amounts, (low, width, _, expected) = len(indices), abs(differences), coding
    ones = (indices >> low) + arrays.arange(indices, count)
    unary = arrays.zeros(indices, (length >> low) + count)
    unary[ones] = True
    listed = arrays.nonzero({0: amounts != 1, 1: amounts >= 128}.get(width, amounts < 0))
    parts = [
        arrays.pack_bits(unary),
        arrays.cast(indices, LOW[low])[: count if low else 0],
        arrays.cast(differences, f"i{width}") if width else arrays.pack_bits(differences > 0),
        arrays.cast(listed, "i4"),
        arrays.cast(differences[listed], f"i{size}"),
    ]
    data = arrays.to_bytes(parts)
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


def split_entries(data: memoryview) -> tuple[memoryview, memoryview]:
    """The whole entries at the beginning of `data`, and the rest."""
    end = at = 0
    while at <= len(data):
        end = at
        if len(data) - at < HEADER.size:
            break
        at += HEADER.size + Entry(*HEADER.unpack_from(data, at)).size
    return data[:end], data[end:]


def join_entries(pieces: Iterable[memoryview]) -> Iterator[memoryview]:
    """Runs of whole entries from pieces that may begin and end within an entry.

    Raises `ValueError` if the last piece ends within an entry.
    """
    waiting, size, needed = list[memoryview](), 0, HEADER.size  # bytes of `waiting`, and of its first entry
    for piece in pieces:
        waiting.append(piece)
        size += len(piece)
        if size < needed:  # joining at each piece would take quadratic time for a large entry
            continue
        whole, rest = split_entries(waiting[0] if len(waiting) == 1 else memoryview(b"".join(waiting)))
        if whole:
            yield whole
        waiting, size, needed = [rest] if rest else [], len(rest), HEADER.size
        if size >= HEADER.size:
            needed += Entry(*HEADER.unpack_from(rest)).size
    if size:
        raise ValueError("the changes end in an entry")


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


def decode(entry: Entry, data: memoryview, length: int, size: int, device: torch.device) -> Changes:
    """The changes of a block of `length` words of `size` bytes. Raises `ValueError` if `data` contradicts itself."""
    if entry.low not in LOW or entry.width not in (0, 1, size):
        raise ValueError("changes in an unknown coding")
    bits, number = (length >> entry.low) + entry.number, entry.number
    sizes = (-(-bits // 8), number * entry.low // 8, number * entry.width if entry.width else -(-number // 8),
             4 * entry.listed, size * entry.listed)  # fmt: skip
    if sum(sizes) != len(data):
        raise ValueError("changes of another length than their header says")
    raw, ends = arrays.from_bytes(data, device), [*accumulate(sizes)]
    unary, lows, small, listed, values = (raw[end - size : end] for size, end in zip(sizes, ends, strict=True))
    high, listed = arrays.nonzero(arrays.unpack_bits(unary, bits)), arrays.view(listed, "i4")
    if len(high) != number or ((listed < 0) | (listed >= number)).any():
        raise ValueError(f"{len(high)} indices for {number} differences")
    indices = arrays.cast(high - arrays.arange(high, number), "i4") << entry.low
    if entry.low:
        indices |= arrays.cast(arrays.view(lows, LOW[entry.low]), "i4") & (1 << entry.low) - 1
    if ((indices[:1] < 0) | (indices[-1:] >= length)).any() or (indices[1:] <= indices[:-1]).any():
        raise ValueError("a change of an element that the block does not have")
    if entry.width:
        differences = arrays.cast(arrays.view(small, f"i{entry.width}"), f"i{size}")
    else:
        differences = 2 * arrays.cast(arrays.unpack_bits(small, number), f"i{size}") - 1
    differences[arrays.cast(listed, "i8")] = arrays.view(values, f"i{size}")
    return Changes(indices, differences)


def merge(first: Changes, second: Changes) -> Changes:
    """Two consecutive changes of a block as one, for a receiver that missed a version.

    Differences are wrapped: they add modulo the word size. Those that cancel stay, as zeros.
    """
    indices, places = np.unique(np.concatenate([first.indices, second.indices]), return_inverse=True)
    differences = np.zeros(len(indices), second.differences.dtype)
    np.add.at(differences, places, np.concatenate([first.differences, second.differences]))
    return Changes(indices, differences)
