"""Which held-out tasks a report shows: those whose outcome changed most between two evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SHOWN = 3  # tasks

Sample = Mapping[str, Any]  # a task's id, prompt, and its completion and reward, or why its episode failed


def compare(before: Sequence[Sample], after: Sequence[Sample], shown: int = SHOWN) -> dict[str, Any]:
    """Samples of the same tasks `before` and `after`, and how many tasks went `better` and `worse`.

    Tasks are the largest gain, the largest loss, the next gain, and so on; then episodes that failed once, then others.
    A failed episode counts as reward 0, as in the score.
    """
    old = {sample["id"]: sample for sample in before}
    pairs = [(old[new["id"]], new) for new in after if new["id"] in old]
    gains = sorted((pair for pair in pairs if _gain(pair) > 0), key=_gain, reverse=True)
    losses = sorted((pair for pair in pairs if _gain(pair) < 0), key=_gain)
    turns = [pair for i in range(shown) for pair in (*gains[i : i + 1], *losses[i : i + 1])]
    same = sorted((pair for pair in pairs if _gain(pair) == 0), key=lambda pair: not any("failed" in s for s in pair))
    chosen = [*turns, *same][:shown]
    return {
        "before": [old for old, _ in chosen],
        "after": [new for _, new in chosen],
        "better": len(gains),
        "worse": len(losses),
    }


def _gain(pair: tuple[Sample, Sample]) -> float:
    old, new = pair
    return float((new.get("reward") or 0.0) - (old.get("reward") or 0.0))
