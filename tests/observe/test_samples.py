"""Which held-out tasks are shown before and after: those that changed."""

from __future__ import annotations

from typing import Any

from slipstream.observe.score import compare_samples


def evaluated(*rewards: float | None) -> list[dict[str, Any]]:
    """Samples of tasks 0, 1, ... with these rewards; None stands for a failed episode."""
    outcomes = ({"failed": "time limit"} if r is None else {"completion": "text", "reward": r} for r in rewards)
    return [{"id": str(i), "prompt": f"task {i}", **outcome} for i, outcome in enumerate(outcomes)]


def shown(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[str]:
    found = compare_samples(before, after)
    assert [s["id"] for s in found["before"]] == [s["id"] for s in found["after"]]
    return [s["id"] for s in found["after"]]


def test_gains_and_losses_alternate() -> None:
    before, after = evaluated(0, 0, 1, 0, 1, 0.5), evaluated(0, 0.5, 1, 1, 0, 1)
    assert shown(before, after) == ["3", "4", "1"]
    found = compare_samples(before, after)
    assert (found["better"], found["worse"]) == (3, 1)


def test_a_failed_episode_is_shown_and_counts_as_0() -> None:
    assert shown(evaluated(0, 0, 1), evaluated(0, 1, None)) == ["1", "2"]
    assert shown(evaluated(0, 0, None), evaluated(0, 0, 0))[0] == "2"


def test_unchanged_tasks_are_left_out() -> None:
    same, other = evaluated(0, None, 1), evaluated(0, None, 1)
    assert shown(same, other) == []
    other[2]["completion"] = "more text"
    assert shown(same, other) == ["2"]


def test_tasks_are_paired_by_their_ids() -> None:
    before, after = evaluated(0.5, 1), evaluated(1, 0, 1)
    assert shown(before, after[::-1]) == ["0", "1"]
    assert compare_samples([], after) == {"before": [], "after": [], "better": 0, "worse": 0, "compared": 0}


def test_scores_count_before_rewards() -> None:
    before, after = evaluated(0, 1), evaluated(1, 1)
    before[0]["score"], after[0]["score"] = 1.0, 0.0  # a higher reward for a wrong answer
    found = compare_samples(before, after)
    assert (found["better"], found["worse"]) == (0, 1)
