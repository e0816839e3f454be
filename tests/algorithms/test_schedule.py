"""The learning rate over a run."""

from __future__ import annotations

from itertools import pairwise

from slipstream.algorithms.schedule import learning_rate


def test_learning_rate_rises_then_falls_to_zero() -> None:
    rates = [learning_rate("linear", step, steps=12, warmup=4) for step in range(13)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0] and rates[4] == 1.0 and rates[12] == 0.0
    assert all(a > b for a, b in pairwise(rates[4:]))
    assert [round(learning_rate("cosine", s, steps=4), 3) for s in range(5)] == [1.0, 0.854, 0.5, 0.146, 0.0]
    assert learning_rate("constant", 99, steps=100) == 1.0


def test_decay_follows_the_token_budget() -> None:
    assert learning_rate("linear", 1, steps=100, spent=0.75) == 0.25
