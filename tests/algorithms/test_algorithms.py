"""Advantages and losses against formulas written out by hand in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.algorithms.advantages import group_mean, make_batch
from slipstream.algorithms.losses import grpo, kl_to_reference, off_policy_statistics
from slipstream.rollout import Completion, Group, Rollout, VersionSpan

rewards = st.lists(st.floats(-10, 10).map(lambda x: round(x, 3)), min_size=2, max_size=9)


@given(rewards, st.booleans())
def test_group_mean(values: list[float], normalize: bool) -> None:
    got = group_mean(torch.tensor(values, dtype=torch.float64), normalize=normalize).tolist()
    centre = sum(values) / len(values)
    deviation = math.sqrt(sum((v - centre) ** 2 for v in values) / len(values))
    if len(set(values)) == 1:
        assert got == [0.0] * len(values)
        return
    wanted = [(v - centre) / (deviation if normalize else 1) for v in values]
    assert got == pytest.approx(wanted, abs=1e-6)
    assert sum(got) == pytest.approx(0, abs=1e-6)


def test_groups_are_scored_by_member_whatever_their_size() -> None:
    def group(entry: int, *scores: float) -> Group:
        completion = Completion((1,), (2,), (-1.0,), (VersionSpan(0, 0, 1),), "stop")
        return Group(entry, str(entry), tuple(Rollout((completion,), s) for s in scores))

    batch = make_batch([group(0, 1, 0), group(1, 2, 2, 2), group(2, 0, 0, 3, 1)], normalize=False)
    assert batch.advantages == ((0.5, -0.5), (0, 0, 0), (-1, -1, 2, 0))
    assert batch.tokens == 9 and len(batch.samples()) == 9


def by_hand(
    logp: float, behaviour: float, advantage: float, low: float, high: float, truncate: float
) -> tuple[float, float]:
    """Value and derivative of the GRPO loss with respect to the log-probability."""
    ratio = math.exp(logp - behaviour)
    weight = min(ratio, truncate) if truncate else ratio
    clipped = min(max(ratio, 1 - low), 1 + high)
    if weight * advantage <= clipped * advantage:
        return -weight * advantage, -weight * advantage
    return -clipped * advantage, -ratio * advantage if 1 - low <= ratio <= 1 + high else 0.0


@given(
    st.floats(-5, 0), st.floats(-5, 0), st.floats(-3, 3), st.sampled_from([0.1, 0.2]), st.sampled_from([0.2, 0.3]),
    st.sampled_from([0.0, 2.0, 3.0]),
)  # fmt: skip
def test_grpo(logp: float, behaviour: float, advantage: float, low: float, high: float, truncate: float) -> None:
    x = torch.tensor([logp], dtype=torch.float64, requires_grad=True)
    loss = grpo(x, torch.tensor([behaviour], dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64),
                clip_low=low, clip_high=high, truncate=truncate)  # fmt: skip
    loss.sum().backward()
    value, slope = by_hand(logp, behaviour, advantage, low, high, truncate)
    assert loss.item() == pytest.approx(value, abs=1e-9)
    assert x.grad is not None
    assert x.grad.item() == pytest.approx(slope, abs=1e-9)


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
def test_grpo_clips_the_right_side(ratio: float, advantage: float, slope: float) -> None:
    x = torch.tensor([math.log(ratio)], requires_grad=True)
    grpo(x, torch.zeros(1), torch.tensor([advantage]), clip_low=0.2, clip_high=0.2, truncate=3.0).sum().backward()
    assert x.grad is not None
    assert x.grad.item() == pytest.approx(slope, abs=1e-6)


@given(st.floats(-5, 0), st.floats(-5, 0))
def test_kl_estimate_is_never_negative_and_zero_at_home(logp: float, reference: float) -> None:
    estimate = kl_to_reference(
        torch.tensor([logp], dtype=torch.float64), torch.tensor([reference], dtype=torch.float64)
    ).item()
    assert estimate == pytest.approx(math.exp(reference - logp) - 1 - (reference - logp), abs=1e-9)
    assert estimate >= -1e-12
    assert kl_to_reference(torch.tensor([logp]), torch.tensor([logp])).item() == 0


def test_statistics_count_what_the_clip_removes() -> None:
    logp = torch.log(torch.tensor([1.0, 1.5, 0.5, 1.5, 0.5]))
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0])
    sums = off_policy_statistics(logp, torch.zeros(5), advantages, clip_low=0.2, clip_high=0.2)
    assert sums["clipped"].item() == 2
    assert sums["ratio"].item() == pytest.approx(5.0)
    assert sums["ratio_squared"].item() == pytest.approx(6.0)
    expected = sum(r - 1 - math.log(r) for r in (1.0, 1.5, 0.5, 1.5, 0.5))
    assert sums["mismatch_kl"].item() == pytest.approx(expected, rel=1e-5)
