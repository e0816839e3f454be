"""KL to a reference and distillation, against exact values over full distributions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.algorithms import distillation, kl
from slipstream.algorithms.tokens import Tokens
from tests.algorithms.cases import Case, cases

VOCABULARY = 7


def distributions(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of a policy, and the log-probabilities of a behaviour policy and of a reference."""
    made = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return made[0], made[1].log_softmax(0), made[2].log_softmax(0)


def expected_gradient(loss: Callable[[Tokens], Tensor], drawn_by: Tensor, logits: Tensor, other: Tensor) -> Tensor:
    """Gradient by the logits of a loss, in expectation over the tokens of `drawn_by`."""
    logits = logits.clone().requires_grad_()
    zeros = torch.zeros(VOCABULARY, dtype=torch.float64)
    index = torch.arange(VOCABULARY)
    tokens = Tokens(logits.log_softmax(0), drawn_by, zeros, index, torch.zeros_like(index), zeros, other, other)
    (loss(tokens) * drawn_by.exp()).sum().backward()
    assert logits.grad is not None
    return logits.grad


def true_gradient(divergence: Callable[[Tensor, Tensor], Tensor], logits: Tensor, other: Tensor) -> Tensor:
    logits = logits.clone().requires_grad_()
    divergence(logits.log_softmax(0), other).backward()
    assert logits.grad is not None
    return logits.grad


def reverse(policy: Tensor, other: Tensor) -> Tensor:
    return (policy.exp() * (policy - other)).sum()


def forward(policy: Tensor, other: Tensor) -> Tensor:
    return (other.exp() * (other - policy)).sum()


seeds = st.integers(0, 10_000)


@settings(max_examples=30)
@given(seeds)
def test_estimators_have_the_documented_value(seed: int) -> None:
    logits, _, other = distributions(seed)
    policy = logits.log_softmax(0)
    value = reverse(policy, other).item()
    for estimate in (kl.k1, kl.k3):
        assert (policy.exp() * estimate(policy - other)).sum().item() == pytest.approx(value, abs=1e-9)
    assert (kl.k3(policy - other) >= 0).all() and (kl.k2(policy - other) >= 0).all()


@settings(max_examples=30)
@given(seeds)
def test_estimators_have_the_documented_gradient(seed: int) -> None:
    """The table in the module's docstring: on policy, and off policy times the ratio."""
    logits, behaviour, other = distributions(seed)
    policy = logits.log_softmax(0)

    def found(estimator: str, weighted: bool, drawn_by: Tensor) -> list[float]:
        def loss(tokens: Tokens) -> Tensor:
            return kl.kl_to_reference(tokens, estimator=estimator, weighted=weighted)

        return expected_gradient(loss, drawn_by, logits, other).tolist()

    wanted = true_gradient(reverse, logits, other).tolist()
    assert found("k1", False, policy) == pytest.approx([0.0] * VOCABULARY, abs=1e-9)
    assert found("k2", False, policy) == pytest.approx(wanted, abs=1e-9)
    assert found("k3", False, policy) == pytest.approx(true_gradient(forward, logits, other).tolist(), abs=1e-9)
    for estimator in ("k1", "k3"):
        assert found(estimator, True, policy) == pytest.approx(wanted, abs=1e-9)
        assert found(estimator, True, behaviour) == pytest.approx(wanted, abs=1e-9)


@settings(max_examples=30)
@given(cases(), seeds)
def test_kl_of_tokens(case: Case, seed: int) -> None:
    for dtype, digits in ((torch.float64, 1e-6), (torch.float32, 1e-5)):
        tokens = case.tokens(dtype)
        tokens = dataclasses.replace(tokens, reference=tokens.proximal)
        rows = zip(case.logprobs, case.behaviour, case.proximal, strict=True)
        flat = [(x, b, p) for row in rows for x, b, p in zip(*row, strict=True)]
        for name, formula in (
            ("k1", lambda d: d), ("k2", lambda d: 0.5 * d * d), ("k3", lambda d: math.exp(-d) - 1 + d),
        ):  # fmt: skip
            plain = [formula(x - p) for x, _, p in flat]
            weighted = [math.exp(x - b) * formula(x - p) for x, b, p in flat]
            assert kl.kl_to_reference(tokens, estimator=name).tolist() == pytest.approx(plain, rel=digits, abs=digits)
            found = kl.kl_to_reference(tokens, estimator=name, weighted=True).tolist()
            assert found == pytest.approx(weighted, rel=digits, abs=digits)
        at_home = dataclasses.replace(tokens, reference=tokens.logprobs.detach())
        assert (kl.kl_to_reference(at_home) == 0).all()
    with pytest.raises(ValueError, match="reference"):
        kl.kl_to_reference(case.tokens())


@settings(max_examples=30)
@given(seeds)
def test_distillation_descends_the_reverse_kl(seed: int) -> None:
    """On policy, both the loss and a policy gradient with the advantages have the gradient of KL(policy ‖ teacher)."""
    from slipstream.algorithms.losses import ppo, reinforce

    logits, _, teacher = distributions(seed)
    policy = logits.log_softmax(0)
    wanted = true_gradient(reverse, logits, teacher).tolist()
    assert expected_gradient(distillation.reverse_kl, policy, logits, teacher).tolist() == pytest.approx(
        wanted, abs=1e-9
    )
    scores = distillation.advantages(policy, teacher)
    for loss in (reinforce, ppo):
        found = expected_gradient(
            lambda t, of=loss: of(dataclasses.replace(t, advantages=scores)), policy, logits, teacher
        )
        assert found.tolist() == pytest.approx(wanted, abs=1e-9)


@settings(max_examples=30)
@given(seeds)
def test_off_policy_distillation_is_unbiased_without_a_clip(seed: int) -> None:
    logits, behaviour, teacher = distributions(seed)
    wanted = true_gradient(reverse, logits, teacher).tolist()

    def loss(tokens: Tokens) -> Tensor:
        return distillation.reverse_kl(tokens, clip_low=1.0, clip_high=1e9, truncate=0.0)

    assert expected_gradient(loss, behaviour, logits, teacher).tolist() == pytest.approx(wanted, abs=1e-9)


@settings(max_examples=30)
@given(cases())
def test_reverse_kl_of_tokens(case: Case) -> None:
    tokens = dataclasses.replace(case.tokens(), teacher=case.tokens().proximal)
    loss = distillation.reverse_kl(tokens)
    loss.sum().backward()
    rows = zip(case.logprobs, case.behaviour, case.proximal, strict=True)
    values, slopes = [], []
    for x, b, t in (token for row in rows for token in zip(*row, strict=True)):
        ratio, gain = math.exp(x - b), t - x
        weighted, clipped = min(ratio, 3.0) * gain, min(max(ratio, 0.8), 1.2) * gain
        values.append(-min(weighted, clipped))
        slopes.append(0.0 if (ratio > 1.2 and gain > 0) or (ratio < 0.8 and gain < 0) else -weighted)
    assert loss.tolist() == pytest.approx(values, abs=1e-6)
    assert tokens.logprobs.grad.tolist() == pytest.approx(slopes, abs=1e-6)
    fresh = dataclasses.replace(tokens, behaviour=tokens.logprobs.detach())
    assert distillation.reverse_kl(fresh).tolist() == pytest.approx((tokens.logprobs - tokens.teacher).tolist())
