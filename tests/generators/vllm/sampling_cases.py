"""Tokens sampled by the kernels, as a program that Triton interprets on a CPU.

Triton reads `TRITON_INTERPRET` when it is imported, so the kernels need a process of their own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.generators.vllm import sampling_kernels

VOCABULARY = 90  # two blocks
SAMPLES = 400


def sample(logits: Tensor, temperature: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens and log-probabilities of rows whose seeds differ."""
    rows = len(logits)
    random = torch.Generator().manual_seed(seed)
    seeds = torch.randint(-(2**62), 2**62, (rows,), generator=random)
    positions = torch.randint(0, 4096, (rows,), generator=random)
    states = torch.arange(rows, dtype=torch.int32).flip(0)
    return sampling_kernels.sample(logits, states, torch.full((rows,), temperature), seeds, positions)


def frequencies_are_probabilities() -> None:
    """Pearson's statistic of each draw is below its 99.9th percentile."""
    torch.manual_seed(0)
    for dtype, temperature in ((torch.float32, 0.7), (torch.bfloat16, 1.0)):
        logits = torch.randn(1, VOCABULARY).to(dtype).repeat(SAMPLES, 1)
        logits[:, 64:] -= 1  # both blocks are chosen, and not alike
        logits[:, 10:50] = -torch.inf  # as a grammar does
        tokens, logprobs = sample(logits, temperature)
        exact = torch.log_softmax(logits.double() / temperature, -1)
        torch.testing.assert_close(logprobs.double(), exact.gather(1, tokens[:, None])[:, 0], rtol=1e-5, atol=1e-5)
        expected = exact[0].exp() * SAMPLES
        frequent = expected >= 5
        counts = torch.bincount(tokens, minlength=VOCABULARY)
        assert not counts[10:50].any()
        assert len(counts) == VOCABULARY
        groups = torch.cat([counts[frequent], counts[~frequent].sum()[None]])
        wanted = torch.cat([expected[frequent], expected[~frequent].sum()[None]])
        statistic = ((groups - wanted) ** 2 / wanted).sum().item()
        quantile = {10: 29.6, 20: 45.3, 30: 59.7, 40: 73.4, 50: 86.7}[-(-(len(groups) - 1) // 10) * 10]
        assert statistic < quantile, (statistic, len(groups))


def temperature_zero_takes_the_largest() -> None:
    logits = torch.randn(8, VOCABULARY)
    tokens, logprobs = sample(logits, 0.0)
    assert torch.equal(tokens, logits.argmax(-1))
    torch.testing.assert_close(logprobs, torch.log_softmax(logits, -1).amax(-1), rtol=1e-5, atol=1e-5)


def equal_seeds_sample_equally() -> None:
    logits = torch.randn(16, VOCABULARY)
    first, again, other = (sample(logits, 1.0, seed)[0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def pass_on_what_is_not_finite() -> None:
    """A token of the vocabulary, with a log-probability that tells."""
    logits = torch.zeros(3, VOCABULARY)
    logits[0, 70], logits[1, :] = torch.nan, -torch.inf
    tokens, logprobs = sample(logits, 1.0)
    assert ((tokens >= 0) & (tokens < VOCABULARY)).all()
    assert logprobs.isfinite().tolist() == [False, False, True]


if __name__ == "__main__":
    sampling_kernels.BLOCK = 64
    frequencies_are_probabilities()
    temperature_zero_takes_the_largest()
    equal_seeds_sample_equally()
    pass_on_what_is_not_finite()
    print("all cases are equal")
