"""Evaluations before and after training: scores with 95% confidence intervals, and tasks whose outcome changed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from slipstream.observe.estimates import estimate_mean, student_interval, wilson_interval
from slipstream.observe.formatting import is_finite

SHOWN_TASKS = 3
Sample = Mapping[str, Any]  # a task's id, prompt, and its completion and reward, or why its episode failed


def compare_scores(evaluations: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Scores `before` and `after` (first and last evaluation) and their `difference`, each as [value, low, high].

    `method` says in words how the intervals were computed. The difference pairs the tasks of both evaluations if the
    records hold the outcomes of the same tasks. If a record has neither an interval nor outcomes, a score in [0, 1]
    gets Wilson's interval, and any other score None as bounds. After one evaluation `after` and
    `difference` are None. Returns None without a score.
    """
    scored = [e for e in evaluations if is_finite(e.get("eval/score"))]
    if not scored:
        return None
    first, last = scored[0], scored[-1]
    before, after = _outcomes(first), _outcomes(last)
    found: dict[str, Any] = {"step": [first.get("step"), last.get("step")], "tasks": last.get("eval/tasks")}
    paired = before is not None and after is not None and before.keys() == after.keys()
    found["before"], how = _with_interval(first, before)
    found["after"] = _with_interval(last, after)[0] if last is not first else None
    if last is first:
        return found | {"difference": None, "method": how}
    if paired and before and after:
        gains = [after[task] - before[task] for task in before]
        how = "outcomes by task; the difference pairs the same tasks"
        return found | {"difference": list(student_interval(gains)), "method": how}
    return found | {"difference": _difference(found["before"], found["after"]), "method": how}


def _outcomes(evaluation: Mapping[str, Any]) -> dict[str, float] | None:
    """Score by task; None unless the samples cover all tasks and their mean is the score."""
    samples = evaluation.get("samples") or ()
    outcomes = {str(sample.get("id")): score_of(sample) for sample in samples}
    if len(outcomes) < 2 or len(outcomes) != evaluation.get("eval/tasks"):
        return None
    return outcomes if abs(fmean(outcomes.values()) - evaluation["eval/score"]) < 1e-6 else None


def _with_interval(evaluation: Mapping[str, Any], outcomes: dict[str, float] | None) -> tuple[list[float | None], str]:
    """Score, lower and upper bound (None if unknown) at 95%, and the method. `outcomes` are scores by task."""
    score, tasks = evaluation["eval/score"], evaluation.get("eval/tasks") or 0
    if interval := (evaluation.get("intervals") or {}).get("eval/score"):
        return [score, *interval], "95% for tasks drawn like these (Wilson, clustered by task)"
    if outcomes:
        return list(estimate_mean(list(outcomes.values()))), "outcomes by task"
    if tasks and 0 <= score <= 1:
        return [*wilson_interval(score, tasks)], "binomial (Wilson), tasks taken as independent"
    return [score, None, None], "no interval: the outcomes of single tasks are not recorded"


def _difference(before: Sequence[float | None], after: Sequence[float | None]) -> list[float | None]:
    """Newcombe's interval of the difference of two independent fractions (1998, method 10)."""
    b, b_low, b_high = before
    a, a_low, a_high = after
    if a is None or b is None or a_low is None or a_high is None or b_low is None or b_high is None:
        return [None if a is None or b is None else a - b, None, None]
    low, high = math.hypot(a - a_low, b_high - b), math.hypot(a_high - a, b - b_low)
    return [a - b, a - b - low, a - b + high]


def compare_samples(before: Sequence[Sample], after: Sequence[Sample]) -> dict[str, Any]:
    """Samples of the same tasks in both evaluations, and the number of `better`, `worse` and `compared` tasks.

    Tasks are compared by score, or by reward where records have none. Order: largest gain, largest loss, next gain,
    and so on; then episodes that failed in one evaluation, then other changed ones. A failed episode counts as 0.
    """
    old = {sample["id"]: sample for sample in before}
    pairs = [(old[new["id"]], new) for new in after if new["id"] in old]
    gains = sorted((pair for pair in pairs if _gain(pair) > 0), key=_gain, reverse=True)
    losses = sorted((pair for pair in pairs if _gain(pair) < 0), key=_gain)
    alternating = [pair for i in range(SHOWN_TASKS) for pair in (*gains[i : i + 1], *losses[i : i + 1])]
    equal = (pair for pair in pairs if _gain(pair) == 0 and _outcome(pair[0]) != _outcome(pair[1]))
    same = sorted(equal, key=lambda pair: not any("failed" in s for s in pair))
    selected = [*alternating, *same][:SHOWN_TASKS]
    return {
        "before": [old for old, _ in selected],
        "after": [new for _, new in selected],
        "better": len(gains),
        "worse": len(losses),
        "compared": len(pairs),
    }


def _gain(pair: tuple[Sample, Sample]) -> float:
    old, new = pair
    return score_of(new) - score_of(old)


def score_of(sample: Sample) -> float:
    """The score of an episode: "correct" if the environment reports it, else the reward; 0 if the episode failed."""
    return float(sample.get("score", sample.get("reward")) or 0.0)


def _outcome(sample: Sample) -> tuple[Any, Any]:
    return sample.get("completion"), sample.get("failed")
