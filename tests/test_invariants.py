"""The invariants of the loop's state machine, under random completion orders, failures and restarts."""

from __future__ import annotations

import dataclasses
import json
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.config.schema import LoopConfig
from slipstream.rollout import Completion, Group, Rollout, VersionSpan, version_spans
from slipstream.runtime import serialization
from slipstream.scheduling.curriculum import TaskStream
from slipstream.scheduling.ledger import Ledger, LedgerError, RolloutCounts, State, Visit
from slipstream.scheduling.loop_state import TOO_FEW, BufferFull, LoopState, capacity, is_stale


def rollout(oldest: int, newest: int, reward: float = 1.0) -> Rollout:
    spans = (VersionSpan(oldest, 0, 1), VersionSpan(newest, 1, 2))
    return Rollout((Completion((1,), (2, 3), (-0.5, -0.25), spans, "stop"),), reward, {"correct": reward})


def differs(group: Group) -> bool:
    return len({r.reward for r in group.rollouts}) > 1


def streams(*tasks: int) -> list[TaskStream]:
    return [TaskStream("efg"[index], count) for index, count in enumerate(tasks)]


class Line:
    """The state of the training loop, driven by the test as run.py drives it; records the fate of every group."""

    def __init__(self, **options: int) -> None:
        self.every, self.tasks = options.pop("every", 1), options.pop("tasks", 7)
        self.options = LoopConfig(steps=10_000, seed=3, **options)
        self.state = LoopState(self.options, self.every, streams(self.tasks))
        self.running: dict[int, tuple[Visit, int]] = {}  # with the version that was served at the start
        self.served = 0
        self.under_way: int | None = None  # the step whose weights are on their way to the generators
        self.trained: list[int] = []
        self.filtered: list[int] = []
        self.save()

    def admit(self) -> None:
        for _ in range(self.state.startable()):
            visit = self.state.ledger.start()
            self.running[visit.id] = visit, self.served

    def finish(self, number: int, survivors: int | None = None, equal: bool = False) -> None:
        visit, began = self.running.pop(number)
        survivors = self.options.group_size if survivors is None else survivors
        rewards = [0.0 if equal else float(member) for member in range(survivors)]
        rollouts = [rollout(began, self.served, reward) for reward in rewards]
        self.state.end(visit, "t", rollouts, failures=["x"] * (self.options.group_size - survivors), has_signal=differs)
        if survivors >= 2 and equal:
            self.filtered.append(number)

    def train(self, waits: bool = True) -> bool:
        groups = self.state.take_batch()
        for group in groups:
            assert self.state.version - group.oldest_version <= self.options.max_lag
            self.trained.append(group.visit_id)
        if groups:
            self.state.step += 1
            if self.state.step % self.every == 0:
                self.publish(waits)
        return bool(groups)

    def publish(self, waits: bool = True) -> None:
        self.arrive()  # one at a time
        self.state.stage()
        self.under_way = self.state.step
        if waits:
            self.arrive()

    def arrive(self) -> None:
        """The version in transfer is served."""
        if self.under_way is not None:
            self.state.publish(self.under_way)
            self.served, self.under_way = self.state.version, None

    def save(self) -> None:
        """A checkpoint, through JSON as on disk; what is running then was never seen to end."""
        groups = serialization.dumps(self.state.ready)
        self.saved = json.dumps(self.state.snapshot()), groups, list(self.trained), list(self.filtered)

    def restart(self, **changes: int) -> None:
        """Kill -9, then resume from the last checkpoint."""
        data, ready = json.loads(self.saved[0]), serialization.loads(self.saved[1])
        self.trained, self.filtered = list(self.saved[2]), list(self.saved[3])
        self.options = self.options.model_copy(update=changes)
        self.running, self.under_way = {}, None
        self.state = LoopState(self.options, self.every, streams(self.tasks))
        self.state.restore(data, ready)
        self.served = self.state.version

    def check(self) -> None:
        state = self.state
        counts, live = state.ledger.counts, set(state.ledger.live)
        fates = (counts.trained, counts.dropped_stale, counts.failed, counts.filtered, counts.ready)
        assert counts.generated == sum(fates)
        assert counts.failed == sum(state.ledger.reasons.values())
        assert counts.ready == sum(len(g.rollouts) for g in state.ready)
        assert len(self.trained) == len(set(self.trained)) == state.ledger.groups_trained
        assert len(state.ready) + state.running <= state.capacity and state.running == len(self.running)
        assert state.ready == sorted(state.ready, key=lambda g: (g.oldest_version, g.visit_id))
        assert not live & {*self.trained, *self.filtered}
        assert state.ledger.next_id == len(live) + len(self.trained) + len(self.filtered) + state.ledger.abandoned

    def goes_on(self) -> None:
        """Whatever happened, another step is reached by work that ends well."""
        for _ in range(4):
            self.arrive()
            self.admit()
            for number in list(self.running):
                self.finish(number)
            if self.train():
                return
        raise AssertionError("the loop hangs")


