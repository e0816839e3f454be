"""Select the held-out tasks for the report: those whose outcome changed most between two evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SHOWN = 3  # tasks

Sample = Mapping[str, Any]  # a task's id, prompt, and its completion and reward, or why its episode failed


def compare(before: Sequence[Sample], after: Sequence[Sample], shown: int = SHOWN) -> dict[str, Any]:
    """Samples of the same tasks in both evaluations, and the number of `better`, `worse` and `compared` tasks.

    Tasks are compared by score, or by reward where records have none. Order: largest gain, largest loss, next gain,
    and so on; then episodes that failed in one evaluation, then other changed ones. A failed episode counts as 0.
    """
    old = {sample["id"]: sample for sample in before}
    pairs = [(old[new["id"]], new) for new in after if new["id"] in old]
    gains = sorted((pair for pair in pairs if _gain(pair) > 0), key=_gain, reverse=True)
    losses = sorted((pair for pair in pairs if _gain(pair) < 0), key=_gain)
    alternating = [pair for i in range(shown) for pair in (*gains[i : i + 1], *losses[i : i + 1])]
    equal = (pair for pair in pairs if _gain(pair) == 0 and _outcome(pair[0]) != _outcome(pair[1]))
    same = sorted(equal, key=lambda pair: not any("failed" in s for s in pair))
    selected = [*alternating, *same][:shown]
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
