"""Tokens sampled by the kernels, as a program that runs on a GPU, or that Triton interprets on a CPU.

Triton reads `TRITON_INTERPRET` when it is imported, so the kernels need a process of their own.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from slipstream.generators.vllm import sampling_kernels

INTERPRETED = not torch.cuda.is_available()
DEVICE = "cpu" if INTERPRETED else "cuda"
BLOCK = 64 if INTERPRETED else sampling_kernels.BLOCK
VOCABULARY = BLOCK + 26  # two blocks
SAMPLES = 400 if INTERPRETED else 40_000


def sample(logits: Tensor, temperature: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens and log-probabilities of rows whose seeds differ."""
    rows = len(logits)
    random = torch.Generator().manual_seed(seed)
    seeds = torch.randint(-(2**62), 2**62, (rows,), generator=random)
    positions = torch.randint(0, 4096, (rows,), generator=random)
    states = torch.arange(rows, dtype=torch.int32).flip(0)
    given = states, torch.full((rows,), temperature), seeds, positions
    tokens, logprobs = sampling_kernels.sample(logits.to(DEVICE), *(each.to(DEVICE) for each in given))
    return tokens.cpu(), logprobs.cpu()


def frequencies_are_probabilities() -> None:
    """Pearson's statistic of the samples is below its 99.9th percentile, which Wilson and Hilferty approximate."""
    torch.manual_seed(0)
    for dtype, temperature, size in ((torch.float32, 0.7, VOCABULARY), (torch.bfloat16, 1.0, 50)):
        logits = torch.randn(1, size).to(dtype)
        logits[:, 10:20] = -torch.inf  # as a grammar does
        logits[:, BLOCK:] += 1.5  # both blocks are drawn
        tokens, logprobs = sample(logits.repeat(SAMPLES, 1), temperature)
        exact = torch.log_softmax(logits[0].double() / temperature, -1)
        torch.testing.assert_close(logprobs.double(), exact[tokens], rtol=1e-5, atol=1e-5)
        expected, counts = exact.exp() * SAMPLES, torch.bincount(tokens, minlength=size)
        assert len(counts) == size and not counts[10:20].any()
        rare = expected < 5
        groups, wanted = (torch.cat([each[~rare], each[rare].sum()[None]]) for each in (counts, expected))
        statistic = ((groups - wanted) ** 2 / wanted.clamp_min(1e-9)).sum().item()
        freedom = len(groups) - 1
        limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3
        assert statistic < limit, (statistic, limit)


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


def nonfinite_logits_give_nonfinite_logprobs() -> None:
    """The token is in the vocabulary; its log-probability is not finite."""
    logits = torch.zeros(3, VOCABULARY)
    logits[0, BLOCK + 6], logits[1, :] = torch.nan, -torch.inf
    tokens, logprobs = sample(logits, 1.0)
    assert ((tokens >= 0) & (tokens < VOCABULARY)).all()
    assert logprobs.isfinite().tolist() == [False, False, True]


if __name__ == "__main__":
    sampling_kernels.BLOCK = BLOCK
    frequencies_are_probabilities()
    temperature_zero_takes_the_largest()
    equal_seeds_sample_equally()
    nonfinite_logits_give_nonfinite_logprobs()
    print("all cases are equal")
