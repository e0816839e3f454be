"""Consecutive failed rollouts: failures of many tasks end a run, failures of one task do not."""

from __future__ import annotations

from collections.abc import Collection


class FailureStreak:
    """Failed rollouts since the last success. `limit` different tasks, or all tasks if there are fewer, end the run."""

    def __init__(self, limit: int, tasks: int) -> None:
        self.rollouts = 0
        self.tasks: set[int] = set()
        self._limit, self._all = limit, tasks
        self._succeeded = False

    def succeeded(self) -> None:
        self.rollouts, self._succeeded = 0, True
        self.tasks.clear()

    def failed(self, task: int, running: Collection[int]) -> bool:
        """Count a failed rollout of this task. Returns whether the run must end; `running` are the tasks in flight.

        Before the first success, `limit` failed rollouts end the run if all tasks in flight have failures.
        """
        self.rollouts += 1
        self.tasks.add(task)
        if self.rollouts < self._limit:
            return False
        many = len(self.tasks) >= min(self._limit, self._all)
        never = not self._succeeded and len(self.tasks) >= min(2, self._all) and self.tasks.issuperset(running)
        return many or never
