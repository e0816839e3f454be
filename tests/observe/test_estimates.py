"""Statistics of evaluations against brute force: all subsets, all sign flips, and simulated evaluations."""

from __future__ import annotations

import itertools
import math
import random
from fractions import Fraction
from statistics import fmean

import numpy as np
import pytest

from slipstream.observe.estimates import (
    FLIPS,
    compare_paired,
    estimate_mean,
    pass_at_k,
    sign_flip_p,
    student_interval,
)

DIFFICULTIES = {  # parameters of the Beta distribution of a task's success probability
    "bimodal": (0.5, 0.5), "middling": (2, 5), "uniform": (1, 1), "hard": (0.3, 2), "easy": (3, 0.4),
}  # fmt: skip
RUNS = 4000


@pytest.mark.parametrize("count", range(1, 9))
def test_pass_at_k_is_the_mean_over_all_subsets(count: int) -> None:
    for correct, k in itertools.product(range(count + 1), range(1, count + 1)):
        scores = [1] * correct + [0] * (count - correct)
        subsets = list(itertools.combinations(scores, k))
        exact = Fraction(sum(map(max, subsets)), len(subsets))
        assert pass_at_k(scores, k) == pytest.approx(float(exact), abs=1e-12)
        assert pass_at_k(scores, k) == pytest.approx(1 - math.comb(count - correct, k) / math.comb(count, k), abs=1e-12)


def test_the_best_of_fractional_scores_is_the_mean_over_all_subsets() -> None:
    scores = [0.3, 2.0, -1.0, 0.3, 0.75]
    for k in range(1, 6):
        assert pass_at_k(scores, k) == pytest.approx(fmean(map(max, itertools.combinations(scores, k))))
    assert pass_at_k([0.0] * 3000 + [1.0] * 3000, 1500) == pytest.approx(1.0), "numbers beyond all floats"


def test_pass_at_k_is_unbiased() -> None:
    rng = random.Random(0)
    found = fmean(pass_at_k([float(rng.random() < 0.2) for _ in range(6)], 3) for _ in range(40_000))
    assert found == pytest.approx(1 - 0.8**3, abs=0.005)


@pytest.mark.parametrize("samples", [1, 4, 16])
@pytest.mark.parametrize("tasks", [100, 400])
@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_intervals_of_means_cover_the_true_score(difficulty: str, tasks: int, samples: int) -> None:
    a, b = DIFFICULTIES[difficulty]
    rng = np.random.default_rng(0)
    means = rng.binomial(samples, rng.beta(a, b, (RUNS, tasks))) / samples
    found = [estimate_mean(row) for row in means.tolist()]
    assert 0.93 <= fmean(low <= a / (a + b) <= high for _, low, high in found) <= 0.97


@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_intervals_of_pass_at_k_cover_the_true_rate(difficulty: str) -> None:
    rng = np.random.default_rng(0)
    true = 1 - float(np.mean((1 - rng.beta(*DIFFICULTIES[difficulty], 1_000_000)) ** 4))
    table = [pass_at_k([1.0] * correct + [0.0] * (8 - correct), 4) for correct in range(9)]
    rates = np.array(table)[rng.binomial(8, rng.beta(*DIFFICULTIES[difficulty], (RUNS, 200)))]
    found = [estimate_mean(row) for row in rates.tolist()]
    most = 0.99 if true > 0.98 else 0.97  # 2 of 200 tasks say little
    assert 0.93 <= fmean(low <= true <= high for _, low, high in found) <= most


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize("gain", [0.0, 0.6])
@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_intervals_of_differences_cover_the_true_gain(difficulty: str, gain: float, samples: int) -> None:
    """The second policy solves each task with a probability that is larger by `gain` * p * (1 - p)."""
    rng = np.random.default_rng(1)
    everything, chances = (rng.beta(*DIFFICULTIES[difficulty], size) for size in (1_000_000, (RUNS, 100)))
    true = float(np.mean(gain * everything * (1 - everything)))
    before = rng.binomial(samples, chances) / samples
    after = rng.binomial(samples, chances + gain * chances * (1 - chances)) / samples
    found = [student_interval(row) for row in (after - before).tolist()]
    assert 0.93 <= fmean(low <= true <= high for _, low, high in found) <= 0.97