SMALL = {"max_lag": st.integers(0, 4), "groups_per_step": st.integers(1, 4), "every": st.integers(1, 3)}


@given(
    **SMALL, tasks=st.integers(1, 9), retries=st.integers(0, 3), group_size=st.integers(2, 5),
    rng=st.randoms(use_true_random=False),
)  # fmt: skip
def test_nothing_is_lost_or_trained_twice(rng: random.Random, **options: int) -> None:
    line = Line(**options)
    size = options["group_size"]
    for _ in range(60):
        line.admit()
        act = rng.random()
        if act < 0.7 and line.running:
            survivors = size if rng.random() < 0.7 else rng.randint(0, size)
            line.finish(rng.choice(list(line.running)), survivors, equal=rng.random() < 0.1)
        elif act < 0.85:
            line.train(waits=rng.random() < 0.5)
        elif act < 0.9:
            line.arrive()
        elif act < 0.95:
            line.restart()
        else:
            if line.state.published < line.state.step:  # a stop between two publishes
                line.publish()
            line.save()
        line.check()
    line.goes_on()


@given(**SMALL)
def test_in_order_completion_is_never_stale(**options: int) -> None:
    """Admission alone avoids stale groups if groups end in order."""
    line = Line(**options, retries=0)
    for _ in range(30):
        line.admit()
        for number in sorted(line.running):
            line.finish(number)
        assert line.train()
        line.check()
    assert line.state.ledger.counts.dropped_stale == 0


@given(**SMALL, rng=st.randoms(use_true_random=False))
def test_forced_lag_is_the_bound_or_one_less(rng: random.Random, **options: int) -> None:
    """For any speed of both sides and any order in which groups end, once the buffer was filled."""
    line = Line(**options, group_size=2, retries=9, force_max_lag=True)
    for _ in range(200):
        line.admit()
        if line.running and rng.random() < 0.6:
            line.finish(rng.choice(list(line.running)))
        version, before = line.state.version, len(line.trained)
        oldest = [g.oldest_version for g in line.state.ready[: line.options.groups_per_step]]
        if line.train() and version > options["max_lag"]:
            assert len(line.trained) == before + len(oldest)
            assert all(version - v >= options["max_lag"] - 1 for v in oldest)
        line.check()
    line.goes_on()


def test_a_straggler_is_dropped_not_trained_on() -> None:
    """Admission alone does not bound lag: a group admitted in time that ends late is dropped when a batch is taken."""
    line = Line(max_lag=1, groups_per_step=1, retries=1, group_size=2, tasks=5)
    line.admit()
    straggler = min(line.running)
    for _ in range(4):
        line.admit()
        line.finish(next(number for number in line.running if number != straggler))
        line.train()
    line.finish(straggler)
    assert not line.train()
    visit = line.state.ledger.live[straggler]
    assert line.state.ledger.counts.dropped_stale == 2 and straggler not in line.trained
    assert (visit.state, visit.attempt) == (State.PENDING, 1)
    line.check()


def lag_two() -> Line:
    """A run with lag 2 whose buffer is full: two steps done, six groups ready."""
    line = Line(max_lag=2, groups_per_step=2, group_size=2)
    for step in range(3):
        line.admit()
        for number in list(line.running):
            line.finish(number)
        assert step == 2 or line.train()
    assert len(line.state.ready) == line.state.capacity == 6
    line.save()
    return line


