"""FP8 kernels as a program that Triton interprets on a CPU; prints a line at its end.

The interpreter does not round to the nearest FP8 value, so casts are compared for matrices of such values only.
"""

from __future__ import annotations

import torch

from slipstream.trainers import fp8, fp8_kernels


def compare_with_plain_operations() -> None:
    draw = torch.Generator().manual_seed(0)
    for dtype in (fp8.WEIGHT_DTYPE, fp8.GRADIENT_DTYPE):
        for size in (0.0, 1e-30, 1.0, 1e30):
            matrix = size * torch.randn(70, 36, generator=draw)
            assert fp8_kernels.quantize(matrix, dtype, fp8.LEAST_MAXIMUM)[2] == fp8.quantize(matrix, dtype)[2]
        matrix = torch.randn(70, 36, generator=draw).to(dtype).float()
        matrix[41, 7] = -torch.finfo(dtype).max  # so the scale is 1
        found = fp8_kernels.quantize(matrix, dtype, fp8.LEAST_MAXIMUM)
        for one, wanted in zip(found, fp8.quantize(matrix, dtype), strict=True):
            assert torch.equal(one.float(), wanted.float())


def pass_on_what_is_not_finite() -> None:
    for value in (torch.nan, torch.inf, -torch.inf):
        matrix = torch.ones(64, 36)
        matrix[-1, -1] = value
        assert not fp8_kernels.quantize(matrix, fp8.WEIGHT_DTYPE, fp8.LEAST_MAXIMUM)[2].isfinite()


if __name__ == "__main__":
    # Several programs with several blocks each, and tiles that end beyond the matrix.
    fp8_kernels.PROGRAMS, fp8_kernels.BLOCK, fp8_kernels.ROWS, fp8_kernels.COLUMNS = 4, 64, 16, 16
    compare_with_plain_operations()
    pass_on_what_is_not_finite()
    print("all cases are equal")
