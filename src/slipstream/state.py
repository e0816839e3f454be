"""The state of the loop as a pure machine: ledger, buffer, version and step, and the moves between them.

No I/O, no clock, no tensors. The loop does the work and tells this machine what happened; the machine says what may
start, what may be trained on, and what a checkpoint holds.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from typing import Any

from slipstream.config import LoopConfig
from slipstream.ledger import Entry, Ledger, State
from slipstream.rollout import Group, Rollout
from slipstream.staleness import capacity, is_stale

SMALLEST_GROUP = 2


class BufferFull(RuntimeError):
    """A group was put into a full buffer: the admission gate let too much work start."""


class LoopState:
    """Where a run stands. `every` is the number of steps between two publishes.

    `ready` is the buffer between generators and trainer: at most `capacity` groups, in the order in which they will be
    taken, by oldest token and then by ledger entry. It never waits: waiting is the loop's.
    """

    def __init__(self, options: LoopConfig, every: int, tasks: int) -> None:
        self.options, self.every = options, every
        self.ledger = Ledger(tasks, options.seed, options.retries)
        self.ready: list[Group] = []
        self.capacity = options.buffer or (options.max_lag + 1) * options.groups_per_step * every
        self.step = 0
        self.version = 0  # of the trainer's weights
        self.published = 0  # the step whose weights are served; a stop publishes between two multiples of `every`
        self.filtered_in_a_row = 0  # groups without signal since the last that had one

    @property
    def running(self) -> int:
        return self.ledger.count(State.RUNNING)

    def startable(self) -> int:
        """How many groups may be started now: what the gate allows, and no more than the steps left can use."""
        ready, running, per_step = len(self.ready), self.running, self.options.groups_per_step
        free = capacity(
            version=self.published // self.every,  # those that lasted their `every` steps
            max_lag=self.options.max_lag,
            groups_per_version=per_step * self.every,
            trained=self.ledger.groups_trained,
            ready=ready,
            running=running,
            buffer=self.capacity,
        )
        needed = self.options.steps * per_step - self.ledger.groups_trained - ready - running
        return max(0, min(free, needed))

    def end(
        self,
        entry: Entry,
        task_id: str,
        rollouts: Sequence[Rollout],
        *,
        failed: int,
        has_signal: Callable[[Group], bool] = lambda group: True,
        filter_most: float = math.inf,
    ) -> bool:
        """A group has ended with these survivors: it is ready, filtered because it has no signal, or tried again.
        Returns whether the task is given up for good instead.

        At most `filter_most` groups in a row are filtered; those that follow are ready as they are, until one has
        signal.
        """
        group = Group(entry.id, task_id, tuple(rollouts))
        if max(map(len, group.roles.values()), default=0) < SMALLEST_GROUP:
            return self.ledger.failed(entry.id, rollouts=len(rollouts) + failed)
        self.ledger.ready(entry.id, rollouts=len(rollouts), failed=failed)
        empty = not has_signal(group)
        if empty and self.filtered_in_a_row < filter_most:
            self.ledger.filtered(entry.id)
            self.filtered_in_a_row += 1
            return False
        if len(self.ready) >= self.capacity:
            raise BufferFull(f"entry {entry.id} arrived at a buffer that holds {self.capacity} groups already")
        self.filtered_in_a_row = self.filtered_in_a_row if empty else 0
        bisect.insort(self.ready, group, key=lambda g: (g.oldest_version, g.entry))
        return False

    def cut(self) -> list[Group]:
        """The groups of the next step, taken from the buffer for good; nothing while there are too few fresh ones.

        Groups that grew too old go back to pending. A synchronous run waits for the whole wave, so that what it trains
        on does not depend on who finished first. A run that holds its lag waits for all but the newest version's worth
        of groups, so that what comes first is as old as `max_lag` allows, or one version less.
        """
        while self.ready and is_stale(self.version, self.ready[0].oldest_version, self.options.max_lag):
            self.ledger.dropped_stale(self.ready.pop(0).entry)
        count = self.options.groups_per_step
        if len(self.ready) < count or (self.options.max_lag == 0 and self.running):
            return []
        if self.options.hold_lag and self.running + self.startable() > count * self.every:
            return []
        groups, self.ready = self.ready[:count], self.ready[count:]
        for group in groups:
            self.ledger.trained(group.entry)
        return groups

    def stage(self) -> None:
        """The weights of this step are the next version, on its way to the generators: what is trained now is older."""
        self.version += 1

    def publish(self, step: int) -> None:
        """Every generator serves the weights of this step: more may be started."""
        self.published = step

    def snapshot(self) -> dict[str, Any]:
        """Plain data to restore from, but for the groups that are ready, of a moment when the weights of this step are
        a version."""
        return {"step": self.step, "version": self.version, **self._pace(), "ledger": self.ledger.snapshot()}

    def restore(self, data: dict[str, Any], ready: Sequence[Group]) -> None:
        """Go on from a snapshot and the groups that were ready then. Raises `ValueError` if it is of a run on other
        data or of another pace, or if groups are missing.

        The gate counts versions in groups, so the number of groups of a version can't change; `max_lag` can: what was
        ready is taken in, and what is too old now is dropped when the next batch is cut.
        """
        ledger = Ledger.restore(data["ledger"])
        if ledger.tasks != self.ledger.tasks:
            raise ValueError(
                f"the run was started on {ledger.tasks} training tasks, and now there are {self.ledger.tasks}; "
                "give it the data it was started on"
            )
        for name, now in self._pace().items():
            if data[name] != now:
                raise ValueError(f"{name} = {now} can't be changed while a run goes on; leave it at {data[name]}")
        ledger.retries = self.options.retries
        if sorted(g.entry for g in ready) != sorted(e.id for e in ledger.live.values() if e.state is State.READY):
            raise ValueError(f"{len(ready)} groups were saved, and the ledger has {ledger.count(State.READY)} others")
        self.ledger, self.version, self.step = ledger, data["version"], data["step"]
        self.published = self.step
        self.ready = list(ready)
        self.capacity = max(self.capacity, len(self.ready))

    def _pace(self) -> dict[str, int]:
        return {"loop.groups_per_step": self.options.groups_per_step, "sync.every": self.every}
