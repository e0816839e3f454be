"""The exactly-once record of every visit to a task.

A *visit* is one place in the shuffled epochs of an environment. Visits are numbered in the order of their first start;
the environment of each is the one furthest behind its share. A visit is live (pending, running or ready) until it is
trained on, filtered, or abandoned after too many retries; then only its counts remain. The ledger does no I/O. The
training loop reports each event to it, and an impossible transition raises `LedgerError`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from slipstream.scheduling.curriculum import TaskStream


class State(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    READY = "ready"


class LedgerError(RuntimeError):
    """Impossible transition of a visit: a task would be lost or trained on twice."""


@dataclass
class Visit:
    """One visit to a task, by its index and that of its environment. `attempt` counts earlier tries, `failed` those
    that failed."""

    id: int
    task: int
    environment: int = 0
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
    """All visits of a run to the tasks of its environments, shuffled in every epoch by `seed`.

    A failed or stale visit returns to pending until it was tried `retries` + 1 times; then it is abandoned. A task
    is retired if every try of one of its visits failed: its visits are skipped, unless all tasks of the environment are
    retired. A checkpoint does not hold retired tasks. `abandoned` counts visits, `reasons` failed rollouts by reason.
    """

    streams: Sequence[TaskStream]  # one for each environment
    seed: int
    retries: int = 3
    next_id: int = 0
    groups_trained: int = 0
    abandoned: int = 0
    counts: RolloutCounts = field(default_factory=RolloutCounts)
    reasons: Counter[str] = field(default_factory=Counter)
    live: dict[int, Visit] = field(default_factory=dict)
    _ids: dict[State, set[int]] = field(init=False, repr=False)  # of live visits, by state

    def __post_init__(self) -> None:
        self._ids = {state: {v.id for v in self.live.values() if v.state is state} for state in State}

    def start(self) -> Visit:
        """Start the pending visit with the lowest id, else the next visit of the shuffled epochs."""
        if pending := self._ids[State.PENDING]:
            visit = self.live[min(pending)]
        else:
            visit = self._next()
            while visit.task in (stream := self.streams[visit.environment]).retired and stream.playable:
                self.abandoned += 1
                visit = self._next()
            self.live[visit.id] = visit
        self._set_state(visit, State.RUNNING)
        return visit

    def retire(self, environment: int, tasks: Iterable[int]) -> None:
        """Exclude tasks of an environment that can't be played."""
        self.streams[environment].retired.update(tasks)

    def ready(self, visit_id: int, *, rollouts: int, failures: Sequence[str] = (), success: float = 0.0) -> None:
        """The visit's group is complete, with this number of `rollouts` to train on.

        `failures` has the reason of each rollout that failed. `success`, from 0 to 1, is counted for the curriculum.
        """
        visit = self._expect(visit_id, State.RUNNING)
        self._set_state(visit, State.READY)
        visit.rollouts = rollouts
        self.counts.generated += rollouts
        self.counts.ready += rollouts
        self._count_failed(failures)
        self.streams[visit.environment].record(visit.task, success)

    def trained(self, visit_id: int) -> None:
        """The visit's group is in a batch; the visit ends."""
        self.counts.trained += self._leave_buffer(visit_id)
        self.groups_trained += 1
        self._end(visit_id)

    def filtered(self, visit_id: int) -> None:
        """The visit's group has only zero advantages and is not trained on; the visit ends."""
        self.counts.filtered += self._leave_buffer(visit_id)
        self._end(visit_id)

    def dropped_stale(self, visit_id: int) -> None:
        """The visit's group exceeded `max_lag` in the buffer; the task is tried again."""
        self.counts.dropped_stale += self._leave_buffer(visit_id)
        self._try_again(visit_id)

    def failed(self, visit_id: int, failures: Sequence[str]) -> bool:
        """Too few of the visit's rollouts succeeded: the visit is pending again, or abandoned after its last try.

        `failures` has the reason of each rollout, also of those lost with the group. If all tries of the visit failed,
        and none was dropped as stale, its task is retired. Returns whether it is.
        """
        visit = self._expect(visit_id, State.RUNNING)
        visit.failed += 1
        self._count_failed(failures)
        self._try_again(visit_id)
        if retired := visit.failed > self.retries:
            self.retire(visit.environment, [visit.task])
        return retired

    def cancelled(self, visit_id: int) -> None:
        """A stop of the run interrupted the visit; it is pending again, and the try does not count."""
        self._set_state(self._expect(visit_id, State.RUNNING), State.PENDING)

    def running_tasks(self, environment: int) -> set[int]:
        """Indices of the environment's tasks in flight."""
        running = (self.live[visit_id] for visit_id in self._ids[State.RUNNING])
        return {visit.task for visit in running if visit.environment == environment}

    def count(self, state: State) -> int:
        """Number of live visits in this state."""
        return len(self._ids[state])

    def snapshot(self) -> dict[str, Any]:
        """Plain data for a checkpoint. Running visits are saved as pending."""
        streams = [stream.snapshot() for stream in self.streams]
        live = [asdict(e) | ({"state": State.PENDING} if e.state is State.RUNNING else {}) for e in self.live.values()]
        changed = {"streams": streams, "live": live, "counts": asdict(self.counts), "reasons": dict(self.reasons)}
        return {name: value for name, value in vars(self).items() if name != "_ids"} | changed

    @classmethod
    def restore(cls, data: dict[str, Any], streams: Sequence[TaskStream]) -> Ledger:
        """The ledger of a `snapshot`. `streams` are new, with the same tasks."""
        for stream, state in zip(streams, data["streams"], strict=True):
            stream.restore(state)
        live = {e["id"]: Visit(**(e | {"state": State(e["state"])})) for e in data["live"]}
        counts = RolloutCounts(**data["counts"])
        changed = {"streams": streams, "live": live, "counts": counts, "reasons": Counter(data["reasons"])}
        return cls(**(data | changed))

    def _next(self) -> Visit:
        """The next visit, of the environment that is furthest behind its share. Those without tasks lose no share."""
        playable = [stream for stream in self.streams if stream.playable] or self.streams
        chosen = min(playable, key=lambda stream: stream.progress + 0.5 / stream.weight)
        for stream in self.streams:
            if stream is chosen or not stream.playable:
                stream.progress = max(stream.progress, chosen.progress) + (1 / stream.weight if stream is chosen else 0)
        self.next_id += 1
        return Visit(self.next_id - 1, chosen.next_task(self.seed), self.streams.index(chosen))

    def _count_failed(self, failures: Sequence[str]) -> None:
        self.counts.generated += len(failures)
        self.counts.failed += len(failures)
        self.reasons.update(failures)

    def _leave_buffer(self, visit_id: int) -> int:
        visit = self._expect(visit_id, State.READY)
        self.counts.ready -= visit.rollouts
        return visit.rollouts

    def _try_again(self, visit_id: int) -> None:
        visit = self.live[visit_id]
        if visit.attempt >= self.retries:
            self.abandoned += 1
            self._end(visit_id)
        else:
            self._set_state(visit, State.PENDING)
            visit.attempt, visit.rollouts = visit.attempt + 1, 0

    def _set_state(self, visit: Visit, state: State) -> None:
        self._ids[visit.state].discard(visit.id)
        self._ids[state].add(visit.id)
        visit.state = state

    def _end(self, visit_id: int) -> None:
        self._ids[self.live.pop(visit_id).state].discard(visit_id)

    def _expect(self, visit_id: int, state: State) -> Visit:
        visit = self.live.get(visit_id)
        if visit is None or visit.state is not state:
            found = "unknown or ended" if visit is None else str(visit.state)
            raise LedgerError(f"visit {visit_id} should be {state}, but it is {found}")
        return visit
