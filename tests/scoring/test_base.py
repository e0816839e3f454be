"""The effect of a scorer's answer on a rollout, for every format of answers."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.environments.reward_workers import ScoringError, ZeroReward
from slipstream.rollout import Completion, Rollout, StepReward, VersionSpan
from slipstream.scoring.base import apply_answer

numbers = st.floats(-1e3, 1e3)


def rollout(*lengths: int, reward: float = math.nan) -> Rollout:
    spans = [(VersionSpan(0, 0, n),) for n in lengths]
    drawn = [Completion((2,), (3,) * n, (-1.0,) * n, s, "stop") for n, s in zip(lengths, spans, strict=True)]
    return Rollout(tuple(drawn), reward)


def test_a_number_is_the_reward_and_the_environments_reward_a_part() -> None:
    assert apply_answer(rollout(3), 2, {}).reward == 2.0
    both = apply_answer(rollout(3, reward=1.0), 2, {})
    assert (both.reward, both.metrics) == (2.0, {"environment": 1.0, "score": 2.0})


def test_a_scorer_that_raised_has_0_for_every_weighted_part() -> None:
    weights = {"environment": 1.0, "score": 2.0, "style": 0.5}
    found = apply_answer(rollout(2, reward=0.5), ZeroReward(), weights)
    assert (found.reward, found.metrics) == (0.5, {"environment": 0.5, "score": 0.0, "style": 0.0})


def test_an_answer_without_a_reward_keeps_the_environments() -> None:
    found = apply_answer(rollout(2, reward=0.5), {"turns": [1.0], "metrics": {"seen": 1}}, {})
    assert (found.reward, found.steps) == (0.5, ((StepReward(1, 1.0),),))
    assert found.metrics == {"seen": 1.0, "environment": 0.5}


@given(st.dictionaries(st.sampled_from("abc"), numbers), numbers, numbers, st.data())
def test_the_reward_is_the_weighted_sum_of_the_parts(
    parts: dict[str, float], own: float, score: float, data: Any
) -> None:
    known = {**parts, "environment": own, "score": score}
    weights = data.draw(st.dictionaries(st.sampled_from(sorted(known)), numbers, min_size=1))
    found = apply_answer(rollout(1, reward=own), {"reward": score, "parts": parts}, weights)
    assert found.reward == pytest.approx(math.fsum(w * known[n] for n, w in weights.items()), abs=1e-6)
    assert found.metrics == known


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_process_rewards_become_steps_that_end_in_their_completion(lengths: list[int], data: Any) -> None:
    tokens = [data.draw(st.lists(numbers, min_size=n, max_size=n)) for n in lengths]
    turns = data.draw(st.lists(numbers, min_size=len(lengths), max_size=len(lengths)))
    found = apply_answer(rollout(*lengths), {"reward": 0, "tokens": tokens, "turns": turns}, {}).steps
    for length, steps, row, turn in zip(lengths, found, tokens, turns, strict=True):
        assert [s.reward for s in steps] == [*row, turn]
        assert [s.end for s in steps] == [*range(length), length - 1]


@pytest.mark.parametrize(
    "answer",
    [
        "1", None, math.nan, {"reward": math.inf}, {"reward": 1, "score": 1}, {"parts": [1]}, {"parts": {"a": "1"}},
        {"reward": 1, "turns": [1]}, {"reward": 1, "turns": 1}, {"reward": 1, "tokens": [[1, 1], [1]]},
        {"reward": 1, "tokens": [[[2, 1.0]], []]}, {"reward": 1, "tokens": [[[0.5, 1.0]], []]},
        {"reward": 1, "tokens": [[[0, 1.0, 2.0]], []]}, {"reward": 1, "tokens": [1, 2]},
    ],
)  # fmt: skip
def test_an_invalid_answer_fails_the_rollout(answer: Any) -> None:
    with pytest.raises(ScoringError) as failure:
        apply_answer(rollout(2, 3), answer, {})
    assert failure.value.reason == "scorer's answer"


def test_a_missing_weighted_part_is_named() -> None:
    with pytest.raises(ScoringError, match=r"'environment'.*the parts are score"):
        apply_answer(rollout(1), 1.0, {"environment": 1.0})
