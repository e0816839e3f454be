"""Drawing one token for every sequence: temperature, top-k, top-p, and the log-probability of what was drawn.

The random number of a token is a pure function of its request's seed and its position, so a completion does not depend
on its neighbours in the batch, on the slot it sits in, or on how often the engine was restarted.
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
class Drawn:
    """Per row: the token, its log-probability under the distribution drawn from, and the tokens kept by top-k/top-p.

    A row whose logits are no distribution (a NaN, +inf, or -inf alone) has a log-probability that is not finite, and
    an arbitrary token of the vocabulary.
    """

    tokens: list[int]
    logprobs: list[float]
    kept: list[NDArray[np.int32] | None]


class Sampler:
    """The sampling parameters of a fixed list of sequences as columns, reused until the list changes."""

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
        self._record = [r.record_kept for r in rows]

    def draw(self, logits: Tensor, positions: NDArray[np.uint64]) -> Drawn:
        """Draw a token for each row of `logits` `[rows, vocabulary]`, the `positions[i]`-th of its request."""
        logits = logits.float()
        if not self._plain:
            logits = logits / self._temperature
        kept: list[NDArray[np.int32] | None] = [None] * len(self._record)
        if self._truncated:
            logits = truncate(logits, self._top_k, self._top_p)
            for row in (i for i, wanted in enumerate(self._record) if wanted):
                kept[row] = torch.isfinite(logits[row]).nonzero()[:, 0].to("cpu", torch.int32).numpy()
        logprobs = logits.log_softmax(-1)
        u = torch.from_numpy(uniform(self._seeds, positions)).to(self._device)[:, None]
        tokens = invert(logprobs.exp(), u)
        chosen = logprobs.gather(-1, tokens)
        if self._any_greedy:
            tokens = torch.where(self._greedy, logits.argmax(-1, keepdim=True), tokens)
            chosen = torch.where(self._greedy & chosen.isfinite(), 0.0, chosen)
        return Drawn(tokens[:, 0].tolist(), chosen[:, 0].tolist(), kept)


def invert(probabilities: Tensor, u: Tensor) -> Tensor:
    """The token `[rows, 1]` at which the cumulative probability passes `u` `[rows, 1]`, a number in [0, 1).

    Large vocabularies are searched in two steps, first for a block of tokens and then inside it, which spares the
    cumulative sum over all of them. Sums are float64; a token of probability 0 is never chosen. Rows with NaN get an
    arbitrary token of the vocabulary.
    """
    vocabulary = probabilities.shape[-1]
    if vocabulary <= 8 * BLOCK:
        mass = probabilities.cumsum(-1, dtype=torch.float64)
        return torch.searchsorted(mass, u * mass[:, -1:], right=True).clamp(max=vocabulary - 1)
    blocks = pad(probabilities, (0, -vocabulary % BLOCK)).view(len(probabilities), -1, BLOCK)
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
    """Set what top-k, then top-p, leave out to -inf. `top_k`, `top_p`: `[rows, 1]`.

    Top-p keeps the likeliest tokens up to and including the one that brings the mass among the top-k to `top_p`.
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

    With 48 bits the number times a total mass stays below that mass, so a token of probability 0 is never drawn.
    """
    with np.errstate(over="ignore"):
        x = _mix(seeds + np.uint64(0x9E3779B97F4A7C15)) + positions * np.uint64(0x9E3779B97F4A7C15)
        return (_mix(x) >> np.uint64(16)).astype(np.float64) * 2.0**-48


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
