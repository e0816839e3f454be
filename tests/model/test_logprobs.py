"""Log-probabilities by compiled functions: the same programs serve any number of chunks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

from slipstream.model import logprobs


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`torch.compile` traces functions as ever, and needs no C compiler."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(logprobs, "CHUNK", 4000)
    logprobs._compiled.cache_clear()
    yield
    logprobs._compiled.cache_clear()
    torch._dynamo.reset()


def gradient_sums(tokens: int, frozen: bool, compiled: bool) -> list[float]:
    """Of hidden states, and of the head if it is not frozen."""
    torch.manual_seed(tokens)
    hidden = torch.randn(tokens, 8, requires_grad=True)
    head = torch.randn(40, 8, requires_grad=not frozen)
    found, _ = logprobs.head_logprobs(
        hidden, head, torch.arange(tokens) % 40, torch.full((tokens,), 0.7), None, compiled
    )
    found.square().sum().backward()  # type: ignore[no-untyped-call]
    return [float(each.grad.abs().sum()) for each in (hidden, head) if each.grad is not None]


@pytest.mark.parametrize("frozen", [False, True])
def test_several_chunks_need_no_other_programs_than_one(frozen: bool, traced: None) -> None:
    """A chunk has 100 tokens; the last one of each has fewer."""
    gradient_sums(51, frozen, compiled=True)
    counters.clear()
    for tokens in (330, 217, 73):
        found, wanted = (gradient_sums(tokens, frozen, compiled) for compiled in (True, False))
        assert found == pytest.approx(wanted, rel=1e-4)
    assert not counters["stats"]["unique_graphs"]
