"""The tasks of each environment in the order of their visits, and the curriculum that leaves some of them out.

Pure: the next task is a function of the seed, of the position in the shuffled epochs, and of the success so far.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.config.environments import CurriculumConfig
from slipstream.rollout import Rollout, mean

DROPPED_SKIPS = 0.9  # share of visits to dropped tasks that are skipped; the others notice a policy that has changed


@dataclass
class TaskStream:
    """The `tasks` of one environment in shuffled epochs: each epoch visits a task once, or skips it by the curriculum.

    `position` counts places in the epochs, and `progress` visits divided by `weight`. `results` has two numbers of each
    visited task, if the curriculum needs them: a moving average of its success, and the number of its last groups that
    all had success 1, or 0 (negative). Tasks in `retired` can't be played.
    """

    label: str
    tasks: int
    weight: float = 1.0
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    position: int = 0
    progress: float = 0.0
    results: dict[int, tuple[float, int]] = field(default_factory=dict)
    dropped: set[int] = field(default_factory=set)
    retired: set[int] = field(default_factory=set)
    _order: tuple[tuple[int, int], list[int]] = ((-1, -1), [])  # of the current epoch, with seed and epoch

    @property
    def playable(self) -> bool:
        return len(self.retired) < self.tasks

    @property
    def active(self) -> int:
        """Number of tasks that are neither dropped nor retired."""
        return self.tasks - len(self.dropped) - len(self.retired - self.dropped)

    def next_task(self, seed: int) -> int:
        """The next task that the curriculum visits."""
        while True:
            epoch, place = divmod(self.position, self.tasks)
            if self._order[0] != (seed, epoch):
                self._order = (seed, epoch), shuffled(self.tasks, seed, epoch)
            self.position += 1
            task = self._order[1][place]
            skips = self._skips(task)
            if not skips or random.Random(f"{seed}/{self.label}/{self.position}").random() >= skips:
                return task

    def record(self, task: int, success: float) -> None:
        """Count a group of a task, with its `success` from 0 to 1."""
        if self.curriculum.drop_after or self.curriculum.focus:
            average, streak = self.results.get(task, (0.5, 0))
            direction = 1 if success >= 1 else -1 if success <= 0 else 0
            streak = streak + direction if streak * direction > 0 else direction
            self._set(task, (average + min(1.0, max(0.0, success))) / 2, streak)

    def snapshot(self) -> dict[str, Any]:
        """Plain data for a checkpoint. Options may change, and retired tasks are tried again."""
        names = ("label", "tasks", "position", "progress")
        return {name: getattr(self, name) for name in names} | {"results": dict(self.results)}

    def restore(self, data: dict[str, Any]) -> None:
        """Restore the state of a snapshot of the same tasks."""
        self.position, self.progress = data["position"], data["progress"]
        for task, result in data["results"].items():
            self._set(int(task), *result)  # JSON has no numbers as keys

    def _set(self, task: int, average: float, streak: int) -> None:
        self.results[task] = average, streak
        if 0 < self.curriculum.drop_after <= abs(streak):
            self.dropped.add(task)
        else:
            self.dropped.discard(task)

    def _skips(self, task: int) -> float:
        """Probability with which the curriculum skips a visit to the task."""
        if task in self.dropped:
            return DROPPED_SKIPS
        success, _ = self.results.get(task, (0.5, 0))
        return self.curriculum.focus * (1 - 4 * success * (1 - success))


def success_of(rollouts: Sequence[Rollout]) -> float:
    """Mean of the metric "correct" over the rollouts that report it, else of the rewards. NaN reports nothing."""
    reported = [value for r in rollouts if not math.isnan(value := r.metrics.get("correct", math.nan))]
    return mean(reported or [r.reward for r in rollouts])


def shuffled(tasks: int, seed: int, epoch: int) -> list[int]:
    """The order of the tasks in an epoch."""
    order = list(range(tasks))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order
