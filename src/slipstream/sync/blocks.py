"""The blocks of words in which parameters are compared and coded, and the checksums of parameters in them.

A parameter is a matrix of words, the bits of its elements as integers of the same size: rows are of its first
dimension, columns of all others. Small parameters share a block, since each operation on a GPU takes some microseconds
whatever its size. Large ones are divided into rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from slipstream.sync.arrays import Array, cast
from slipstream.sync.checksum import WORDS


class Segment(NamedTuple):
    """Rows from `row` to `stop` of a parameter, whose words begin at index `start` of a block."""

    name: str
    parameter: int
    columns: int
    row: int
    stop: int
    start: int

    @property
    def end(self) -> int:
        """The index in the block after the last word."""
        return self.start + (self.stop - self.row) * self.columns

    def of(self, block: Array) -> Array:
        """These rows of a block's words."""
        return block[self.start : self.end].reshape(self.stop - self.row, self.columns)


@dataclass(frozen=True)
class Block:
    """Segments in order."""

    segments: tuple[Segment, ...]

    @property
    def length(self) -> int:
        """Number of words."""
        return self.segments[-1].end

    def slices(self, indices: Array) -> Iterator[tuple[Segment, slice]]:
        """Each segment, and where its words are among these ascending indices, an array of NumPy's."""
        ends = np.searchsorted(indices, np.array([segment.end for segment in self.segments], indices.dtype))
        for segment, first, last in zip(self.segments, [0, *ends], ends, strict=False):
            yield segment, slice(first, last)

    def rises(self, indices: Array, differences: Array) -> Tensor:
        """By how much changes of words at ascending indices raise the `checksum` of each segment's parameter.

        The differences are not wrapped.
        """
        if len(self.segments) == 1:
            return torch.as_tensor(_rise(self.segments[0], indices, differences)).reshape(1)
        if isinstance(indices, np.ndarray):
            each = [_rise(segment, indices[at], differences[at]) for segment, at in self.slices(indices)]
            return torch.tensor(each)
        at, by = torch.as_tensor(indices).long(), torch.as_tensor(differences)
        table = torch.tensor([(s.start, s.end, s.columns, s.row) for s in self.segments], device=at.device)
        ends = torch.searchsorted(at, table[:, 1].contiguous())
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        start, _, columns, row = table.repeat_interleave(counts, 0, output_size=len(at)).unbind(1)
        return sums_between(_factors_at(at - start, columns, row) * by, ends)


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a parameter of this shape."""
    return shape[0] if shape else 1, prod(shape[1:])


def divide(shapes: Mapping[str, Sequence[int]], size: int) -> list[Block]:
    """Blocks of at most `size` words or one row, in the order of the parameters."""
    blocks, segments = list[Block](), list[Segment]()
    for number, (name, shape) in enumerate(shapes.items()):
        rows, columns = matrix_shape(shape)
        step = max(1, size // max(columns, 1))
        for row in range(0, rows, step):
            stop = min(row + step, rows)
            if segments and segments[-1].end + (stop - row) * columns > size:
                blocks.append(Block(tuple(segments)))
                segments = []
            segments.append(Segment(name, number, columns, row, stop, segments[-1].end if segments else 0))
    return [*blocks, Block(tuple(segments))] if segments else blocks


def words(tensor: Tensor) -> Tensor:
    """The bits of a contiguous tensor as a flat view of signed integers. Raises `RuntimeError` if not contiguous."""
    return tensor.detach().view(-1).view(WORDS[tensor.element_size()])


def factors(rows: Array, columns: Array) -> Array:
    """Factors in `checksum` of the words in these int64 rows and columns of a parameter."""
    return (2 * rows + 1) * (2 * columns + 1)


def _factors_at(indices: Array, columns: Array | int, row: Array | int) -> Array:
    """Factors of the words at these indices of the rows from `row` on."""
    rows = indices // columns
    return factors(cast(rows, "i8") + row, cast(indices - rows * columns, "i8"))


def _rise(segment: Segment, indices: Array, differences: Array) -> Array:
    """By how much changes of words of one segment, at these indices of its block, raise its parameter's `checksum`."""
    return (_factors_at(indices - segment.start, segment.columns, segment.row) * differences).sum()


def sums_between(values: Tensor, ends: Tensor) -> Tensor:
    """For each of the ascending `ends`, the sum of the values from the end before up to it."""
    zero = values.new_zeros(1)
    return torch.diff(torch.cat([zero, values.cumsum(0)])[ends], prepend=zero)


def gather(
    blocks: Sequence[Block], parameters: Mapping[str, Tensor], dtype: torch.dtype, copy: bool = True
) -> Iterator[Tensor]:
    """The words of each block, as elements of `dtype`. Each parameter is read once.

    Without `copy`, a block may be a view of a parameter, valid until the parameter changes.
    """
    name, matrix = "", torch.empty(0)
    for block in blocks:
        gathered = None
        for segment in block.segments:
            if segment.name != name:
                name = segment.name
                matrix = parameters[name].detach()
                matrix = matrix.reshape(matrix_shape(matrix.shape))
            if not copy and len(block.segments) == 1 and matrix.dtype == dtype and matrix.is_contiguous():
                gathered = matrix[segment.row : segment.stop]
                continue
            if gathered is None:
                gathered = torch.empty(block.length, dtype=dtype, device=matrix.device)
            segment.of(gathered).copy_(matrix[segment.row : segment.stop])
        assert gathered is not None
        yield words(gathered)
