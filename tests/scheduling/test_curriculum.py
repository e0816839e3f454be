"""Several environments in one ledger: shares by weight, whole epochs, and curricula that a checkpoint restores."""

from __future__ import annotations

import json
import math
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from slipstream.config.environments import CurriculumConfig
from slipstream.rollout import Rollout
from slipstream.scheduling.curriculum import TaskStream, success_of
from slipstream.scheduling.ledger import Ledger, Visit

WEIGHTS = st.lists(st.floats(0.1, 10), min_size=1, max_size=5)


def streams(weights: list[float], tasks: int = 7, **curriculum: float) -> list[TaskStream]:
    options = CurriculumConfig.model_validate(curriculum)
    return [TaskStream(f"e{i}", tasks + i, weight, options) for i, weight in enumerate(weights)]


def play(ledger: Ledger, visits: int, success: float | None = None) -> list[Visit]:
    """Start and train on visits one by one; the even tasks are solved half of the time, or all with `success`."""
    played = []
    for _ in range(visits):
        visit = ledger.start()
        solved = 0.5 * (1 - visit.task % 2) if success is None else success
        ledger.ready(visit.id, rollouts=2, success=solved)
        ledger.trained(visit.id)
        played.append(visit)
    return played


def again(ledger: Ledger, new: list[TaskStream]) -> Ledger:
    return Ledger.restore(json.loads(json.dumps(ledger.snapshot())), new)


@given(WEIGHTS, st.integers(0, 3))
def test_groups_are_shared_by_weight_and_no_task_is_visited_twice_in_an_epoch(weights: list[float], seed: int) -> None:
    ledger, total = Ledger(streams(weights), seed), sum(weights)
    played = [ledger.start() for _ in range(200)]
    for count in range(1, 201):
        shares = Counter(visit.environment for visit in played[:count])
        for i, weight in enumerate(weights):
            assert abs(shares[i] - count * weight / total) <= len(weights)
    for i, stream in enumerate(ledger.streams):
        tasks = [visit.task for visit in played if visit.environment == i]
        epochs = [tasks[at : at + stream.tasks] for at in range(0, len(tasks), stream.tasks)]
        assert all(len(set(epoch)) == len(epoch) for epoch in epochs)
        assert all(sorted(epoch) == list(range(stream.tasks)) for epoch in epochs[:-1])


@given(WEIGHTS, st.integers(0, 60), st.floats(0, 0.95), st.integers(0, 3))
def test_a_resumed_ledger_continues_with_the_same_visits(weights: list[float], at: int, focus: float, n: int) -> None:
    curriculum = {"focus": focus, "drop_after": n}
    ledger = Ledger(streams(weights, **curriculum), seed=3)
    play(ledger, at)
    resumed = again(ledger, streams(weights, **curriculum))
    assert play(resumed, 60) == play(ledger, 60)
    assert resumed.snapshot() == ledger.snapshot()


def test_another_weight_counts_from_the_resume_on() -> None:
    ledger = Ledger(streams([1, 1]), seed=0)
    play(ledger, 200)
    resumed = again(ledger, streams([1, 3]))
    assert Counter(visit.environment for visit in play(resumed, 40)) == {0: 10, 1: 30}


def test_an_environment_without_playable_tasks_leaves_its_share_to_the_others() -> None:
    ledger = Ledger(streams([1, 1]), seed=0)
    ledger.retire(0, range(7))
    assert {visit.environment for visit in play(ledger, 50)} == {1}
    resumed = again(ledger, streams([1, 1]))
    assert abs(sum(visit.environment for visit in play(resumed, 20)) - 10) <= 1, "it does not catch up"


def test_a_dropped_task_keeps_a_tenth_of_its_visits_until_its_success_changes() -> None:
    ledger = Ledger(streams([1], tasks=10, drop_after=2), seed=0)
    [stream] = ledger.streams
    first = play(ledger, 20)
    assert sorted(visit.task for visit in first) == sorted([*range(10)] * 2)
    assert stream.dropped == {1, 3, 5, 7, 9} and stream.active == 5, "odd tasks are never solved"
    later = Counter(visit.task % 2 for visit in play(ledger, 1100))
    assert 0.07 < later[1] / later[0] < 0.13
    ledger.retire(0, [0, 1])
    assert stream.active == 4, "task 1 is dropped and retired"
    stream.record(3, 0.5)
    assert stream.dropped == {1, 5, 7, 9} and stream.active == 5


def test_success_after_failure_is_no_streak() -> None:
    [stream] = streams([1], drop_after=2)
    for success, dropped in ((0, False), (1, False), (0, False), (0, True), (1, False), (1, True), (0.5, False)):
        stream.record(4, success)
        assert (4 in stream.dropped) is dropped


def test_a_curriculum_that_has_dropped_all_tasks_visits_all_of_them() -> None:
    ledger = Ledger(streams([1], tasks=6, drop_after=1), seed=0)
    play(ledger, 6, success=0.0)
    assert ledger.streams[0].active == 0
    counts = Counter(visit.task for visit in play(ledger, 600, success=0.0))
    assert min(counts[task] for task in range(6)) > 60


def test_focus_prefers_tasks_that_are_solved_half_of_the_time() -> None:
    ledger = Ledger(streams([1], tasks=20, focus=0.9), seed=1)
    play(ledger, 200)
    counts = Counter(visit.task % 2 for visit in play(ledger, 1100))
    assert 0.07 < counts[1] / counts[0] < 0.13, "tasks that are never solved keep a tenth of their visits"


def test_the_success_of_a_group_is_correct_or_its_reward() -> None:
    assert success_of([Rollout((), 2.0, {"correct": 1.0}), Rollout((), 0.5, {"correct": 0.0})]) == 0.5
    assert success_of([Rollout((), 1.0), Rollout((), 0.5)]) == 0.75
    assert success_of([Rollout((), 1.0, {"correct": math.nan}), Rollout((), 0.5)]) == 0.75
    assert success_of([Rollout((), 1.0, {"correct": math.nan}), Rollout((), 0.5, {"correct": 0.0})]) == 0.0
