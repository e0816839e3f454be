"""The recent records of a run, for health rules: values, means and growth of metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.observe.formatting import is_finite
from slipstream.rollout import mean

KEPT = 200  # steps that rules can look back
SHORT = 10  # steps over which most rules average

Record = Mapping[str, Any]


class History:
    """The first `SHORT` and the last `KEPT` records of a run up to a step, and statistics over all records up to it."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.records: list[Record] = []
        self.first: list[Record] = []  # the first `SHORT` records
        self.evaluations: Sequence[Record] = ()  # that ended before the last record
        self.best_reward = -math.inf  # mean of `SHORT` steps
        self.spread = 0.0  # largest mean standard deviation of the rewards in `SHORT` steps
        self.engines_complete_at = 0.0  # wall time of the last record in which all engines served

    def add(self, record: Record, evaluations: Sequence[Record]) -> None:
        """Add the record of the next step, and replace the evaluations."""
        self.records = [*self.records[1 - KEPT :], record]
        self.evaluations = evaluations
        if len(self.first) < SHORT:
            self.first.append(record)
        self.best_reward = max(self.best_reward, self.mean("reward/mean", default=-math.inf))
        self.spread = max(self.spread, self.mean("reward/std", default=0.0))
        if (record.get("engines/alive") or 0) >= (record.get("engines/total") or 0):
            self.engines_complete_at = record.get("time/wall_s") or 0.0

    @property
    def last(self) -> Record:
        return self.records[-1]

    def option(self, name: str, default: Any = 0) -> Any:
        """A value of the configuration, such as "loop.max_lag"."""
        section, _, key = name.partition(".")
        return self.config.get(section, {}).get(key, default)

    def values(self, name: str, steps: int = KEPT) -> list[float]:
        """The finite values of a metric in the last steps."""
        return [record[name] for record in self.records[-steps:] if is_finite(record.get(name))]

    def mean(self, name: str, steps: int = SHORT, default: float = math.nan) -> float:
        """Mean of a metric over the last steps; `default` unless each of them has a finite value."""
        values = self.values(name, steps)
        return mean(values) if len(values) == steps else default

    def start(self, name: str, steps: int = SHORT) -> float:
        """Mean of the first `steps` finite values of a metric within the first `SHORT` steps; NaN without any."""
        values = [record[name] for record in self.first if is_finite(record.get(name))][:steps]
        return mean(values) if values else math.nan

    @property
    def first_reward(self) -> float:
        """Mean reward at the start: the larger of the means of the first 3 and the first `SHORT` steps.

        If the first updates are too large, the reward falls within `SHORT` steps.
        """
        return max(self.start("reward/mean"), self.start("reward/mean", 3))

    @property
    def reward_gain(self) -> float:
        """By how much the mean reward is above that of the start."""
        return self.mean("reward/mean") - self.first_reward

    def growth(self, name: str, steps: int) -> float:
        """By how much a total grew in the last steps; NaN if the records are fewer, or the total was reset."""
        ends: list[Any] = [self.records[at].get(name) for at in (-steps - 1, -1) if len(self.records) > steps]
        return ends[1] - ends[0] if ends and all(map(is_finite, ends)) and ends[1] >= ends[0] else math.nan
