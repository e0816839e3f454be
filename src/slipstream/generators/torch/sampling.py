"""Samples one token for each sequence: temperature, top-k, top-p.

Log-probabilities of tokens are those of the distribution after these; 0 for greedy ones.

The random number of a token is a pure function of its request's seed and its position. So a completion is independent
of the rest of the batch, of its slot, and of restarts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from slipstream.rollout import Sampling

BLOCK = 512


@dataclass(frozen=True)
class SampledTokens:
    """Per row: the token, its log-probability under the sampled distribution (0.0 if greedy), and the ids that
    top-k/top-p kept.

    `sampling_masks` has None for a row whose ids are not recorded or not truncated. A row whose logits are no
    distribution (with a NaN or +inf, or all -inf) gets an arbitrary token of the vocabulary and a log-probability that
    is not finite.
    """

    tokens: list[int]
    logprobs: list[float]
    sampling_masks: list[NDArray[np.int32] | None]


class Sampler:
    """Samples for a fixed list of sequences, whose parameters are columns `[rows, 1]`."""

    def __init__(self, rows: Sequence[Sampling], device: torch.device) -> None:
        def column(values: list[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)[:, None]

        self._device = device
        self._seeds = np.array([r.seed & (2**64 - 1) for r in rows], dtype=np.uint64)
        self._greedy = column([float(r.temperature == 0) for r in rows], torch.bool)
        self._temperature = column([r.temperature or 1.0 for r in rows], torch.float32)
        self._top_k = column([r.top_k or 2**31 for r in rows], torch.int64)
        self._top_p = column([r.top_p for r in rows], torch.float32)
        self._any_greedy = any(r.temperature == 0 for r in rows)
        self._plain = all(r.temperature == 1 for r in rows)
        self._truncated = any(r.top_k or r.top_p < 1 for r in rows)
        self._record = [r.record_sampling_mask for r in rows]

    def sample(self, logits: Tensor, positions: NDArray[np.uint64]) -> SampledTokens:
        """Sample a token for each row of `logits` `[rows, vocabulary]`: token `positions[row]` of its request."""
        logits = logits.float()
        if not self._plain:
            logits = logits / self._temperature
        sampling_masks: list[NDArray[np.int32] | None] = [None] * len(self._record)
        if self._truncated:
            logits = truncate(logits, self._top_k, self._top_p)
            for row in (i for i, wanted in enumerate(self._record) if wanted):
                sampling_masks[row] = torch.isfinite(logits[row]).nonzero()[:, 0].to("cpu", torch.int32).numpy()
        probabilities = logits.softmax(-1)
        u = torch.from_numpy(uniform(self._seeds, positions)).to(self._device)[:, None]
        tokens = inverse_cdf(probabilities, u)
        logprobs = probabilities.gather(-1, tokens).log()
        if self._any_greedy:
            tokens = torch.where(self._greedy, logits.argmax(-1, keepdim=True), tokens)
            logprobs = torch.where(self._greedy & logprobs.isfinite(), 0.0, logprobs)
        return SampledTokens(tokens[:, 0].tolist(), logprobs[:, 0].tolist(), sampling_masks)


def inverse_cdf(probabilities: Tensor, u: Tensor) -> Tensor:
    """The token `[rows, 1]` at which the cumulative probability passes `u` `[rows, 1]`, a number in [0, 1).

    In a large vocabulary a block of tokens is searched first, then a token in the block, which avoids the cumulative
    sum over all tokens. Sums are float64; a token of probability 0 is never chosen. A row with NaN gets an arbitrary
    token of the vocabulary.
    """
    vocabulary = probabilities.shape[-1]
    if vocabulary <= 8 * BLOCK:
        mass = probabilities.cumsum(-1, dtype=torch.float64)
        return torch.searchsorted(mass, u * mass[:, -1:], right=True).clamp(max=vocabulary - 1)
    if missing := -vocabulary % BLOCK:  # `pad` copies all probabilities, even if it adds none
        probabilities = pad(probabilities, (0, missing))
    blocks = probabilities.view(len(probabilities), -1, BLOCK)
    sums = blocks.sum(-1).double()
    mass = sums.cumsum(-1)
    target = u * mass[:, -1:]
    block = torch.searchsorted(mass, target, right=True).clamp(max=blocks.shape[1] - 1)
    rest = (target - (mass - sums).gather(-1, block)) / sums.gather(-1, block)
    inside = blocks.gather(1, block[..., None].expand(-1, -1, BLOCK))[:, 0].cumsum(-1, dtype=torch.float64)
    rest = rest.clamp(0, 1 - 2.0**-48)
    found = block * BLOCK + torch.searchsorted(inside, rest * inside[:, -1:], right=True)
    return found.clamp(max=vocabulary - 1)


def truncate(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """A copy of `logits` with -inf for the tokens removed by top-k, then top-p. `top_k`, `top_p`: `[rows, 1]`.

    Top-p keeps the likeliest tokens whose mass among the top-k reaches `top_p`, the last one included.
    """
    ordered, order = logits.sort(-1, descending=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    ordered = ordered.masked_fill(rank >= top_k, -torch.inf)
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1, dtype=torch.float64) - probabilities
    ordered = ordered.masked_fill((before >= top_p) & (rank > 0) & (top_p < 1), -torch.inf)
    return torch.empty_like(logits).scatter_(-1, order, ordered)


def uniform(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """One number in [0, 1) for each (seed, position): SplitMix64's output function (Steele et al., 2014), 48 bits.

    With 48 bits the number times a total mass stays below that mass, so a token of probability 0 is never sampled.
    """
    with np.errstate(over="ignore"):
        x = _mix(seeds + np.uint64(0x9E3779B97F4A7C15)) + positions * np.uint64(0x9E3779B97F4A7C15)
        return (_mix(x) >> np.uint64(16)).astype(np.float64) * 2.0**-48


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
