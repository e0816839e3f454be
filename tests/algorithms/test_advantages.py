"""Advantages, aggregations and step statistics against formulas written by hand."""

from __future__ import annotations

import itertools
import math
import statistics as plain
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.algorithms import advantages, aggregation
from slipstream.algorithms.corrections import mask_tokens
from slipstream.algorithms.losses import grpo
from slipstream.algorithms.statistics import SUMS, means, sums
from slipstream.algorithms.token_gradients import TokenGradients, token_gradients
from slipstream.algorithms.tokens import Tokens
from slipstream.rollout import Completion, Group, Rollout, VersionSpan
from tests.algorithms.cases import Case, cases

rewards = st.lists(st.floats(-10, 10).map(lambda x: round(x, 3)), min_size=1, max_size=8)
groups = st.lists(rewards, min_size=1, max_size=4)


def tensor(values: list[float], dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


@given(rewards, st.booleans())
def test_group_mean(values: list[float], normalize: bool) -> None:
    got = advantages.group_mean(tensor(values), normalize=normalize).tolist()
    if len(set(values)) == 1:
        assert got == [0.0] * len(values)
        return
    centre, deviation = plain.fmean(values), plain.pstdev(values)
    assert got == pytest.approx([(v - centre) / (deviation if normalize else 1) for v in values], abs=1e-6)
    single = advantages.group_mean(tensor(values, torch.float32), normalize=normalize).tolist()
    if deviation > 0.1:
        assert single == pytest.approx(got, abs=2e-5 * max(1, max(map(abs, values)) / (deviation if normalize else 1)))


@given(rewards)
def test_leave_one_out(values: list[float]) -> None:
    got = advantages.leave_one_out(tensor(values)).tolist()
    others = [values[:i] + values[i + 1 :] for i in range(len(values))]
    wanted = [v - plain.fmean(o) if o else 0.0 for v, o in zip(values, others, strict=True)]
    assert got == pytest.approx(wanted, abs=1e-6)


@given(rewards, st.integers(1, 6))
def test_pass_at_k_over_all_sets(values: list[float], k: int) -> None:
    """The definition, set by set: how much member i adds to the best reward of each set of k."""
    n, size = len(values), min(k, len(values))
    got = advantages.pass_at_k(tensor(values), k=k).tolist()
    if size < 2:
        assert got == advantages.leave_one_out(tensor(values)).tolist()
        return
    wanted = []
    for i in range(n):
        sets = [s for s in itertools.combinations(range(n), size) if i in s]
        gains = [max(values[j] for j in s) - max(values[j] for j in s if j != i) for s in sets]
        wanted.append(n / math.comb(n, size) * sum(gains))
    assert got == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize(("n", "k"), [(3, 2), (4, 2), (4, 3), (3, 3), (4, 1)])
def test_pass_at_k_has_the_gradient_of_the_expected_best_of_k(n: int, k: int) -> None:
    """In expectation over all samples of n from 3 outcomes, the policy gradient is that of E[best of k]."""
    scores = [0.0, 0.3, 1.0]

    def best_of_k(p: Tensor) -> Tensor:
        draws = itertools.product(range(3), repeat=k)
        return torch.stack([max(scores[o] for o in d) * p[list(d)].prod() for d in draws]).sum()

    logits = tensor([0.2, -0.4, 0.5]).requires_grad_()
    best_of_k(logits.softmax(0)).backward()
    wanted, logits.grad = logits.grad, None
    total = torch.zeros((), dtype=torch.float64)
    for draw in itertools.product(range(3), repeat=n):
        logprobs = logits.log_softmax(0)[list(draw)]
        scored = advantages.pass_at_k(tensor([scores[o] for o in draw]), k=k)
        total = total + logprobs.sum().exp().detach() * (scored * logprobs).sum() / n
    total.backward()
    assert logits.grad.tolist() == pytest.approx(wanted.tolist(), abs=1e-9)


@given(groups)
def test_whitened_groups_have_mean_0_and_deviation_1(values: list[list[float]]) -> None:
    flat = [v for g in values for v in g]
    got = advantages.whiten([tensor(g) for g in values])
    assert [len(g) for g in got] == [len(g) for g in values]
    found = torch.cat(got).tolist()
    if len(set(flat)) == 1:
        assert found == [0.0] * len(flat)
        return
    wanted = [(v - plain.fmean(flat)) / plain.pstdev(flat) for v in flat]
    assert found == pytest.approx(wanted, rel=1e-6, abs=1e-6)


def test_missing_rewards_are_left_out_of_the_baseline() -> None:
    nan = math.nan
    for rule in (advantages.group_mean, advantages.leave_one_out, advantages.pass_at_k, advantages.reward):
        (with_it,) = advantages.group_advantages([tensor([1.0, nan, 0.0, 0.5])], rule)
        assert with_it[[0, 2, 3]].tolist() == rule(tensor([1.0, 0.0, 0.5])).tolist() and with_it[1].isnan()
        (none,) = advantages.group_advantages([tensor([nan, nan])], rule)
        assert none.isnan().all()
    white = advantages.whiten([tensor([1.0, nan]), tensor([3.0])])
    assert white[0][0] == -1 and white[0][1].isnan() and white[1].tolist() == [1.0]


@pytest.mark.parametrize("rule", [advantages.group_mean, advantages.leave_one_out, advantages.pass_at_k])
@pytest.mark.parametrize("values", [[], [3.0], [0.1] * 3, [1e-300] * 2])
def test_equal_rewards_have_zero_advantage(rule: advantages.Advantage, values: list[float]) -> None:
    assert rule(tensor(values)).tolist() == [0.0] * len(values)


def test_reward_parts_are_scaled_separately() -> None:
    """GDPO's example: in the sum one part dominates; as parts, equal weights have equal influence."""
    right, short = tensor([1.0, 0.0, 1.0, 0.0]), tensor([0.0, 500.0, 500.0, 0.0])
    normalized = partial(advantages.group_mean, normalize=True)
    (got,) = advantages.weighted_parts({"right": [right], "short": [short]}, {"right": 1.0, "short": 0.5}, normalized)
    assert got.tolist() == pytest.approx([1 - 0.5, -1 + 0.5, 1 + 0.5, -1 - 0.5])
    short[0] = math.nan
    (got,) = advantages.weighted_parts({"right": [right], "short": [short]}, {"right": 1.0, "short": 1.0}, normalized)
    assert got[0].item() == pytest.approx(1.0), "a part that was not given says nothing"


@settings(max_examples=50)
@given(st.data(), st.booleans())
def test_process_rewards_are_summed_over_later_steps(data: st.DataObject, normalize: bool) -> None:
    lengths = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=3))
    ends = [sorted(data.draw(st.sets(st.integers(0, n - 1)))) if n else [] for n in lengths]
    scores = [[data.draw(st.sampled_from([-1.0, 0.0, 0.5, 2.0])) for _ in e] for e in ends]
    got = advantages.process_rewards(
        [tensor(s) for s in scores], [torch.tensor(e, dtype=torch.long) for e in ends], lengths, normalize=normalize
    )
    flat = [s for row in scores for s in row]
    same = len(set(flat)) < 2
    centre, scale = (plain.fmean(flat), plain.pstdev(flat)) if not same else (0.0, 1.0)
    for found, row, last, length in zip(got, scores, ends, lengths, strict=True):
        level = [0.0 if same else (s - centre) / (scale if normalize else 1) for s in row]
        wanted = [sum(v for v, e in zip(level, last, strict=True) if e >= t) for t in range(length)]
        assert found.tolist() == pytest.approx(wanted, abs=1e-6)


