"""Log-probabilities of a head by Triton kernels, and with kept logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.conftest import run_kernel_cases

from .head_cases import results_and_gradients


def test_kernels_compute_what_float64_does() -> None:
    pytest.importorskip("triton")
    run_kernel_cases(Path(__file__).with_name("head_cases.py"))


@pytest.mark.parametrize("masked", [False, True])
def test_kept_logits_give_the_same_gradients(masked: bool) -> None:
    plain, kept = (results_and_gradients(torch.float32, masked, False, 2.0, keep=keep) for keep in (False, True))
    assert all(map(torch.equal, plain, kept))
