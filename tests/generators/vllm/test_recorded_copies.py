"""Filling tensors again by recorded operations."""

from __future__ import annotations

import torch

from slipstream.generators.vllm.recorded_copies import RecordedCopies


def fill(slot: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> None:
    """As vLLM fills a slot: resets it, scales a matrix in place, copies a matrix and a part of another."""
    slot[:] = 0
    second *= 2.0
    slot[0, : first.shape[0], : first.shape[1]].copy_(first)
    slot[1, : second.shape[0] // 2].copy_(second[::2])


def test_a_repetition_equals_the_operations_with_new_values() -> None:
    torch.manual_seed(0)
    slot, first, second = torch.randn(2, 4, 6), torch.randn(3, 2), torch.randn(8, 6)
    with RecordedCopies([first, second]) as copies:
        fill(slot, first, second)
    assert copies.complete
    values = torch.randn(3, 2), torch.randn(8, 6)
    expected = torch.randn(2, 4, 6)
    fill(expected, *(value.clone() for value in values))
    slot.fill_(7)
    first.copy_(values[0])
    second.copy_(values[1])
    copies.repeat()
    assert torch.equal(slot, expected)


def test_operations_with_other_tensors_make_a_record_incomplete() -> None:
    first, slot = torch.randn(3, 2), torch.zeros(3, 2)
    for operate in (
        lambda: slot.copy_(first + 1),  # a value computed from a source
        lambda: slot.add_(first),
        lambda: slot.fill_(1),
        lambda: slot.mul_(2),
    ):
        with RecordedCopies([first]) as copies:
            operate()
        assert not copies.complete
