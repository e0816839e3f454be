"""Log-probabilities of a head by Triton kernels, and with kept logits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from .head_cases import results_and_gradients


def test_kernels_compute_what_float64_does() -> None:
    """Triton interprets the kernels on this CPU."""
    pytest.importorskip("triton")
    program = Path(__file__).with_name("head_cases.py")
    ended = subprocess.run(
        [sys.executable, program],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "all cases are equal\n"), ended.stderr


@pytest.mark.parametrize("masked", [False, True])
def test_kept_logits_give_the_same_gradients(masked: bool) -> None:
    plain, kept = (results_and_gradients(torch.float32, masked, False, 2.0, keep=keep) for keep in (False, True))
    assert all(map(torch.equal, plain, kept))
