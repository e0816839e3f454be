"""The weighted gate of experts by kernels, as a program that Triton interprets on a CPU (see `head_cases`)."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.model import expert_kernels, experts

ROWS, SIZE, ENDS = 11, 24, (3, 3, 8)  # the second expert has no rows, and the last rows are of no expert here


def results(gate_up: Tensor, weights: Tensor, gradient: Tensor, by_kernel: bool) -> list[Tensor]:
    """Output and gradients of the rows that have an expert."""
    gate_up, weights = gate_up.clone().requires_grad_(), weights.clone().requires_grad_()
    if by_kernel:
        out = experts.WeightedGate.apply(gate_up, weights, torch.tensor(ENDS, dtype=torch.int32))
    else:
        gate, up = gate_up.chunk(2, -1)
        out = torch.nn.functional.silu(gate) * up * weights[:, None]
    assert isinstance(out, Tensor)
    out.backward(gradient)  # type: ignore[no-untyped-call]
    assert gate_up.grad is not None and weights.grad is not None
    return [each[: ENDS[-1]].detach() for each in (out, gate_up.grad, weights.grad)]


def compare(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    inputs = [(3 * torch.randn(*shape)).to(dtype) for shape in ((ROWS, 2 * SIZE), (ROWS,), (ROWS, SIZE))]
    for of_none in inputs:
        of_none[ENDS[-1] :] = torch.nan
    exact = results(*(each.double() for each in inputs), by_kernel=False)
    for found, wanted in zip(results(*inputs, by_kernel=True), exact, strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)


if __name__ == "__main__":
    for expert_kernels.BLOCK in (16, 32):  # a row of two blocks, and one of a part of a block
        compare(torch.float32, 1e-5)
        compare(torch.bfloat16, 2e-2)
    print("all cases are equal")
