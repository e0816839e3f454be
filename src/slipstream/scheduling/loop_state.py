"""The state of the training loop as a pure state machine: ledger, buffer, version, step, and consecutive failures.

No I/O, no clock, no tensors. The loop reports events; the state machine returns the number of groups to start, the
groups of the next batch, and the contents of a checkpoint.

The *lag* of a token is the trainer's version minus the version that sampled it. Admission makes large lags rare: no
more groups are started than the next `max_lag + 1` versions can consume. The check when a batch is taken drops stale
groups, since a group admitted in time can still end late; their tasks are tried again.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

from slipstream.config.schema import LoopConfig
from slipstream.rollout import Group, Rollout
from slipstream.scheduling.curriculum import TaskStream, success_of
from slipstream.scheduling.ledger import Ledger, State, Visit

TOO_FEW = "too few others of its group succeeded"  # the reason for which a rollout that succeeded is lost
MIN_GROUP_SIZE = 2
Fate = Literal["ready", "filtered", "failed", "retired"]  # of a group; "retired": so is its task, after its last try


class BufferFull(RuntimeError):
    """A group arrived at a full buffer: admission started too many groups."""


class LoopState:
    """State of a run. `every` is the number of steps between two publishes.

    `ready` is the buffer between engines and trainer: at most `capacity` groups, by oldest version, then by visit.
    `policy_versions` counts for each of several `policies` the versions in which it has changed.
    """

    def __init__(
        self, options: LoopConfig, every: int, streams: Sequence[TaskStream], policies: Sequence[str] = ()
    ) -> None:
        self.options, self.every = options, every
        self.policy_versions = dict.fromkeys(policies, 0)
        self._trained: set[str] = set()  # policies with rollouts in a batch since the last version
        self.ledger = Ledger(streams, options.seed, options.retries)
        self.ready: list[Group] = []
        self.capacity = options.buffer_size or (options.max_lag + 1) * options.groups_per_step * every
        self.step = 0
        self.version = 0  # version of the trainer's weights
        self.staged = 0  # step of the weights that became the last version
        self.published = 0  # step of the served weights; a stop publishes between multiples of `every`
        self.filtered_in_a_row = 0  # groups without signal since the last one with signal

    @property
    def running(self) -> int:
        return self.ledger.count(State.RUNNING)

    @property
    def untrained(self) -> list[str]:
        """Policies without a rollout in any batch."""
        return [name for name, count in self.policy_versions.items() if not count and name not in self._trained]

    def startable(self) -> int:
        """Number of groups that may start now: at most what admission allows and what the remaining steps can use."""
        ready, running, per_step = len(self.ready), self.running, self.options.groups_per_step
        free = capacity(
            version=self.published // self.every,  # versions that were served for `every` steps
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
        visit: Visit,
        task_id: str,
        rollouts: Sequence[Rollout],
        *,
        failures: Sequence[str] = (),
        has_signal: Callable[[Group], bool] = lambda group: True,
        max_filtered_in_a_row: float = math.inf,
    ) -> Fate:
        """Record that a group has ended with these successful rollouts, and `failures`, the reasons of the others.

        Returns its fate. Raises `BufferFull`.

        With fewer than `MIN_GROUP_SIZE` rollouts in every role the task is tried again ("failed"), or retired after its
        last try. A group without signal is filtered, but after `max_filtered_in_a_row` of them the next ones are added
        to the buffer until one has signal. All others are added ("ready").
        """
        group = Group(visit.id, task_id, tuple(rollouts), self.ledger.streams[visit.environment].label)
        if max(map(len, group.roles.values()), default=0) < MIN_GROUP_SIZE:
            retired = self.ledger.failed(visit.id, [*failures, *[TOO_FEW] * len(rollouts)])
            return "retired" if retired else "failed"
        self.ledger.ready(visit.id, rollouts=len(rollouts), failures=failures, success=success_of(rollouts))
        empty = not has_signal(group)
        if empty and self.filtered_in_a_row < max_filtered_in_a_row:
            self.ledger.filtered(visit.id)
            self.filtered_in_a_row += 1
            return "filtered"
        if len(self.ready) >= self.capacity:
            raise BufferFull(f"visit {visit.id} arrived at a buffer that holds {self.capacity} groups already")
        self.filtered_in_a_row = self.filtered_in_a_row if empty else 0
        bisect.insort(self.ready, group, key=lambda g: (g.oldest_version, g.visit_id))
        return "ready"

    def take_batch(self, on_stale: Callable[[int], object] = lambda visit_id: None) -> list[Group]:
        """Take the groups of the next step from the buffer; an empty list while too few are fresh.

        Tasks of stale groups return to pending, after `on_stale(visit_id)`. A synchronous run waits for all running
        groups, so that its batches do not depend on the order in which groups end. With `force_max_lag`, a batch is
        taken once at most one version's worth of groups is running or may start, so that its lag is `max_lag` or
        `max_lag` - 1.
        """
        while self.ready and is_stale(self.version, self.ready[0].oldest_version, self.options.max_lag):
            on_stale(self.ready[0].visit_id)
            self.ledger.dropped_stale(self.ready.pop(0).visit_id)
        count = self.options.groups_per_step
        if len(self.ready) < count or (self.options.max_lag == 0 and self.running):
            return []
        if self.options.force_max_lag and self.running + self.startable() > count * self.every:
            return []
        groups, self.ready = self.ready[:count], self.ready[count:]
        for group in groups:
            self.ledger.trained(group.visit_id)
            if self.policy_versions:
                self._trained.update(rollout.policy for rollout in group.rollouts)
        return groups

    def stage(self) -> None:
        """The weights of this step become the next version, and publishing starts; buffered tokens age by a version."""
        self.version += 1
        self.staged = self.step
        for name in self._trained:
            self.policy_versions[name] += 1
        self._trained.clear()

    def publish(self, step: int) -> None:
        """Every engine that is not late serves the weights of this step; more groups may start."""
        self.published = step

    def snapshot(self) -> dict[str, Any]:
        """Plain data for a checkpoint, without the ready groups. Called when this step's weights are a version."""
        state = {"step": self.step, "version": self.version, "policy_versions": dict(self.policy_versions)}
        return state | self._pace() | {"ledger": self.ledger.snapshot()}

    def restore(self, data: dict[str, Any], ready: Sequence[Group]) -> None:
        """Restore a snapshot and its ready groups. Raises `ValueError` if tasks, groups per version or groups differ.

        Admission counts versions in groups, so groups per version can't change. `max_lag` can: restored groups that are
        stale now are dropped when the next batch is taken.
        """
        streams = self.ledger.streams
        before = [(stream["label"], stream["tasks"]) for stream in data["ledger"]["streams"]]
        if before != (after := [(stream.label, stream.tasks) for stream in streams]):
            raise ValueError(
                f"the run was started on {_describe(before)}, and now there are {_describe(after)}; "
                "give it the data it was started on"
            )
        if [*(versions := data.get("policy_versions", {}))] != [*self.policy_versions]:
            known = ", ".join(versions) or "none"
            raise ValueError(f"[[policies]] can't be changed when a run is resumed; it was started with: {known}")
        self.policy_versions = dict(versions)
        for name, now in self._pace().items():
            if data[name] != now:
                raise ValueError(f"{name} = {now} can't be changed when a run is resumed; leave it at {data[name]}")
        ledger = Ledger.restore(data["ledger"] | {"retries": self.options.retries}, streams)
        if sorted(g.visit_id for g in ready) != sorted(e.id for e in ledger.live.values() if e.state is State.READY):
            raise ValueError(f"{len(ready)} groups were saved, and the ledger has {ledger.count(State.READY)} others")
        self.ledger, self.version, self.step = ledger, data["version"], data["step"]
        self.staged = self.published = self.step
        self.ready = list(ready)
        self.capacity = max(self.capacity, len(self.ready))

    def _pace(self) -> dict[str, int]:
        return {"loop.groups_per_step": self.options.groups_per_step, "sync.every": self.every}


