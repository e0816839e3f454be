"""Log-probabilities and gradients of a head in different ways, as a program that Triton interprets on a CPU.

Triton reads `TRITON_INTERPRET` when it is imported, so the kernels need a process of their own.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from slipstream.model import logprobs
from slipstream.model.sampling_mask import SamplingMask

TOKENS, SIZE, VOCABULARY = 66, 16, 90  # two chunks, of two blocks in each row


def results_and_gradients(dtype: torch.dtype, masked: bool, frozen: bool, softcap: float, **ways: bool) -> list[Tensor]:
    """Log-probabilities, entropies, and gradients of hidden states and, unless it is frozen, of the head."""
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, SIZE).to(dtype).requires_grad_()
    head = torch.randn(VOCABULARY, SIZE).to(dtype).requires_grad_(not frozen)
    temperatures = torch.linspace(0.5, 1.5, TOKENS).to(torch.promote_types(dtype, torch.float32))
    targets = torch.arange(TOKENS) * 7 % VOCABULARY
    mask = mask_of_every_second(targets) if masked else None
    found, entropy = logprobs.head_logprobs(hidden, head, targets, temperatures, mask, softcap=softcap, **ways)
    found.backward(torch.linspace(-1, 1, TOKENS).to(found))  # type: ignore[no-untyped-call]
    return [found.detach(), entropy, *(each.grad for each in (hidden, head) if each.grad is not None)]


def mask_of_every_second(targets: Tensor) -> SamplingMask | None:
    """Every second token keeps its target and every third id; the others keep all."""
    kept = [np.union1d([target], np.arange(0, VOCABULARY, 3)) if i % 2 else None for i, target in enumerate(targets)]
    return SamplingMask.from_token_ids(kept, torch.device("cpu"))


def compare_kernels() -> None:
    """The kernels compute what float64 does; without the product of the backward pass, the same."""
    for masked, frozen, softcap in ((True, False, 2.0), (False, True, 0.0), (True, True, 2.0), (False, False, 0.0)):
        found = results_and_gradients(torch.float32, masked, frozen, softcap, compiled=True)
        kept = results_and_gradients(torch.float32, masked, frozen, softcap, compiled=True, keep=True)
        exact = results_and_gradients(torch.float64, masked, frozen, softcap)
        assert len(found) == (3 if frozen else 4)
        for one, same, wanted in zip(found, kept, exact, strict=True):
            torch.testing.assert_close(one.double(), wanted, rtol=1e-4, atol=1e-4)
            assert torch.equal(one, same)


def pass_on_what_is_not_finite() -> None:
    hidden, head = torch.ones(2, 4), torch.ones(70, 4)
    hidden[1, 0] = torch.nan
    found, _ = logprobs.head_logprobs(hidden, head, torch.tensor([3, 3]), torch.ones(2), None, compiled=True)
    assert found.isfinite().tolist() == [True, False]


if __name__ == "__main__":
    from slipstream.model import head_kernels

    head_kernels.BLOCK = logprobs.CHUNK = 64  # the least tokens of a chunk are 64, too
    compare_kernels()
    pass_on_what_is_not_finite()
    print("all cases are equal")