def test_overlong_penalty() -> None:
    penalty = partial(advantages.overlong_penalty, longest=100, soft=20)
    assert [penalty(n) for n in (0, 80, 85, 90, 100, 130)] == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    assert [advantages.overlong_penalty(n, longest=10, soft=0) for n in (10, 11)] == [0.0, -1.0]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_aggregations(lengths: list[int]) -> None:
    """Token mean, sequence mean and constant denominator, from their definitions."""
    sizes = tensor([float(n) for n in lengths])
    losses = [[float(i + 10 * j + 1) for j in range(n)] for i, n in enumerate(lengths)]
    used = [row for row in losses if row]

    def average(weights: Tensor) -> float:
        assert weights.isfinite().all()
        return sum(w * v for w, row in zip(weights.tolist(), losses, strict=True) for v in row)

    flat = [v for row in used for v in row]
    assert average(aggregation.token_mean(sizes)) == pytest.approx(plain.fmean(flat) if flat else 0.0)
    by_sequence = plain.fmean([plain.fmean(row) for row in used]) if used else 0.0
    assert average(aggregation.sequence_mean(sizes)) == pytest.approx(by_sequence)
    assert average(aggregation.constant(sizes, length=8)) == pytest.approx(sum(flat) / 8 / len(used) if used else 0.0)