def _describe(streams: Sequence[tuple[str, int]]) -> str:
    """Number of training tasks of each environment."""
    return ", ".join(f"{tasks} training task{'s' * (tasks != 1)} of {label}" for label, tasks in streams)


def capacity(
    *, version: int, max_lag: int, groups_per_version: int, trained: int, ready: int, running: int, buffer: int
) -> int:
    """Number of groups that may start now.

    `trained` counts groups since the start of the run. Dropped, failed and filtered groups are not counted, so each is
    replaced at once. `buffer` bounds running and ready groups together. With `max_lag` 0, groups are replaced when the
    last running group ends, so that the composition of every forward pass depends only on the seed.
    """
    if max_lag == 0 and running:
        return 0
    by_lag = (max_lag + version + 1) * groups_per_version - (trained + ready + running)
    return max(0, min(by_lag, buffer - ready - running))


def is_stale(version: int, oldest: int, max_lag: int) -> bool:
    """Whether a token sampled by version `oldest` exceeds `max_lag` at `version`."""
    return version - oldest > max_lag


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


def max_episodes(max_lag: int, group_size: int, engine_slots: int, limit: int) -> int:
    """Largest number of episodes in flight; 0: unbounded. `limit` is `environment.max_concurrent`.

    `engine_slots` is the number of sequences that the engines decode; 0: unknown. By default it is twice that, and
    unbounded for a synchronous run, which starts a whole wave at once: the order of requests must not depend on when
    other episodes end.
    """
    auto = max(2 * engine_slots, group_size) if max_lag and engine_slots else 0
    return limit or auto
