"""The tasks of each environment in the order of their visits, and the curriculum that leaves some of them out.

Pure: the next task is a function of the seed, of the position in the shuffled epochs, and of the success so far.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.config.environments import CurriculumConfig
from slipstream.rollout import Rollout, mean


@dataclass
class TaskStream:
    """The `tasks` of one environment in shuffled epochs: each epoch visits a task once, or skips it by the curriculum.

    `position` counts places in the epochs, and `progress` visits divided by `weight`. `results` has the visits and the
    summed success of each task, if the curriculum needs them. Tasks in `retired` can't be played.
    """

    label: str
    tasks: int
    weight: float = 1.0
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    position: int = 0
    progress: float = 0.0
    results: dict[int, tuple[int, float]] = field(default_factory=dict)
    dropped: set[int] = field(default_factory=set)
    retired: set[int] = field(default_factory=set)
    _order: tuple[tuple[int, int], list[int]] = ((-1, -1), [])  # of the current epoch, with seed and epoch

    @property
    def playable(self) -> bool:
        return len(self.retired) < self.tasks

    @property
    def active(self) -> int:
        """Number of tasks that are neither dropped nor retired."""
        return self.tasks - len(self.dropped | self.retired)

    def next_task(self, seed: int) -> int:
        """The next task that the curriculum visits. It starts over once it has dropped all tasks that can be played."""
        if self.dropped and len(self.dropped) + len(self.retired) >= self.tasks and not self.active:
            self.dropped.clear()
            self.results.clear()
        while True:
            epoch, place = divmod(self.position, self.tasks)
            if self._order[0] != (seed, epoch):
                self._order = (seed, epoch), shuffled(self.tasks, seed, epoch)
            self.position += 1
            task = self._order[1][place]
            if self._visits(task, seed):
                return task

    def record(self, task: int, success: float) -> None:
        """Count a visit to a task, with the `success` of its group from 0 to 1."""
        if self.curriculum.drop_after or self.curriculum.focus:
            visits, total = self.results.get(task, (0, 0.0))
            self._count(task, visits + 1, total + min(1.0, max(0.0, success)))

    def snapshot(self) -> dict[str, Any]:
        """Plain data for a checkpoint. Options may change, and retired tasks are tried again."""
        results = [[task, *result] for task, result in self.results.items()]
        return {name: getattr(self, name) for name in ("label", "tasks", "position", "progress")} | {"results": results}

    def restore(self, data: dict[str, Any]) -> None:
        """Restore the state of a snapshot of the same tasks."""
        self.position, self.progress = data["position"], data["progress"]
        for result in data["results"]:
            self._count(*result)

    def _count(self, task: int, visits: int, total: float) -> None:
        self.results[task] = visits, total
        if 0 < self.curriculum.drop_after <= visits and total in (0, visits):
            self.dropped.add(task)
        else:
            self.dropped.discard(task)

    def _visits(self, task: int, seed: int) -> bool:
        """Whether the curriculum visits the task at this position.

        A task of success s is skipped with probability focus x (1 - 4 s (1 - s)). Two visits are added to the counts
        for the estimate of s, one of success 1 and one of success 0.
        """
        if task in self.dropped:
            return False
        if not self.curriculum.focus:
            return True
        visits, total = self.results.get(task, (0, 0.0))
        success = (total + 1) / (visits + 2)
        skipped = self.curriculum.focus * (1 - 4 * success * (1 - success))
        return random.Random(f"{seed}/{self.label}/{self.position}").random() >= skipped


def success_of(rollouts: Sequence[Rollout]) -> float:
    """Mean of the metric "correct" over the rollouts that report it, else of the rewards."""
    return mean([r.metrics["correct"] for r in rollouts if "correct" in r.metrics] or [r.reward for r in rollouts])


def shuffled(tasks: int, seed: int, epoch: int) -> list[int]:
    """The order of the tasks in an epoch."""
    order = list(range(tasks))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order
