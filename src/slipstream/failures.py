"""Which failing rollouts end a run: those of many tasks in a row do, and those of one bad task don't."""

from __future__ import annotations

from collections.abc import Collection


class FailureStreak:
    """The rollouts that failed since one succeeded. `limit` different tasks, or all if there are fewer, end the run."""

    def __init__(self, limit: int, tasks: int) -> None:
        self.rollouts = 0
        self.tasks: set[int] = set()
        self._limit, self._all = limit, tasks
        self._succeeded = False

    def succeeded(self) -> None:
        self.rollouts, self._succeeded = 0, True
        self.tasks.clear()

    def failed(self, task: int, running: Collection[int]) -> bool:
        """Count a failed rollout of this task. Returns whether the run has to end; `running` are the tasks in flight.

        As long as no rollout has succeeded, `limit` rollouts are enough if all tasks in flight fail.
        """
        self.rollouts += 1
        self.tasks.add(task)
        if self.rollouts < self._limit:
            return False
        many = len(self.tasks) >= min(self._limit, self._all)
        never = not self._succeeded and len(self.tasks) >= min(2, self._all) and self.tasks.issuperset(running)
        return many or never
