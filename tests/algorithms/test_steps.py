"""Rewards of steps: from a scorer's values to the advantages of a batch's samples."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from slipstream.algorithms.advantages import make_batch
from slipstream.rollout import Completion, Group, Rollout, StepReward, VersionSpan


def turn(prompt: tuple[int, ...], drawn: tuple[int, ...]) -> Completion:
    return Completion(prompt, drawn, (-1.0,) * len(drawn), (VersionSpan(0, 0, len(drawn)),), "stop")


def group() -> Group:
    first, second = turn((1, 2), (3, 4, 5)), turn((1, 2, 3, 4, 5, 9), (6, 7))
    long = Rollout((first, second), 1.0, steps=((StepReward(1, 1.0),), (StepReward(1, 0.0),)))
    short = Rollout((turn((1, 2), (8,)),), 0.0, steps=((StepReward(0, 0.5),),))
    return Group(0, "0", (long, short))


def test_tokens_get_the_rewards_of_later_steps() -> None:
    """Steps 1, 0 and 0.5 have mean 0.5 and deviation sqrt(1/6); outcomes 1 and 0 have advantages 0.5 and -0.5."""
    unit = 0.5 / math.sqrt(1 / 6)
    batch = make_batch([group()], process=0.1)
    long, short = batch.samples()
    assert list(long.token_ids) == [1, 2, 3, 4, 5, 9, 6, 7] and list(long.sampled_positions) == [2, 3, 4, 6, 7]
    assert long.advantages == pytest.approx([0.5, 0.5, *[0.5 - 0.1 * unit] * 3])  # 1 and 0 are as far above as below
    assert short.advantages == pytest.approx([-0.5])


def test_steps_without_weight_are_ignored_and_missing_steps_raise() -> None:
    bare = Group(0, "0", tuple(replace(r, steps=()) for r in group().rollouts))
    assert make_batch([group()]).advantages == make_batch([bare]).advantages == ((0.5, -0.5),)
    with pytest.raises(ValueError, match=r"algorithm\.process"):
        make_batch([bare], process=0.1)


def test_excluded_rollouts_stay_excluded() -> None:
    batch = make_batch([group()], process=0.1, left_out=lambda rollout: rollout.reward == 0.0)
    assert all(map(math.isnan, batch.samples()[1].advantages))
