"""The exactly-once record of every visit to a task.

An *entry* is one visit: the i-th task of the e-th shuffled epoch. Entries are numbered in the order in which they are
first handed out, so the position in the data is one integer. An entry is live (pending, running or ready) until it is
trained on, filtered, or given up after too many retries; then only its counts remain. The ledger does no I/O: the loop
tells it what happened, and refuses to go on if a transition is impossible.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class State(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    READY = "ready"


class LedgerError(RuntimeError):
    """An entry was moved along an edge that does not exist: a task would be lost or trained on twice."""


@dataclass
class Entry:
    """One visit to a task: `task` indexes the environment's training tasks, `attempt` counts earlier tries, `failed`
    those of them in which too few rollouts survived."""

    id: int
    task: int
    attempt: int = 0
    state: State = State.PENDING
    rollouts: int = 0
    failed: int = 0


@dataclass
class RolloutCounts:
    """Rollouts by fate. `generated` is counted as rollouts end; the fates are counted as they are decided."""

    generated: int = 0
    trained: int = 0
    dropped_stale: int = 0
    failed: int = 0
    filtered: int = 0
    ready: int = 0

    def conserved(self) -> bool:
        return self.generated == self.trained + self.dropped_stale + self.failed + self.filtered + self.ready


@dataclass
class Ledger:
    """All entries of a run over `tasks` tasks, shuffled afresh every epoch by `seed`.

    A failed or stale entry goes back to pending until it was tried `retries` + 1 times; then it is given up. A task
    whose every try failed is left out from then on, unless all are; a restored ledger tries it again. `given_up` counts
    these visits, `reasons` why rollouts failed.
    """

    tasks: int
    seed: int
    retries: int = 3
    next_id: int = 0
    groups_trained: int = 0
    given_up: int = 0
    counts: RolloutCounts = field(default_factory=RolloutCounts)
    reasons: Counter[str] = field(default_factory=Counter)
    live: dict[int, Entry] = field(default_factory=dict)
    _order: tuple[int, list[int]] = (-1, [])
    _left_out: set[int] = field(default_factory=set)

    def start(self) -> Entry:
        """Hand out the next entry: a pending one first, else the next of the shuffled epochs."""
        pending = [e for e in self.live.values() if e.state is State.PENDING]
        if pending:
            entry = min(pending, key=lambda e: e.id)
        else:
            entry = self._next()
            while entry.task in self._left_out and len(self._left_out) < self.tasks:
                self.given_up += 1
                entry = self._next()
            self.live[entry.id] = entry
        entry.state = State.RUNNING
        return entry

    def leave_out(self, tasks: Iterable[int]) -> None:
        """Hand out no entry of these tasks, which can't be played."""
        self._left_out.update(tasks)

    def ready(self, entry_id: int, *, rollouts: int, failed: int) -> None:
        """The entry's group is complete: `rollouts` members to train on and `failed` that did not survive."""
        entry = self._expect(entry_id, State.RUNNING)
        entry.state, entry.rollouts = State.READY, rollouts
        self.counts.generated += rollouts + failed
        self.counts.failed += failed
        self.counts.ready += rollouts

    def trained(self, entry_id: int) -> None:
        """The entry's group went into a batch; it will never be handed out again."""
        self.counts.trained += self._leave_buffer(entry_id)
        self.groups_trained += 1
        del self.live[entry_id]

    def filtered(self, entry_id: int) -> None:
        """The entry's group carries no signal (all rewards equal) and is not trained on."""
        self.counts.filtered += self._leave_buffer(entry_id)
        del self.live[entry_id]

    def dropped_stale(self, entry_id: int) -> None:
        """The entry's group grew too old in the buffer; the task is tried again."""
        self.counts.dropped_stale += self._leave_buffer(entry_id)
        self._try_again(entry_id)

    def failed(self, entry_id: int, *, rollouts: int) -> bool:
        """Too few of the entry's `rollouts` rollouts survived to make a group; the task is tried again.

        Returns whether it is left out from now on, since every try has failed.
        """
        entry = self._expect(entry_id, State.RUNNING)
        entry.failed += 1
        self.counts.generated += rollouts
        self.counts.failed += rollouts
        self._try_again(entry_id)
        if given_up := entry.failed > self.retries:
            self._left_out.add(entry.task)
        return given_up

    def cancelled(self, entry_id: int) -> None:
        """The entry was interrupted before it ended, by a stop of the run; it is pending and has lost no try."""
        self._expect(entry_id, State.RUNNING).state = State.PENDING

    @property
    def running_tasks(self) -> set[int]:
        return {e.task for e in self.live.values() if e.state is State.RUNNING}

    def count(self, state: State) -> int:
        return sum(e.state is state for e in self.live.values())

    def snapshot(self) -> dict[str, Any]:
        """Plain data to restore from. What is running now was never seen to end, so it is pending there."""
        data = {k: v for k, v in vars(self).items() if not k.startswith("_")}
        live = [asdict(e) | ({"state": State.PENDING} if e.state is State.RUNNING else {}) for e in self.live.values()]
        return data | {"live": live, "counts": asdict(self.counts), "reasons": dict(self.reasons)}

    @classmethod
    def restore(cls, data: dict[str, Any]) -> Ledger:
        live = {e["id"]: Entry(**(e | {"state": State(e["state"])})) for e in data["live"]}
        counts = RolloutCounts(**data["counts"])
        return cls(**(data | {"live": live, "counts": counts, "reasons": Counter(data["reasons"])}))

    def _next(self) -> Entry:
        """The next visit in the order of the epochs."""
        epoch, position = divmod(self.next_id, self.tasks)
        self.next_id += 1
        return Entry(self.next_id - 1, self._shuffled(epoch)[position])

    def _shuffled(self, epoch: int) -> list[int]:
        if self._order[0] != epoch:
            order = list(range(self.tasks))
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._order[1]

    def _leave_buffer(self, entry_id: int) -> int:
        entry = self._expect(entry_id, State.READY)
        self.counts.ready -= entry.rollouts
        return entry.rollouts

    def _try_again(self, entry_id: int) -> None:
        entry = self.live[entry_id]
        if entry.attempt >= self.retries:
            self.given_up += 1
            del self.live[entry_id]
        else:
            entry.attempt, entry.state, entry.rollouts = entry.attempt + 1, State.PENDING, 0

    def _expect(self, entry_id: int, state: State) -> Entry:
        entry = self.live.get(entry_id)
        if entry is None or entry.state is not state:
            found = "unknown or ended" if entry is None else str(entry.state)
            raise LedgerError(f"entry {entry_id} should be {state}, but it is {found}")
        return entry
