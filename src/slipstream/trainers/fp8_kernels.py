"""A Triton kernel that casts a matrix to FP8 and transposes it in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS, WARPS = 128, 128, 8  # the tile and the warps of a program


@triton.jit  # type: ignore[untyped-decorator]
def _cast_kernel(  # type: ignore[no-untyped-def]
    matrix, factor, by_rows, by_columns, rows, columns, LIMIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    first = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    second = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (first < rows) & (second < columns)
    values = tl.load(matrix + first * columns + second, mask=inside, other=0.0).to(tl.float32) * tl.load(factor)
    cast = tl.minimum(tl.maximum(values, -LIMIT), LIMIT).to(by_rows.dtype.element_ty)
    tl.store(by_rows + first * columns + second, cast, mask=inside)
    tl.store(by_columns + tl.trans(second * rows + first), tl.trans(cast), mask=tl.trans(inside))


def cast_both(matrix: Tensor, factor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A contiguous matrix times `factor` in an FP8 `dtype`, and its transpose."""
    rows, columns = matrix.shape
    outputs = matrix.new_empty(rows, columns, dtype=dtype), matrix.new_empty(columns, rows, dtype=dtype)
    grid = triton.cdiv(rows, ROWS), triton.cdiv(columns, COLUMNS)
    tile = {"ROWS": ROWS, "COLUMNS": COLUMNS, "num_warps": WARPS}
    _cast_kernel[grid](matrix, factor, *outputs, rows, columns, LIMIT=torch.finfo(dtype).max, **tile)
    return outputs
