"""The invariants of the loop's state machine, under random completion orders, failures and restarts."""

from __future__ import annotations

import json
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.buffer import BufferFull, RolloutBuffer
from slipstream.ledger import Ledger, LedgerError, RolloutCounts, State
from slipstream.rollout import Completion, Group, Rollout, VersionSpan, spans_of
from slipstream.staleness import capacity, is_stale


def group(entry: int, oldest: int, newest: int | None = None, size: int = 2) -> Group:
    spans = (VersionSpan(oldest, 0, 1), VersionSpan(oldest if newest is None else newest, 1, 2))
    completion = Completion((1,), (2, 3), (-0.5, -0.5), spans, "stop")
    return Group(entry, str(entry), (Rollout((completion,), 1.0),) * size)


class Line:
    """The loop of run.py reduced to its state: what it may do next is chosen by the test."""

    def __init__(self, max_lag: int, groups_per_step: int, every: int, tasks: int, retries: int, size: int) -> None:
        self.max_lag, self.groups_per_step, self.every, self.size = max_lag, groups_per_step, every, size
        self.ledger = Ledger(tasks, seed=3, retries=retries)
        self.buffer = RolloutBuffer((max_lag + 1) * groups_per_step * every)
        self.version = self.step = 0
        self.began: dict[int, int] = {}
        self.trained: list[int] = []
        self.trained_lags: list[int] = []

    def admit(self) -> None:
        ready, running = len(self.buffer), self.ledger.count(State.RUNNING)
        free = capacity(
            version=self.version, max_lag=self.max_lag, groups_per_version=self.groups_per_step * self.every,
            trained=self.ledger.groups_trained, ready=ready, running=running, buffer=self.buffer.capacity,
        )  # fmt: skip
        for _ in range(free):
            self.began[self.ledger.start().id] = self.version

    def finish(self, entry: int, survivors: int, keep: bool) -> None:
        if survivors < 2:
            self.ledger.failed(entry, rollouts=self.size)
            return
        self.ledger.ready(entry, rollouts=survivors, failed=self.size - survivors)
        if keep:
            self.buffer.put(group(entry, self.began[entry], self.version, survivors))
        else:
            self.ledger.filtered(entry)

    def train(self) -> None:
        for stale in self.buffer.drop_stale(self.version, self.max_lag):
            self.ledger.dropped_stale(stale.entry)
        for taken in self.buffer.take(self.groups_per_step):
            self.ledger.trained(taken.entry)
            self.trained.append(taken.entry)
            self.trained_lags.append(self.version - taken.oldest_version)
        self.step += 1
        self.version = self.step // self.every

    def check(self) -> None:
        counts = self.ledger.counts
        assert counts.conserved()
        assert counts.ready == sum(len(g.rollouts) for g in self.buffer.groups)
        assert all(n <= self.max_lag for n in self.trained_lags)
        assert len(self.trained) == len(set(self.trained)) == self.ledger.groups_trained
        assert len(self.buffer) + self.ledger.count(State.RUNNING) <= self.buffer.capacity
        handed_out = set(range(self.ledger.next_id))
        live = set(self.ledger.live)
        assert live | set(self.trained) <= handed_out
        assert not live & set(self.trained)

    def restart(self) -> None:
        """Kill -9 and resume from a checkpoint taken now, through JSON as on disk."""
        self.ledger = Ledger.restore(json.loads(json.dumps(self.ledger.snapshot())))


@given(
    st.integers(0, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 9), st.integers(0, 3), st.integers(2, 5),
    st.randoms(use_true_random=False),
)  # fmt: skip
def test_nothing_is_lost_or_trained_twice(
    max_lag: int, per_step: int, every: int, tasks: int, retries: int, size: int, rng: random.Random
) -> None:
    line = Line(max_lag, per_step, every, tasks, retries, size)
    for _ in range(120):
        line.admit()
        line.check()
        running = [e.id for e in line.ledger.live.values() if e.state is State.RUNNING]
        act = rng.random()
        if act < 0.75 and running:
            survivors = size if rng.random() < 0.7 else rng.randint(0, size)
            line.finish(rng.choice(running), survivors, keep=rng.random() < 0.9)
        elif act < 0.95:
            if len(line.buffer) >= per_step:
                line.train()
        else:
            line.restart()
        line.check()
    # Whatever happened, the run can always go on: either work is running, or a batch is ready, or more may start.
    line.admit()
    assert line.ledger.count(State.RUNNING) or len(line.buffer) >= per_step


@given(st.integers(0, 4), st.integers(1, 4), st.integers(1, 3))
def test_in_order_completion_is_never_stale(max_lag: int, per_step: int, every: int) -> None:
    """Admission makes lag rare: where nothing straggles, nothing is dropped."""
    line = Line(max_lag, per_step, every, tasks=7, retries=0, size=2)
    for _ in range(60):
        line.admit()
        for entry in sorted(e.id for e in line.ledger.live.values() if e.state is State.RUNNING):
            line.finish(entry, 2, keep=True)
        line.train()
        line.check()
    assert line.ledger.counts.dropped_stale == 0
    assert len(line.trained) == 60 * per_step


