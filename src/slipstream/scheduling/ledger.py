"""The exactly-once record of every visit to a task.

A *visit* is the i-th task of the e-th shuffled epoch. Visits are numbered in the order of their first start, so the
position in the data is one integer. A visit is live (pending, running or ready) until it is trained on, filtered, or
abandoned after too many retries; then only its counts remain. The ledger does no I/O. The training loop reports each
event to it, and an impossible transition raises `LedgerError`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Any


class State(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    READY = "ready"


class LedgerError(RuntimeError):
    """Impossible transition of a visit: a task would be lost or trained on twice."""


@dataclass
class Visit:
    """One visit to the task with this index. `attempt` counts earlier tries, `failed` those that failed."""

    id: int
    task: int
    attempt: int = 0
    state: State = State.PENDING
    rollouts: int = 0
    failed: int = 0


@dataclass
class RolloutCounts:
    """Numbers of rollouts. `generated` counts rollouts that ended; the other fields count what became of them."""

    generated: int = 0
    trained: int = 0
    dropped_stale: int = 0
    failed: int = 0
    filtered: int = 0
    ready: int = 0


@dataclass
class Ledger:
    """All visits of a run over `tasks` tasks, shuffled in every epoch by `seed`.

    A failed or stale visit returns to pending until it was tried `retries` + 1 times; then it is abandoned. A task
    whose every try failed is retired, unless all tasks are; a restored ledger tries it again. `abandoned` counts
    visits, `reasons` counts failed rollouts by reason.
    """

    tasks: int
    seed: int
    retries: int = 3
    next_id: int = 0
    groups_trained: int = 0
    abandoned: int = 0
    counts: RolloutCounts = field(default_factory=RolloutCounts)
    reasons: Counter[str] = field(default_factory=Counter)
    live: dict[int, Visit] = field(default_factory=dict)
    _retired: set[int] = field(default_factory=set)

    def start(self) -> Visit:
        """Start the pending visit with the lowest id, else the next visit of the shuffled epochs."""
        visit = next((v for v in self.live.values() if v.state is State.PENDING), None)  # live visits are ordered by id
        if visit is None:
            visit = self._next()
            while visit.task in self._retired and len(self._retired) < self.tasks:
                self.abandoned += 1
                visit = self._next()
            self.live[visit.id] = visit
        visit.state = State.RUNNING
        return visit

    def retire(self, tasks: Iterable[int]) -> None:
        """Exclude tasks that can't be played."""
        self._retired.update(tasks)

    def ready(self, visit_id: int, *, rollouts: int, failed: int) -> None:
        """The visit's group is complete: `rollouts` members to train on and `failed` that failed."""
        visit = self._expect(visit_id, State.RUNNING)
        visit.state, visit.rollouts = State.READY, rollouts
        self.counts.generated += rollouts + failed
        self.counts.failed += failed
        self.counts.ready += rollouts

    def trained(self, visit_id: int) -> None:
        """The visit's group is in a batch; the visit ends."""
        self.counts.trained += self._leave_buffer(visit_id)
        self.groups_trained += 1
        del self.live[visit_id]

    def filtered(self, visit_id: int) -> None:
        """The visit's group has only zero advantages and is not trained on; the visit ends."""
        self.counts.filtered += self._leave_buffer(visit_id)
        del self.live[visit_id]

    def dropped_stale(self, visit_id: int) -> None:
        """The visit's group exceeded `max_lag` in the buffer; the task is tried again."""
        self.counts.dropped_stale += self._leave_buffer(visit_id)
        self._try_again(visit_id)

    def failed(self, visit_id: int, *, rollouts: int) -> bool:
        """Too few of the visit's rollouts succeeded; its task is tried again. Returns whether it is retired instead."""
        visit = self._expect(visit_id, State.RUNNING)
        visit.failed += 1
        self.counts.generated += rollouts
        self.counts.failed += rollouts
        self._try_again(visit_id)
        if retired := visit.failed > self.retries:
            self._retired.add(visit.task)
        return retired

    def cancelled(self, visit_id: int) -> None:
        """A stop of the run interrupted the visit; it is pending again, and the try does not count."""
        self._expect(visit_id, State.RUNNING).state = State.PENDING

    @property
    def running_tasks(self) -> set[int]:
        return {e.task for e in self.live.values() if e.state is State.RUNNING}

    def count(self, state: State) -> int:
        """Number of live visits in this state."""
        return sum(e.state is state for e in self.live.values())

    def snapshot(self) -> dict[str, Any]:
        """Plain data for a checkpoint. Running visits are saved as pending."""
        data = {k: v for k, v in vars(self).items() if not k.startswith("_")}
        live = [asdict(e) | ({"state": State.PENDING} if e.state is State.RUNNING else {}) for e in self.live.values()]
        return data | {"live": live, "counts": asdict(self.counts), "reasons": dict(self.reasons)}

    @classmethod
    def restore(cls, data: dict[str, Any]) -> Ledger:
        """The ledger of a `snapshot`."""
        live = {e["id"]: Visit(**(e | {"state": State(e["state"])})) for e in data["live"]}
        counts = RolloutCounts(**data["counts"])
        return cls(**(data | {"live": live, "counts": counts, "reasons": Counter(data["reasons"])}))

    def _next(self) -> Visit:
        epoch, position = divmod(self.next_id, self.tasks)
        self.next_id += 1
        return Visit(self.next_id - 1, shuffled(self.tasks, self.seed, epoch)[position])

    def _leave_buffer(self, visit_id: int) -> int:
        visit = self._expect(visit_id, State.READY)
        self.counts.ready -= visit.rollouts
        return visit.rollouts

    def _try_again(self, visit_id: int) -> None:
        visit = self.live[visit_id]
        if visit.attempt >= self.retries:
            self.abandoned += 1
            del self.live[visit_id]
        else:
            visit.attempt, visit.state, visit.rollouts = visit.attempt + 1, State.PENDING, 0

    def _expect(self, visit_id: int, state: State) -> Visit:
        visit = self.live.get(visit_id)
        if visit is None or visit.state is not state:
            found = "unknown or ended" if visit is None else str(visit.state)
            raise LedgerError(f"visit {visit_id} should be {state}, but it is {found}")
        return visit


@lru_cache(maxsize=1)
def shuffled(tasks: int, seed: int, epoch: int) -> list[int]:
    """The order of the tasks in an epoch."""
    order = list(range(tasks))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order