def test_intervals_of_equal_and_of_unbounded_scores() -> None:
    assert estimate_mean([0.0] * 10) == (0, 0, pytest.approx(0.2775, abs=1e-4)), "as Wilson's for 0 of 10"
    assert estimate_mean([1.0])[1] < 0.21, "a single task says little"
    assert estimate_mean([0.5])[1:] == pytest.approx((0.0546, 0.9454), abs=1e-4), "Wilson's for half of 1"
    for count, quantile in ((2, 12.7062), (3, 4.3027), (4, 3.1824), (6, 2.5706), (11, 2.2281), (101, 1.9840)):
        values = [0.0, 1.0] * (count // 2) + [0.5] * (count % 2)
        spread = np.std(values, ddof=1) / math.sqrt(count)
        assert (student_interval(values).high - 0.5) / spread == pytest.approx(quantile, rel=2e-3)
    half = 2.776 * math.sqrt(2.5 / 5)  # the quantile of a table
    assert estimate_mean([3.0, 5.0, 4.0, 6.0, 2.0]) == pytest.approx((4, 4 - half, 4 + half), abs=0.01)
    assert all(map(math.isnan, estimate_mean([3.0])[1:]))


def flips(differences: list[float]) -> Fraction:
    """The p-value by enumeration of all signs."""
    observed = abs(sum(differences)) - 1e-9
    signs = list(itertools.product((-1, 1), repeat=len(differences)))
    hits = sum(abs(sum(s * d for s, d in zip(sign, differences, strict=True))) >= observed for sign in signs)
    return Fraction(hits, len(signs))


@pytest.mark.parametrize("samples", [1, 2, 4, 6])
def test_the_paired_test_is_that_of_all_sign_flips(samples: int) -> None:
    rng = random.Random(samples)
    for _ in range(30):
        differences = [rng.randint(-samples, samples) / samples for _ in range(rng.randint(1, 11))]
        assert sign_flip_p(differences, samples) == pytest.approx(float(flips(differences)), abs=1e-12)


def test_fractional_differences_are_flipped_at_random() -> None:
    differences = [0.31, 0.11, -0.07, 0.4137, 0.25, 0.0, 0.18, -0.02, 0.33]
    assert sign_flip_p(differences) == pytest.approx(float(flips(differences)), abs=4 / math.sqrt(FLIPS))
    assert sign_flip_p(differences) == sign_flip_p(differences), "the flips are seeded"


def test_the_paired_test_of_single_samples_is_mcnemars() -> None:
    better, worse = 14, 5
    before, after = [0.0] * better + [1.0] * worse + [1.0] * 30, [1.0] * better + [0.0] * worse + [1.0] * 30
    found = compare_paired(before, after)
    binomial = 2 * sum(math.comb(19, i) for i in range(worse + 1)) / 2**19
    assert found.p_value == pytest.approx(binomial) and (found.better, found.worse, found.equal) == (14, 5, 30)
    assert found.difference.value == pytest.approx(9 / 49)
    assert compare_paired([0.5, 1.0], [0.5, 1.0], 2).p_value == 1.0


def test_the_paired_test_rejects_a_true_null_hypothesis_rarely() -> None:
    rng = np.random.default_rng(2)
    chances = rng.beta(0.5, 0.5, (800, 60))
    before, after = (rng.binomial(4, chances) / 4 for _ in range(2))
    found = [sign_flip_p((a - b).tolist(), 4) for a, b in zip(after, before, strict=True)]
    assert 0.03 <= fmean(p <= 0.05 for p in found) <= 0.06