def described(tokens: Tokens, *parts: slice) -> dict[str, float]:
    """Statistics of a step whose tokens are summed in these parts."""
    gradients = token_gradients(tokens, grpo, [mask_tokens], lambda _: tokens.logprobs, 0.0)
    columns = [c.detach() for c in (tokens.logprobs, tokens.behaviour, tokens.advantages, tokens.sequence, tokens.lag,
                                    tokens.proximal)]  # fmt: skip
    total = torch.zeros(len(SUMS), dtype=torch.float64)
    for part in parts:
        some = Tokens(*(column[part] for column in columns))
        total += sums(
            some, TokenGradients(*(c[part] for c in gradients)), torch.ones_like(some.logprobs), torch.tensor(0.5)
        )
    largest = tokens.ratio.max().item() if len(tokens.logprobs) else -math.inf
    return means(dict(zip(SUMS, total.tolist(), strict=True)), largest)


@settings(max_examples=50)
@given(cases())
def test_step_statistics(case: Case) -> None:
    tokens = case.tokens()
    found = described(tokens, slice(0, 2), slice(2, None))
    flat = [t for s in case.sequences for t in zip(*s, strict=True)]
    ratios = [math.exp(x - b) for x, b, *_ in flat]
    assert found["mismatch_kl"] == pytest.approx(plain.fmean(r - 1 - math.log(r) for r in ratios), abs=1e-6)
    assert found["ratio_mean"] == pytest.approx(plain.fmean(ratios))
    assert found["ratio_max"] == pytest.approx(max(ratios))
    squares = len(ratios) * sum(r * r for r in ratios)
    assert found["effective_sample_size"] == pytest.approx(sum(ratios) ** 2 / squares)
    signal = [(r, a) for r, (_, _, a, _, _) in zip(ratios, flat, strict=True) if a]
    clipped = [(r > 1.2 and a > 0) or (r < 0.8 and a < 0) for r, a in signal]
    assert found["clip_fraction"] == pytest.approx(plain.fmean(clipped) if clipped else 0.0)
    assert found["masked_fraction"] == pytest.approx(plain.fmean(not 0.5 <= r <= 5 for r in ratios))


def test_step_statistics_without_tokens() -> None:
    nothing, indices = torch.zeros(0), torch.zeros(0, dtype=torch.long)
    found = described(Tokens(nothing.requires_grad_(), nothing, nothing, indices, indices, nothing), slice(None))
    one = Case([[-1.0]], [[-1.0]], [[1.0]], [[0]], [[0.0]]).tokens()
    assert found.keys() == described(one, slice(None)).keys()
    assert found["ratio_mean"] == found["effective_sample_size"] == 1 and found["mismatch_kl"] == 0


def test_advantages_are_computed_per_role() -> None:
    def played(reward: float, role: str) -> Rollout:
        return Rollout((Completion((1,), (2,), (-1.0,), (VersionSpan(0, 0, 1),), "stop"),), reward, role=role)

    roles = ["proposer", "solver", "proposer", "solver", "solver", "alone"]
    rewards = [0.0, 10.0, 1.0, 11.0, 12.0, 5.0]
    group = Group(0, "t", tuple(map(played, rewards, roles)))
    batch = advantages.make_batch([group, Group(1, "u", (played(3.0, ""), played(1.0, "")))])
    assert batch.advantages == ((-0.5, -1.0, 0.5, 0.0, 1.0, 0.0), (1.0, -1.0))
    apart = Group(2, "v", tuple(map(played, [1.0, 2.0, 1.0, 2.0], roles[:4])))
    assert advantages.make_batch([group, apart]).signal == [True, False]
    scaled = advantages.make_batch([group], whitened=True).advantages[0]
    assert sum(scaled) == pytest.approx(0.0) and scaled[0] < 0 < scaled[2]