def test_a_straggler_is_dropped_not_trained_on() -> None:
    """Admission alone does not bound age: a group admitted in time that ends late is refused at the taking end."""
    line = Line(1, 1, 1, tasks=5, retries=1, size=2)
    line.admit()
    straggler, *_ = sorted(line.began)
    for _ in range(4):
        line.admit()
        running = [e.id for e in line.ledger.live.values() if e.state is State.RUNNING and e.id != straggler]
        line.finish(running[0], 2, keep=True)
        line.train()
    line.finish(straggler, 2, keep=True)
    line.train()
    assert line.ledger.counts.dropped_stale == 2
    assert straggler not in line.trained
    assert line.ledger.live[straggler].state is State.PENDING
    assert line.ledger.live[straggler].attempt == 1
    line.check()


@given(st.integers(1, 30), st.integers(0, 5))
def test_every_epoch_visits_every_task_once(tasks: int, seed: int) -> None:
    ledger = Ledger(tasks, seed)
    epochs = [[ledger.start().task for _ in range(tasks)] for _ in range(3)]
    assert all(sorted(epoch) == list(range(tasks)) for epoch in epochs)
    again = Ledger(tasks, seed)
    assert [again.start().task for _ in range(3 * tasks)] == [task for epoch in epochs for task in epoch]
    if tasks > 8:
        assert epochs[0] != epochs[1]


def test_retries_are_counted_and_then_given_up() -> None:
    ledger = Ledger(1, seed=0, retries=2)
    for attempt in range(3):
        entry = ledger.start()
        assert (entry.id, entry.attempt) == (0, attempt)
        ledger.failed(entry.id, rollouts=4)
    assert ledger.given_up == 1 and not ledger.live
    assert ledger.counts == RolloutCounts(generated=12, failed=12)
    assert ledger.start().id == 1


@pytest.mark.parametrize("move", ["ready", "trained", "filtered", "dropped_stale", "failed", "cancelled"])
def test_impossible_transitions_are_refused(move: str) -> None:
    ledger = Ledger(3, seed=0)
    arguments = {"ready": {"rollouts": 2, "failed": 0}, "failed": {"rollouts": 2}}.get(move, {})
    with pytest.raises(LedgerError, match="entry 0 should be"):
        getattr(ledger, move)(0, **arguments)
    entry = ledger.start()
    ledger.ready(entry.id, rollouts=2, failed=0)
    ledger.trained(entry.id)
    with pytest.raises(LedgerError):
        ledger.trained(entry.id)


def test_a_restart_puts_running_work_back_without_losing_a_try() -> None:
    ledger = Ledger(5, seed=0, retries=0)
    first, second = ledger.start(), ledger.start()
    ledger.ready(second.id, rollouts=2, failed=0)
    restored = Ledger.restore(json.loads(json.dumps(ledger.snapshot())))
    assert restored.live[first.id].state is State.PENDING and restored.live[second.id].state is State.READY
    again = restored.start()
    assert (again.id, again.task, again.attempt) == (first.id, first.task, 0)
    assert restored.start().id == 2


def test_synchronous_admission_comes_in_waves() -> None:
    """max_lag 0: a refund is paid only when the wave is over, so that what runs together depends on the seed alone."""
    common = {"version": 0, "max_lag": 0, "groups_per_version": 4, "trained": 0, "buffer": 4}
    assert capacity(**common, ready=0, running=0) == 4
    assert capacity(**common, ready=1, running=2) == 0
    assert capacity(**common, ready=3, running=0) == 1


def test_the_buffer_is_bounded_and_gives_the_oldest_first() -> None:
    buffer = RolloutBuffer(3, [group(7, 2), group(3, 1), group(5, 1, 4)])
    with pytest.raises(BufferFull):
        buffer.put(group(8, 1))
    assert [g.entry for g in buffer.take(2)] == [3, 5]
    assert buffer.take(2) == []
    with pytest.raises(ValueError, match="entry 7"):
        buffer.put(group(7, 2))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30))
def test_spans_give_every_token_its_version(versions: list[int]) -> None:
    spans = spans_of(versions)
    assert [v for v, start, end in spans for _ in range(start, end)] == versions
    assert all(a.version != b.version and a.end == b.start for a, b in pairwise(spans))


def test_age_is_that_of_the_oldest_token() -> None:
    mixed = group(0, oldest=3, newest=9)
    assert mixed.oldest_version == 3
    assert is_stale(9, mixed.oldest_version, 5) and not is_stale(9, mixed.oldest_version, 6)
