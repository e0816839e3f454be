"""Each loss and its gradient against the paper's formula in plain float64, and their shared properties."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from slipstream.algorithms import aggregation, losses
from slipstream.algorithms.distillation import reverse_kl
from slipstream.algorithms.tokens import Tokens, proximal_from_lag
from slipstream.objective import LOSSES
from tests.algorithms.cases import Case, assert_slopes, cases, slopes

Rows = list[list[float]]


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def by_token(formula: Callable[..., float]) -> Callable[..., Rows]:
    """A reference for losses of single tokens: formula(x, frozen, behaviour, advantage, lag, proximal)."""

    def reference(case: Case, x: Rows, frozen: Rows, **options: Any) -> Rows:
        return [
            [formula(*values, **options) for values in zip(xs, fs, *rest, strict=True)]
            for xs, fs, (_, *rest) in zip(x, frozen, case.sequences, strict=True)
        ]

    return reference


def reinforce(x: float, f: float, b: float, a: float, lag: int, prox: float) -> float:
    return -a * x


def ppo(
    x: float, f: float, b: float, a: float, lag: int, prox: float,
    clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float = 0.0,
) -> float:  # fmt: skip
    ratio = math.exp(x - b)
    gain = min(ratio * a, clip(ratio, 1 - clip_low, 1 + clip_high) * a)
    if dual_clip and a < 0:
        gain = max(gain, dual_clip * a)
    return -gain


def grpo(
    x: float, f: float, b: float, a: float, lag: int, prox: float,
    clip_low: float = 0.2, clip_high: float = 0.2, truncate: float = 3.0,
) -> float:  # fmt: skip
    ratio = math.exp(x - b)
    weight = min(math.exp(f - b), truncate or math.inf) * math.exp(x - f)
    return -min(weight * a, clip(ratio, 1 - clip_low, 1 + clip_high) * a)


def cispo(x: float, f: float, b: float, a: float, lag: int, prox: float, low: float = 0.0, high: float = 5.0) -> float:
    return -clip(math.exp(f - b), low, high) * a * x


def decoupled(
    x: float, f: float, b: float, a: float, lag: int, prox: float,
    clip_low: float = 0.2, clip_high: float = 0.2, high: float = 5.0, approximate: bool = True,
) -> float:  # fmt: skip
    if approximate:
        prox = (b + (lag - 1) * f) / lag if lag else f
    return min(math.exp(prox - b), high) * ppo(x, f, prox, a, lag, prox, clip_low, clip_high)


def dppo_tv(x: float, f: float, b: float, a: float, lag: int, prox: float, bound: float = 0.15) -> float:
    gap = math.exp(f) - math.exp(b)
    cut = (a > 0 and gap > bound) or (a < 0 and -gap > bound)
    return 0.0 if cut else -math.exp(x - b) * a


def dppo_kl(x: float, f: float, b: float, a: float, lag: int, prox: float, bound: float = 0.05) -> float:
    p, q = math.exp(f), math.exp(b)
    divergence = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    cut = divergence > bound and ((a > 0 and p > q) or (a < 0 and p < q))
    return 0.0 if cut else -math.exp(x - b) * a


def sapo(
    x: float, f: float, b: float, a: float, lag: int, prox: float,
    temperature_positive: float = 1.0, temperature_negative: float = 1.05,
) -> float:  # fmt: skip
    t = temperature_positive if a > 0 else temperature_negative
    return -a * (4 / t) / (1 + math.exp(-t * (math.exp(x - b) - 1)))


def topr(case: Case, x: Rows, frozen: Rows, high: float = 1.0) -> Rows:
    result = []
    for xs, fs, (_, bs, advantages, _, _) in zip(x, frozen, case.sequences, strict=True):
        whole = math.prod(math.exp(f - b) for f, b in zip(fs, bs, strict=True))
        result.append([-(1 if a >= 0 else min(whole, high)) * a * v for v, a in zip(xs, advantages, strict=True)])
    return result


CHECKED: list[tuple[str, Callable[..., Rows], dict[str, Any]]] = [
    ("reinforce", by_token(reinforce), {}),
    ("ppo", by_token(ppo), {}),
    ("ppo", by_token(ppo), {"clip_low": 0.1, "clip_high": 0.28, "dual_clip": 2.5}),
    ("grpo", by_token(grpo), {}),
    ("grpo", by_token(grpo), {"clip_low": 0.3, "clip_high": 0.1, "truncate": 0.0}),
    ("grpo", by_token(grpo), {"truncate": 1.5}),
    ("cispo", by_token(cispo), {}),
    ("cispo", by_token(cispo), {"low": 0.6, "high": 1.5}),
    ("topr", topr, {}),
    ("topr", topr, {"high": 0.5}),
    ("decoupled", by_token(decoupled), {}),
    ("decoupled", by_token(decoupled), {"approximate": False, "high": 1.2}),
    ("dppo_tv", by_token(dppo_tv), {}),
    ("dppo_tv", by_token(dppo_tv), {"bound": 0.02}),
    ("dppo_kl", by_token(dppo_kl), {}),
    ("dppo_kl", by_token(dppo_kl), {"bound": 0.004}),
    ("sapo", by_token(sapo), {}),
    ("sapo", by_token(sapo), {"temperature_positive": 2.0, "temperature_negative": 0.5}),
]
NAMES = sorted({name for name, _, _ in CHECKED} | {"gspo"})


@pytest.mark.parametrize(("name", "reference", "options"), CHECKED)
@settings(max_examples=40)
@given(case=cases())
def test_value_and_gradient(name: str, reference: Callable[..., Rows], options: dict[str, Any], case: Case) -> None:
    at = case.logprobs
    wanted = [v for row in reference(case, at, at, **options) for v in row]
    tokens = case.tokens()
    loss = getattr(losses, name)(tokens, **options)
    assert loss.tolist() == pytest.approx(wanted, rel=1e-6, abs=1e-6)
    loss.sum().backward()
    assert_slopes(tokens.logprobs.grad.tolist(), slopes(lambda x: sum(map(sum, reference(case, x, at, **options))), at))
    single = getattr(losses, name)(case.tokens(torch.float32), **options)
    differs = (single.double() - loss).abs() > 1e-5 * loss.abs().clamp(min=1)
    assert not (differs & ~at_a_bound(name, case, options)).any()


def at_a_bound(name: str, case: Case, options: dict[str, Any]) -> torch.Tensor:
    """Tokens whose DPPO mask depends on the last digits and may differ in float32."""
    double = torch.zeros(len(case.tokens().logprobs), dtype=torch.bool)
    if name in ("dppo_tv", "dppo_kl"):
        bound = options.get("bound", 0.15 if name == "dppo_tv" else 0.05)
        around = [getattr(losses, name)(case.tokens(), bound=bound * (1 + e)) for e in (-1e-4, 1e-4)]
        double = around[0] != around[1]
        double |= (case.tokens().ratio - 1).abs() < 1e-5
    return double


@given(cases(one_advantage=True))
def test_gspo_clips_the_ratio_of_sequences(case: Case) -> None:
    """The mean over sequences of min(s A, clip(s) A) with s = (product of r)^(1/length), differentiated directly."""
    low, high = 0.1, 0.2

    def objective(x: Rows) -> float:
        total = 0.0
        for xs, (_, bs, advantages, _, _) in zip(x, case.sequences, strict=True):
            s = math.prod(math.exp(v - b) for v, b in zip(xs, bs, strict=True)) ** (1 / len(xs))
            total += min(s * advantages[0], clip(s, 1 - low, 1 + high) * advantages[0])
        return -total / len(x)

    tokens = case.tokens()
    lengths = torch.tensor([float(len(row)) for row in case.logprobs], dtype=torch.float64)
    weights = aggregation.sequence_mean(lengths)[tokens.sequence]
    loss = (losses.gspo(tokens, clip_low=low, clip_high=high) * weights).sum()
    assert loss.item() == pytest.approx(objective(case.logprobs), rel=1e-6, abs=1e-6)
    loss.backward()
    assert_slopes(tokens.logprobs.grad.tolist(), slopes(objective, case.logprobs))
    single = losses.gspo(case.tokens(torch.float32), clip_low=low, clip_high=high)
    assert single.tolist() == pytest.approx(losses.gspo(case.tokens(), clip_low=low, clip_high=high).tolist(), abs=1e-4)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=20)
@given(case=cases())
def test_on_policy_every_loss_has_the_policy_gradient(name: str, case: Case) -> None:
    tokens = case.tokens()
    tokens = dataclasses.replace(tokens, behaviour=tokens.logprobs.detach(), proximal=tokens.logprobs.detach())
    getattr(losses, name)(tokens).sum().backward()
    assert tokens.logprobs.grad.tolist() == pytest.approx((-tokens.advantages).tolist(), abs=1e-9)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=20)
@given(case=cases())
def test_without_advantage_there_is_no_gradient(name: str, case: Case) -> None:
    tokens = dataclasses.replace(case.tokens(), advantages=torch.zeros_like(case.tokens().advantages))
    loss = getattr(losses, name)(tokens)
    loss.sum().backward()
    assert loss.abs().max() == 0 and tokens.logprobs.grad.abs().max() == 0


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=20)
@given(case=cases())
def test_losses_are_independent_of_other_sequences(name: str, case: Case) -> None:
    """The composition of a micro-batch changes no token's loss."""
    together = getattr(losses, name)(case.tokens()).tolist()
    alone: list[float] = []
    for i in range(len(case.logprobs)):
        one = Case(*([part[i]] for part in dataclasses.astuple(case)))
        alone += getattr(losses, name)(one.tokens()).tolist()
    assert alone == pytest.approx(together, rel=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_empty_input(name: str) -> None:
    loss = getattr(losses, name)
    nothing = torch.zeros(0, dtype=torch.float64)
    indices = torch.zeros(0, dtype=torch.long)
    assert loss(Tokens(nothing, nothing, nothing, indices, indices, nothing)).shape == (0,)
    case = Case([[-1.0, -2.0], [-1.5]], [[-1.0, -2.0], [math.nan]], [[1.0, 1.0], [1.0]], [[0, 0], [0]],
                [[-1.0, -2.0], [-1.5]])  # fmt: skip
    found = loss(case.tokens()).isnan().tolist()
    assert found[:2] == [False, False], "a token of NaN stays alone"
    assert found[2] or name in ("reinforce", "topr")  # these take no account of who drew a token with A >= 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
@pytest.mark.parametrize(("logprob", "behaviour"), [(-0.1, -300.0), (-300.0, -0.1), (-0.0, -0.0)])
def test_large_ratios_stay_finite_in_float32(name: str, advantage: float, logprob: float, behaviour: float) -> None:
    tokens = Case([[logprob]], [[behaviour]], [[advantage]], [[1]], [[logprob]]).tokens(torch.float32)
    loss = getattr(losses, name)(tokens)
    loss.sum().backward()
    assert loss.isfinite().all() and tokens.logprobs.grad.isfinite().all()


@pytest.mark.parametrize(
    ("ratio", "advantage", "slope"),
    [
        (1.0, 1.0, -1.0),  # on policy: REINFORCE
        (1.5, 1.0, 0.0),  # far above, should rise: clipped
        (0.5, 1.0, -0.5),  # far below, should rise: brought back
        (0.5, -1.0, 0.0),  # far below, should fall: clipped
        (1.5, -1.0, 1.5),  # far above, should fall: brought back
        (9.0, -1.0, 3.0),  # very far above, should fall: with a truncated weight
    ],
)
def test_grpo_clips_by_sign_of_the_advantage(ratio: float, advantage: float, slope: float) -> None:
    tokens = Case([[math.log(ratio)]], [[0.0]], [[advantage]], [[0]], [[0.0]]).tokens()
    losses.grpo(tokens).sum().backward()
    assert tokens.logprobs.grad.item() == pytest.approx(slope, abs=1e-9)


HALF = math.log(0.5)
WIDE = {"clip_low": 0.5, "clip_high": 1.0}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ppo", WIDE),
        ("grpo", WIDE),
        ("gspo", WIDE),
        ("decoupled", WIDE | {"approximate": False}),
        ("decoupled", WIDE),
        ("dppo_tv", {"bound": 0.25}),
    ],
)
@pytest.mark.parametrize(("ratio", "advantage"), [(2.0, 1.0), (0.5, -1.0)])
def test_clip_bounds_are_inclusive(name: str, options: dict[str, Any], ratio: float, advantage: float) -> None:
    """Ratios are exact powers of two: full gradient on the bound, none just beyond it."""
    behaviour = HALF if ratio < 1 else 2 * HALF
    for beyond, slope in ((0.0, -ratio * advantage), (1e-6, 0.0)):
        logprob = behaviour + math.log(ratio) + math.copysign(beyond, ratio - 1)
        tokens = Case([[logprob]], [[behaviour]], [[advantage]], [[1]], [[behaviour]]).tokens()
        getattr(losses, name)(tokens, **options).sum().backward()
        assert tokens.logprobs.grad.item() == pytest.approx(slope, abs=1e-9)


def test_dual_clip_removes_gradients_of_large_ratios() -> None:
    for ratio, slope in ((2.9, 2.9), (3.1, 0.0)):
        tokens = Case([[math.log(ratio)]], [[0.0]], [[-1.0]], [[0]], [[0.0]]).tokens()
        losses.ppo(tokens, dual_clip=3.0).sum().backward()
        assert tokens.logprobs.grad.item() == pytest.approx(slope, abs=1e-9)


def test_proximal_policy_is_interpolated_by_lag() -> None:
    tokens = Case([[-1.0] * 4], [[-3.0] * 4], [[1.0] * 4], [[0, 1, 2, 4]], [[0.0] * 4]).tokens()
    assert proximal_from_lag(tokens).tolist() == pytest.approx([-1.0, -3.0, -2.0, -1.5])


def test_every_loss_has_a_reference() -> None:
    assert {f.__name__ for f in LOSSES} == set(NAMES)


def test_reverse_kl_needs_a_teacher() -> None:
    with pytest.raises(ValueError, match="teacher"):
        reverse_kl(Case([[-1.0]], [[-1.0]], [[0.0]], [[0]], [[-1.0]]).tokens())
