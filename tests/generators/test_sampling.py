"""The sampler: its random numbers, and the inversion of a cumulative distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.generators.torch.sampling import BLOCK, inverse_cdf, uniform


def test_uniform_is_uniform_and_independent() -> None:
    """A thousand seeds by a hundred positions: moments, neighbours and extremes of a uniform distribution."""
    seeds, positions = np.meshgrid(np.arange(1000, dtype=np.uint64), np.arange(100, dtype=np.uint64), indexing="ij")
    u = uniform(seeds, positions)
    assert u.min() >= 0 and u.max() < 1
    assert abs(u.mean() - 0.5) < 0.003 and abs(u.var() - 1 / 12) < 0.001
    counts = np.histogram(u, bins=50, range=(0, 1))[0]
    assert ((counts - 2000) ** 2 / 2000).sum() < 86  # chi-squared, 49 degrees of freedom, 0.1 %
    for neighbours in (np.corrcoef(u[:-1].ravel(), u[1:].ravel()), np.corrcoef(u[:, :-1].ravel(), u[:, 1:].ravel())):
        assert abs(neighbours[0, 1]) < 0.012


@pytest.mark.parametrize("vocabulary", [3, 97, 8 * BLOCK, 8 * BLOCK + 1, 20 * BLOCK + 17])
@given(st.integers(0, 1000), st.floats(0, 1 - 2**-48))
def test_inversion_matches_the_cumulative_sum(vocabulary: int, seed: int, u: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    p = torch.rand(2, vocabulary, generator=generator) ** 8
    p[torch.rand(2, vocabulary, generator=generator) < 0.5] = 0
    p[:, seed % vocabulary] += 0.1
    p /= p.sum(-1, keepdim=True)
    tokens = inverse_cdf(p, torch.tensor([[u], [u]], dtype=torch.float64))[:, 0]
    for row, token in enumerate(tokens.tolist()):
        assert p[row, token] > 0
        mass = p[row].double().cumsum(0)
        below = mass[token - 1].item() if token else 0.0
        assert below - 1e-5 <= u * mass[-1].item() <= mass[token].item() + 1e-5
