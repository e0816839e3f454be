"""Triton kernels that quantize a matrix to FP8: one finds its largest element, one casts and transposes in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS, BLOCK = 512, 8192  # of the search for the largest element, and elements that a program reads at once
ROWS, COLUMNS, WARPS = 128, 128, 8  # the tile and the warps of a program that casts


@triton.jit  # type: ignore[untyped-decorator]
def _largest_kernel(  # type: ignore[no-untyped-def]
    matrix, found, size, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr
):
    """Bits of the largest magnitude that each program reads. As integers, those of NaN exceed those of all numbers."""
    largest = tl.zeros((BLOCK,), tl.int32)
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, size, PROGRAMS * BLOCK):
        at = start + tl.arange(0, BLOCK)
        values = tl.load(matrix + at, mask=at < size, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, values.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    tl.store(found + tl.program_id(0), tl.max(largest))


@triton.jit  # type: ignore[untyped-decorator]
def _cast_kernel(  # type: ignore[no-untyped-def]
    matrix, found, by_rows, by_columns, scale, rows, columns, LEAST: tl.constexpr, LIMIT: tl.constexpr,
    PROGRAMS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    largest = tl.max(tl.load(found + tl.arange(0, PROGRAMS))).to(tl.float32, bitcast=True)
    own_scale = tl.where(largest < LEAST, LEAST, largest) / LIMIT  # NaN stays
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale, own_scale)
    first = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    second = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (first < rows) & (second < columns)
    values = tl.load(matrix + first * columns + second, mask=inside, other=0.0).to(tl.float32) * (1.0 / own_scale)
    cast = tl.minimum(tl.maximum(values, -LIMIT), LIMIT).to(by_rows.dtype.element_ty)
    tl.store(by_rows + first * columns + second, cast, mask=inside)
    tl.store(by_columns + tl.trans(second * rows + first), tl.trans(cast), mask=tl.trans(inside))


def quantize(matrix: Tensor, dtype: torch.dtype, least: float) -> tuple[Tensor, Tensor, Tensor]:
    """As `fp8.quantize`, of a contiguous matrix whose largest element counts as `least`, if it is smaller."""
    rows, columns = matrix.shape
    found = matrix.new_empty(PROGRAMS, dtype=torch.int32)
    _largest_kernel[(PROGRAMS,)](matrix, found, matrix.numel(), PROGRAMS, BLOCK, num_warps=8)
    outputs = matrix.new_empty(rows, columns, dtype=dtype), matrix.new_empty(columns, rows, dtype=dtype)
    scale = matrix.new_empty((), dtype=torch.float32)
    limits = {"LEAST": least, "LIMIT": torch.finfo(dtype).max, "PROGRAMS": PROGRAMS}
    grid, tile = (triton.cdiv(rows, ROWS), triton.cdiv(columns, COLUMNS)), {"ROWS": ROWS, "COLUMNS": COLUMNS}
    _cast_kernel[grid](matrix, found, *outputs, scale, rows, columns, **limits, **tile, num_warps=WARPS)
    return *outputs, scale
