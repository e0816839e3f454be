"""Attention over packed tokens, on each device and in each dtype."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from slipstream.model.attention import Segments, _repeat_heads, attend
from slipstream.model.device import current_device

# Query ranges and their key ranges: one prompt with two completions, and a sequence of its own, in one row.
RUNS = (
    (range(0, 40), (range(0, 40),)),
    (range(40, 140), (range(0, 40), range(40, 140))),
    (range(140, 147), (range(0, 40), range(140, 147))),
    (range(147, 400), (range(147, 400),)),
)


@pytest.mark.parametrize("window", [None, 30])
def test_attention_without_a_float32_kernel_equals_cpu_attention(window: int | None) -> None:
    """Output and gradients equal those of CPU blocks: causal, and without tokens of other sequences."""
    torch.manual_seed(0)
    here, tokens = Segments.from_ranges(RUNS, torch.device("cpu")), RUNS[-1][0].stop
    q, k, v = (torch.randn(1, heads, tokens, 16, requires_grad=True) for heads in (4, 2, 2))
    wanted, _ = attend(torch.nn.Module(), q, k, v, None, sliding_window=window, **here.arguments())
    there = replace(Segments.from_ranges(RUNS, current_device()), blocks=())
    moved = (tensor.to(current_device()) for tensor in (q, k, v))
    found, _ = attend(torch.nn.Module(), *moved, None, sliding_window=window, **there.arguments())
    torch.testing.assert_close(found.cpu(), wanted)
    gradient = torch.randn_like(wanted)
    pairs = zip(*(torch.autograd.grad(out, (q, k, v), gradient.to(out.device)) for out in (found, wanted)), strict=True)
    for got, plain in pairs:
        torch.testing.assert_close(got, plain)


def test_query_heads_share_keys_in_order() -> None:
    """Heads 0 to 2 have the first keys, 3 to 5 the second, as in a Hugging Face model."""
    rows = torch.randn(7, 2, 5, dtype=torch.float64, requires_grad=True)
    found, wanted = _repeat_heads(rows, 6), rows.repeat_interleave(3, 1)
    assert torch.equal(found, wanted)
    weights = torch.randn_like(wanted)
    torch.testing.assert_close(*(torch.autograd.grad(out, rows, weights)[0] for out in (found, wanted)))
    assert _repeat_heads(rows, 2) is rows
