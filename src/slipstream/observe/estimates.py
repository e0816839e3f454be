"""Statistics of evaluation scores: pass@k, means with 95% confidence intervals, and a paired test of two policies.

`pass_at_k` takes the scores of one task's samples. Intervals and test take one value for each task, such as the mean of
its samples, which callers compute: tasks are independent, and the samples of a task are not (standard errors clustered
by task: Miller, "Adding Error Bars to Evals", 2024, arXiv:2411.00640).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

NORMAL = 1.959964  # 97.5% quantile
QUANTILES = math.inf, 12.706205, 4.302653, 3.182446, 2.776445  # of Student's t with 0, 1, ... degrees of freedom
MAX_UNITS = 1_000_000  # largest sum of differences, in units of 1/k, whose distribution is computed exactly
FLIPS = 100_000  # random sign flips of larger or fractional differences
PRIOR = 0.25  # weight of a design effect of 1, in tasks with the rarer outcome; chosen by simulation
TOLERANCE = 1e-9


class Estimate(NamedTuple):
    """A mean over tasks, and the bounds of its 95% confidence interval."""

    value: float
    low: float
    high: float


class Comparison(NamedTuple):
    """Difference of two mean scores on the same tasks, p-value of the paired test, and how many tasks changed."""

    difference: Estimate
    p_value: float
    better: int
    worse: int
    equal: int

    def as_dict(self) -> dict[str, Any]:
        """As in the output of `slipstream eval --json`."""
        return self._asdict() | {"difference": self.difference._asdict()}


def pass_at_k(scores: Sequence[float], k: int) -> float:
    """Expected best score of `k` samples of a task, estimated without bias from at least `k` samples.

    With scores 0 and 1 it is pass@k = 1 - C(n - c, k) / C(n, k) for c of n samples correct (Chen et al., "Evaluating
    Large Language Models Trained on Code", 2021, equation 1): the mean of the best score over all subsets of size k.
    """
    subsets = math.comb(len(scores), k)
    return sum(score * (math.comb(rank, k - 1) / subsets) for rank, score in enumerate(sorted(scores)))


def estimate_mean(values: Sequence[float]) -> Estimate:
    """Mean of one value for each task, with its 95% confidence interval for tasks drawn like these.

    Values between 0 and 1: Wilson's interval with the effective sample size tasks / design effect (Dean and Pagano,
    "Evaluating confidence interval methods for binomial proportions in clustered surveys", 2015). The design effect is
    the squared standard error over that of as many 0s and 1s; it is shrunk to 1 where few tasks differ from the others,
    which would underestimate it. Other values: as `student_interval`.
    """
    count, mean = len(values), float(np.mean(values))
    if min(values) < 0 or max(values) > 1:
        return student_interval(values)
    rare, spread = count * min(mean, 1 - mean), mean * (1 - mean)
    design = min(1.0, float(np.var(values, ddof=1)) / spread) if count > 1 and spread > 0 else 1.0
    design = (rare * design + PRIOR) / (rare + PRIOR)
    # The variance of 0s and 1s follows from their mean, and is not estimated.
    z = NORMAL if design > 1 - TOLERANCE else _quantile(count)
    return wilson_interval(mean, count / design, z)


def wilson_interval(fraction: float, count: float, z: float = NORMAL) -> Estimate:
    """Wilson's interval of a binomial fraction of `count`, within `z` standard deviations."""
    centre, scale = fraction + z * z / (2 * count), 1 + z * z / count
    half = z * math.sqrt(fraction * (1 - fraction) / count + z * z / (4 * count * count))
    return Estimate(fraction, max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale))


def student_interval(values: Sequence[float]) -> Estimate:
    """Mean of one value for each task, such as a difference, with Student's 95% interval; NaN for a single task."""
    count, mean = len(values), float(np.mean(values))
    half = _quantile(count) * float(np.std(values, ddof=1)) / math.sqrt(count) if count > 1 else math.nan
    return Estimate(mean, mean - half, mean + half)


def compare_paired(before: Sequence[float], after: Sequence[float], samples: int = 1) -> Comparison:
    """Compare two scores of each task. `samples` is a common multiple of the numbers of samples in both scores.

    The p-value is that of `sign_flip_p`.
    """
    differences = [b - a for a, b in zip(before, after, strict=True)]
    better, worse = sum(d > TOLERANCE for d in differences), sum(d < -TOLERANCE for d in differences)
    p_value = sign_flip_p(differences, samples)
    return Comparison(student_interval(differences), p_value, better, worse, len(differences) - better - worse)


def sign_flip_p(differences: Sequence[float], samples: int = 1) -> float:
    """Two-sided p-value of the permutation test: the share of random signs whose absolute sum is at least the observed.

    Exact for multiples of 1 / `samples`; for differences of single 0s and 1s it is McNemar's exact test. Else from
    `FLIPS` seeded flips and the observed signs (Phipson and Smyth, 2010).
    """
    scaled = np.array([d for d in differences if abs(d) > TOLERANCE]) * samples
    units = np.rint(scaled).astype(int)
    observed, most = abs(float(scaled.sum())) - TOLERANCE, int(np.abs(units).sum())
    if np.abs(scaled - units).max(initial=0) > 1e-6 or most > MAX_UNITS:
        rng = np.random.default_rng(0)
        sums = (abs((rng.integers(0, 2, (1000, len(scaled))) * 2 - 1) @ scaled) for _ in range(FLIPS // 1000))
        return float((1 + sum(int((s >= observed).sum()) for s in sums)) / (1 + FLIPS))
    probabilities = np.ones(1)  # of the sums -total, -total + 1, ..., total
    for unit in np.abs(units):
        zeros = np.zeros(2 * unit)
        probabilities = (np.concatenate([probabilities, zeros]) + np.concatenate([zeros, probabilities])) / 2
    return float(min(1.0, probabilities[np.abs(np.arange(-most, most + 1)) >= observed].sum()))


def _quantile(count: int) -> float:
    """97.5% quantile of Student's t with `count` - 1 degrees of freedom (Abramowitz and Stegun, 26.7.5).

    The series is exact to 0.2% from 5 degrees of freedom on, and too small below: 9.6 for 12.7.
    """
    z, v = NORMAL, count - 1
    if v < len(QUANTILES):
        return QUANTILES[v]
    terms = z**3 + z, 5 * z**5 + 16 * z**3 + 3 * z, 3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z
    return z + terms[0] / (4 * v) + terms[1] / (96 * v**2) + terms[2] / (384 * v**3)
