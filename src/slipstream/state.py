"""The state of the loop as a pure machine: ledger, buffer, version and step, and the moves between them.

No I/O, no clock, no tensors. The loop does the work and tells this machine what happened; the machine says what may
start, what may be trained on, and what a checkpoint holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter

from slipstream.buffer import RolloutBuffer
from slipstream.config import LoopConfig
from slipstream.ledger import Entry, Ledger, State
from slipstream.rollout import Group, Rollout
from slipstream.staleness import capacity

SMALLEST_GROUP = 2
GROUP = TypeAdapter(Group)


class LoopState:
    """Where a run stands. `every` is the number of steps between two publishes."""

    def __init__(self, options: LoopConfig, every: int, tasks: int) -> None:
        self.options = options
        self.groups_per_version = options.groups_per_step * every
        self.ledger = Ledger(tasks, options.seed, options.retries)
        self.buffer = RolloutBuffer(options.buffer or (options.max_lag + 1) * self.groups_per_version)
        self.version = 0
        self.step = 0

    @property
    def running(self) -> int:
        return self.ledger.count(State.RUNNING)

    def startable(self) -> int:
        """How many groups may be started now: what the gate allows, and no more than the steps left can use."""
        ready, running = len(self.buffer), self.running
        free = capacity(
            version=self.version,
            max_lag=self.options.max_lag,
            groups_per_version=self.groups_per_version,
            trained=self.ledger.groups_trained,
            ready=ready,
            running=running,
            buffer=self.buffer.capacity,
        )
        needed = self.options.steps * self.options.groups_per_step - self.ledger.groups_trained - ready - running
        return max(0, min(free, needed))

    def start(self) -> Entry:
        """Hand out the next task."""
        return self.ledger.start()

    def end(self, entry: Entry, task_id: str, rollouts: Sequence[Rollout], *, failed: int, filter_equal: bool) -> None:
        """A group has ended with these survivors: it is ready, filtered for want of signal, or tried again."""
        if len(rollouts) < SMALLEST_GROUP:
            self.ledger.failed(entry.id, rollouts=len(rollouts) + failed)
            return
        self.ledger.ready(entry.id, rollouts=len(rollouts), failed=failed)
        if filter_equal and len({r.reward for r in rollouts}) == 1:
            self.ledger.filtered(entry.id)
        else:
            self.buffer.put(Group(entry.id, task_id, tuple(rollouts)))

    def drop_stale(self) -> int:
        """Put groups that grew too old back to pending. Returns how many."""
        stale = self.buffer.drop_stale(self.version, self.options.max_lag)
        for group in stale:
            self.ledger.dropped_stale(group.entry)
        return len(stale)

    def cut(self) -> list[Group]:
        """The groups of the next step, taken from the buffer for good; nothing while there are too few fresh ones.

        A synchronous run waits for the whole wave, so that what it trains on does not depend on who finished first.
        """
        self.drop_stale()
        if self.options.max_lag == 0 and self.running:
            return []
        groups = self.buffer.take(self.options.groups_per_step)
        for group in groups:
            self.ledger.trained(group.entry)
        return groups

    def snapshot(self) -> dict[str, Any]:
        """Plain data to restore from."""
        ready = [GROUP.dump_python(g, mode="json", fallback=_listed) for g in self.buffer.groups]
        return {"step": self.step, "version": self.version, "ledger": self.ledger.snapshot(), "ready": ready}

    def restore(self, data: dict[str, Any]) -> None:
        """Go on from a snapshot. Raises `ValueError` if it is of a run on other data."""
        ledger = Ledger.restore(data["ledger"])
        if ledger.tasks != self.ledger.tasks:
            raise ValueError(
                f"the run was started on {ledger.tasks} training tasks, and now there are {self.ledger.tasks}"
            )
        ledger.retries = self.options.retries
        self.ledger, self.step, self.version = ledger, data["step"], data["version"]
        for plain in data["ready"]:
            self.buffer.put(GROUP.validate_python(plain))


def _listed(array: Any) -> Any:
    return array.tolist()