@pytest.mark.parametrize("max_lag", [0, 1, 4])
def test_a_resumed_run_may_change_its_lag(max_lag: int) -> None:
    line = lag_two()
    line.restart(max_lag=max_lag)
    assert len(line.state.ready) == 6  # all of them, whatever a buffer for this lag could hold
    line.check()
    for _ in range(8):
        line.goes_on()
        line.check()


@pytest.mark.parametrize(
    ("groups_per_step", "every", "said"),
    [
        (1, 1, "loop.groups_per_step = 1 can't be changed.*leave it at 2"),
        (2, 4, "sync.every = 4 can't be changed.*at 1"),
    ],
)
def test_a_resumed_run_keeps_groups_per_version(groups_per_step: int, every: int, said: str) -> None:
    """Admission counts versions in groups: another number of groups per version would block it or overfill the
    buffer.
    """
    line = lag_two()
    other = LoopState(line.options.model_copy(update={"groups_per_step": groups_per_step}), every, streams(line.tasks))
    with pytest.raises(ValueError, match=said):
        other.restore(json.loads(line.saved[0]), [])
    with pytest.raises(ValueError, match="7 training tasks of e, and now there are 8 training tasks of e; give it"):
        LoopState(line.options, 1, streams(8)).restore(json.loads(line.saved[0]), [])


def test_a_stop_between_publishes_admits_no_further_groups() -> None:
    line = Line(max_lag=0, groups_per_step=1, every=3, group_size=2)
    line.goes_on()
    line.publish()
    line.save()
    line.restart()
    assert not line.train()  # what was ready is of the version before, and that is too old now
    assert (line.state.version, line.state.step, line.state.startable()) == (1, 1, 2)
    line.goes_on()
    line.goes_on()
    assert (line.state.version, line.state.step, line.state.startable()) == (2, 3, 3)


def test_ready_groups_are_restored_exactly() -> None:
    line = lag_two()
    before = line.state.ready
    line.restart()
    assert line.state.ready == before


def test_groups_without_signal_are_counted_in_a_row() -> None:
    line = Line(max_lag=1, groups_per_step=2, group_size=2)
    for equal, count in ((True, 1), (True, 2), (False, 0), (True, 1)):
        line.admit()
        line.finish(min(line.running), equal=equal)
        assert line.state.filtered_in_a_row == count
    line.check()


def test_groups_after_the_filter_limit_are_trained_on() -> None:
    state = LoopState(LoopConfig(groups_per_step=2, max_lag=9), 1, streams(9))
    for equal, ready in ((True, 0), (True, 0), (True, 1), (True, 2), (False, 3), (True, 3)):
        rewards = (1.0, 1.0) if equal else (1.0, 0.0)
        visit = state.ledger.start()
        rollouts = [dataclasses.replace(rollout(0, 4), reward=r) for r in rewards]
        state.end(visit, "t", rollouts, has_signal=differs, max_filtered_in_a_row=2)
        assert len(state.ready) == ready
    assert state.ledger.counts.filtered == 3 * 2


def test_a_rollout_that_is_lost_with_its_group_has_a_reason() -> None:
    state = LoopState(LoopConfig(group_size=4), 1, streams(9))
    for survivors in (0, 1, 3):
        assert state.end(state.ledger.start(), "t", [rollout(0, 4)] * survivors, failures=["x"] * (4 - survivors))
    assert state.ledger.reasons == {TOO_FEW: 1, "x": 4 + 3 + 1} and state.ledger.counts.failed == 4 + 4 + 1


def test_the_buffer_is_bounded_and_sorted_by_oldest_version() -> None:
    state = LoopState(LoopConfig(buffer_size=3, groups_per_step=2, max_lag=9), 1, streams(9))
    visits = [state.ledger.start() for _ in range(4)]
    for visit, oldest in zip(visits[:3], (2, 1, 1), strict=True):
        state.end(visit, "t", [rollout(oldest, 4)] * 2)
    with pytest.raises(BufferFull, match="visit 3 arrived at a buffer that holds 3"):
        state.end(visits[3], "t", [rollout(0, 4)] * 2)
    assert [g.visit_id for g in state.take_batch()] == [1, 2]
    assert state.take_batch() == []


