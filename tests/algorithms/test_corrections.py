"""Each correction against its formula in plain float64, their shared properties, and their product."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from slipstream.algorithms import corrections
from slipstream.algorithms.tokens import Tokens
from tests.algorithms.cases import Case, cases

Sequence = tuple[list[float], list[float], list[float], list[int], list[float]]


def truncate_tokens(s: Sequence, high: float = 2.0) -> list[float]:
    return [min(math.exp(x - b), high) for x, b in zip(s[0], s[1], strict=True)]


def truncate_sequences(s: Sequence, high: float = 2.0) -> list[float]:
    return [min(math.prod(math.exp(x - b) for x, b in zip(s[0], s[1], strict=True)), high)] * len(s[0])


def icepop(s: Sequence, low: float = 0.5, high: float = 5.0) -> list[float]:
    ratios = [math.exp(x - b) for x, b in zip(s[0], s[1], strict=True)]
    return [r if low <= r <= high else 0.0 for r in ratios]


def mask_tokens(s: Sequence, low: float = 0.5, high: float = 5.0) -> list[float]:
    return [float(w > 0) for w in icepop(s, low, high)]


def mask_sequences(s: Sequence, low: float = 0.99, high: float = 1.01) -> list[float]:
    product = math.prod(math.exp(x - b) for x, b in zip(s[0], s[1], strict=True))
    return [float(low <= product ** (1 / len(s[0])) <= high)] * len(s[0])


def opsm(s: Sequence, bound: float = 0.1) -> list[float]:
    divergence = sum(b - x for x, b in zip(s[0], s[1], strict=True)) / len(s[0])
    return [float(not (a < 0 and divergence > bound)) for a in s[2]]


def mask_divergence(s: Sequence, bound: float = 0.05) -> list[float]:
    kept = all(math.exp(x - b) - 1 - (x - b) <= bound for x, b in zip(s[0], s[1], strict=True))
    return [float(kept)] * len(s[0])


def mask_lag(s: Sequence, most: float = 4) -> list[float]:
    return [float(lag <= most) for lag in s[3]]


def discount_lag(s: Sequence, power: float = 1.0) -> list[float]:
    return [1.0 if lag < 2 else 1 / lag**power for lag in s[3]]


CHECKED: list[tuple[Callable[..., list[float]], dict[str, Any]]] = [
    (truncate_tokens, {}), (truncate_tokens, {"high": 1.1}),
    (truncate_sequences, {}), (truncate_sequences, {"high": 4.0}),
    (icepop, {}), (icepop, {"low": 0.8, "high": 1.3}),
    (mask_tokens, {}), (mask_tokens, {"low": 0.9, "high": 1.2}),
    (mask_sequences, {"low": 0.7, "high": 1.3}),
    (opsm, {}), (opsm, {"bound": 0.4}),
    (mask_divergence, {}), (mask_divergence, {"bound": 0.5}),
    (mask_lag, {"most": 2}), (discount_lag, {}), (discount_lag, {"power": 0.5}),
]  # fmt: skip
NAMES = sorted({reference.__name__ for reference, _ in CHECKED})


@pytest.mark.parametrize(("reference", "options"), CHECKED)
@settings(max_examples=50)
@given(case=cases())
def test_weights(reference: Callable[..., list[float]], options: dict[str, Any], case: Case) -> None:
    correction = getattr(corrections, reference.__name__)
    wanted = [w for sequence in case.sequences for w in reference(sequence, **options)]
    found = correction(case.tokens(), **options)
    assert not found.requires_grad
    assert found.tolist() == pytest.approx(wanted, rel=1e-6, abs=1e-6)
    if not any(abs(w - v) > 1e-5 for w, v in zip(wanted, rounded(reference, options, case), strict=True)):
        assert correction(case.tokens(torch.float32), **options).tolist() == pytest.approx(wanted, rel=1e-5, abs=1e-5)


def rounded(reference: Callable[..., list[float]], options: dict[str, Any], case: Case) -> list[float]:
    """The reference on float32 log-probabilities, for masks that depend on the last digits."""
    single = case.tokens(torch.float32)
    shifted = [
        (single.logprobs + shift).detach()[single.sequence == i].double().tolist()
        for shift in (-1e-6, 1e-6) for i in range(len(case.logprobs))
    ]  # fmt: skip
    size = len(case.logprobs)
    found = [[w for rest, x in zip(case.sequences, shifted[at : at + size], strict=True)
              for w in reference((x, *rest[1:]), **options)] for at in (0, size)]  # fmt: skip
    return [a if abs(a - b) < 1e-3 else math.inf for a, b in zip(*found, strict=True)]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=20)
@given(case=cases())
def test_on_policy_weights_are_1(name: str, case: Case) -> None:
    tokens = case.tokens()
    same = tokens.logprobs.detach()
    tokens = dataclasses.replace(tokens, behaviour=same, lag=torch.zeros_like(tokens.lag))
    assert (getattr(corrections, name)(tokens) == 1).all()


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=20)
@given(case=cases())
def test_weights_are_independent_of_other_sequences(name: str, case: Case) -> None:
    together = getattr(corrections, name)(case.tokens()).tolist()
    alone: list[float] = []
    for i in range(len(case.logprobs)):
        one = Case(*([part[i]] for part in dataclasses.astuple(case)))
        alone += getattr(corrections, name)(one.tokens()).tolist()
    assert alone == pytest.approx(together, rel=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_no_tokens(name: str) -> None:
    nothing, indices = torch.zeros(0), torch.zeros(0, dtype=torch.long)
    assert getattr(corrections, name)(Tokens(nothing, nothing, nothing, indices, indices, nothing)).shape == (0,)


def at_ratio(ratio: float) -> Tokens:
    tokens = Case([[0.0]], [[0.0]], [[-1.0]], [[0]], [[0.0]]).tokens()
    return dataclasses.replace(tokens, logprobs=torch.tensor([math.log(ratio)], dtype=torch.float64))


def test_bounds_are_inclusive() -> None:
    """Ratios of exact powers of two: a ratio on a bound is kept."""
    for name in ("icepop", "mask_tokens", "mask_sequences"):
        keep = partial(getattr(corrections, name), low=0.5, high=2.0)
        assert [keep(at_ratio(r)).item() > 0 for r in (0.499, 0.5, 1.0, 2.0, 2.001)] == [False, True, True, True, False]


def test_corrections_are_multiplied_and_a_mask_is_final() -> None:
    case = Case([[-1.0, -1.0, -9.0]], [[-2.0, -1.0, -1.0]], [[1.0, 1.0, -1.0]], [[2, 1, 0]], [[0.0, 0.0, 0.0]])
    chosen = [corrections.truncate_tokens, corrections.discount_lag, corrections.mask_tokens]
    assert corrections.combine(chosen, case.tokens()).tolist() == pytest.approx([1.0, 1.0, 0.0])
    assert corrections.combine([], case.tokens()).tolist() == [1.0, 1.0, 1.0]


def test_a_masked_infinity_contributes_zero() -> None:
    mask = torch.tensor([0.0, 0.0, 0.5])
    found = corrections.masked_product(mask, torch.tensor([math.nan, math.inf, 4.0]))
    assert found.tolist() == [0.0, 0.0, 2.0]
