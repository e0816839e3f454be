"""Attention over packed tokens, by the ways that devices and number formats have for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from slipstream.models import device_here
from slipstream.packed.attention import Segments, attend
from slipstream.packed.flash import RUNS


@pytest.mark.parametrize("window", [None, 30])
def test_a_device_without_a_kernel_for_float32_attends_to_the_same(window: int | None) -> None:
    """As blocks on a CPU do; no token of another sequence, and none that is yet to come."""
    torch.manual_seed(0)
    here, tokens = Segments.of(RUNS, torch.device("cpu")), RUNS[-1][0].stop
    q, k, v = (torch.randn(1, heads, tokens, 16, requires_grad=True) for heads in (4, 2, 2))
    wanted, _ = attend(torch.nn.Module(), q, k, v, None, sliding_window=window, **here.arguments())
    there = replace(Segments.of(RUNS, device_here()), blocks=())
    moved = (tensor.to(device_here()) for tensor in (q, k, v))
    found, _ = attend(torch.nn.Module(), *moved, None, sliding_window=window, **there.arguments())
    torch.testing.assert_close(found.cpu(), wanted)
    gradient = torch.randn_like(wanted)
    pairs = zip(*(torch.autograd.grad(out, (q, k, v), gradient.to(out.device)) for out in (found, wanted)), strict=True)
    for got, plain in pairs:
        torch.testing.assert_close(got, plain)