@given(st.integers(1, 30), st.integers(0, 5))
def test_every_epoch_visits_every_task_once(tasks: int, seed: int) -> None:
    ledger = Ledger(streams(tasks), seed)
    epochs = [[ledger.start().task for _ in range(tasks)] for _ in range(3)]
    assert all(sorted(epoch) == list(range(tasks)) for epoch in epochs)
    again = Ledger(streams(tasks), seed)
    assert [again.start().task for _ in range(3 * tasks)] == [task for epoch in epochs for task in epoch]
    if tasks > 8:
        assert epochs[0] != epochs[1]


def test_a_visit_is_abandoned_after_its_retries() -> None:
    ledger = Ledger(streams(1), seed=0, retries=2)
    for attempt in range(3):
        visit = ledger.start()
        assert (visit.id, visit.attempt) == (0, attempt)
        ledger.failed(visit.id, ["x"] * 4)
    assert ledger.abandoned == 1 and not ledger.live
    assert ledger.counts == RolloutCounts(generated=12, failed=12)
    assert ledger.start().id == 1


def test_a_task_whose_every_try_failed_is_retired_unless_all_are() -> None:
    state = LoopState(LoopConfig(groups_per_step=2, max_lag=9, retries=1, seed=1), 1, streams(3))
    retired = []
    for _ in range(8):
        visit = state.ledger.start()
        fate = state.end(visit, "t", [rollout(0, 0)] * 2 * (visit.task != 1))
        retired += [visit.task] * (fate == "retired")
    assert retired == [1]
    assert [state.ledger.start().task for _ in range(9)].count(1) == 0
    assert state.ledger.abandoned > 1, "visits to retired tasks are counted"
    again = LoopState(state.options, 1, streams(3))
    again.restore(json.loads(json.dumps(state.snapshot())), state.ready)
    assert 1 in [again.ledger.start().task for _ in range(12)], "who resumes may have mended it"
    state.ledger.retire(0, range(3))
    assert {state.ledger.start().task for _ in range(9)} == {0, 1, 2}


@pytest.mark.parametrize("move", ["ready", "trained", "filtered", "dropped_stale", "failed", "cancelled"])
def test_impossible_transitions_raise(move: str) -> None:
    ledger = Ledger(streams(3), seed=0)
    arguments = {"ready": {"rollouts": 2}, "failed": {"failures": ["x"] * 2}}.get(move, {})
    with pytest.raises(LedgerError, match="visit 0 should be"):
        getattr(ledger, move)(0, **arguments)
    visit = ledger.start()
    ledger.ready(visit.id, rollouts=2)
    ledger.trained(visit.id)
    with pytest.raises(LedgerError):
        ledger.trained(visit.id)


def test_running_entries_are_restored_as_pending_with_their_tries() -> None:
    ledger = Ledger(streams(5), seed=0, retries=0)
    first, second = ledger.start(), ledger.start()
    ledger.ready(second.id, rollouts=2)
    restored = Ledger.restore(json.loads(json.dumps(ledger.snapshot())), streams(5))
    assert restored.live[first.id].state is State.PENDING and restored.live[second.id].state is State.READY
    again = restored.start()
    assert (again.id, again.task, again.attempt) == (first.id, first.task, 0)
    assert restored.start().id == 2


def test_synchronous_admission_waits_for_all_running_groups() -> None:
    """With max_lag 0, the set of groups that run concurrently depends only on the seed."""
    common = {"version": 0, "max_lag": 0, "groups_per_version": 4, "trained": 0, "buffer": 4}
    assert capacity(**common, ready=0, running=0) == 4
    assert capacity(**common, ready=1, running=2) == 0
    assert capacity(**common, ready=3, running=0) == 1


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30))
def test_spans_give_every_token_its_version(versions: list[int]) -> None:
    spans = version_spans(versions)
    assert [v for v, start, end in spans for _ in range(start, end)] == versions
    assert all(a.version != b.version and a.end == b.start for a, b in pairwise(spans))


def test_the_lag_of_a_group_is_that_of_its_oldest_token() -> None:
    mixed = Group(0, "t", (rollout(9, 9), rollout(3, 9)))
    assert mixed.oldest_version == 3
    assert is_stale(9, mixed.oldest_version, 5) and not is_stale(9, mixed.oldest_version, 6)
