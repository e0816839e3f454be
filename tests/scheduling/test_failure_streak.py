"""One failing task does not end a run; an environment in which every task fails ends it soon."""

from __future__ import annotations

from collections.abc import Iterable

from slipstream.scheduling.loop_state import FailureStreak

LIMIT = 10


def ended_after(streak: FailureStreak, failing: Iterable[int], running: Iterable[int]) -> int | None:
    """Number of failed rollouts until the run ends; None if it continues."""
    in_flight = set(running)
    return next((i for i, task in enumerate(failing, 1) if streak.failed(task, in_flight)), None)


def test_one_failing_task_does_not_end_a_run() -> None:
    assert ended_after(FailureStreak(LIMIT, 40), [7] * 64, [7, 8]) is None
    streak = FailureStreak(LIMIT, 40)
    streak.succeeded()
    assert ended_after(streak, [7] * 64, [7]) is None, "alone in flight, too"


def test_failures_of_many_tasks_in_a_row_end_a_run() -> None:
    streak = FailureStreak(LIMIT, 40)
    streak.succeeded()
    assert ended_after(streak, [task for task in range(9) for _ in range(8)], range(9)) is None
    assert ended_after(streak, [9], [9]) == 1
    streak.succeeded()
    assert ended_after(streak, range(9), range(9)) is None


def test_a_run_without_any_success_ends_early() -> None:
    assert ended_after(FailureStreak(LIMIT, 40), [0, 1, 2] * 8, range(3)) == LIMIT
    assert ended_after(FailureStreak(LIMIT, 40), [0, 1, 2] * 8, range(4)) is None, "the fourth may succeed"


def test_failures_of_all_of_few_tasks_end_a_run() -> None:
    for tasks in (1, 2):
        streak = FailureStreak(LIMIT, tasks)
        streak.succeeded()
        assert ended_after(streak, [*range(tasks)] * LIMIT, range(tasks)) == LIMIT
