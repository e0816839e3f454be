"""The loop's invariants under the simulator's schedules, with faults, and faults sown into the scheduler itself."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.plan.costs import PublishCost
from slipstream.plan.hardware import Rates
from slipstream.plan.ranking import simulated_figures
from slipstream.plan.scenario import Faults
from slipstream.plan.simulator import Simulation
from slipstream.plan.workload import Delay, Lengths
from slipstream.scheduling import loop_state
from slipstream.scheduling.ledger import State
from tests.plan.cases import scenario, work

ROOT = Path(__file__).parents[2]


class Broken(AssertionError):
    """An invariant of the loop does not hold."""


def check(simulation: Simulation) -> None:
    """Raise `Broken` unless the invariants of `scheduling` hold at this instant."""
    state, options, every = simulation.state, simulation.options, simulation.work.every
    counts, ready = state.ledger.counts, len(state.ready)
    fates = counts.trained, counts.dropped_stale, counts.failed, counts.filtered, counts.ready
    running, trained = state.ledger.count(State.RUNNING), state.ledger.groups_trained
    admitted = (options.max_lag + state.published // every + 1) * options.groups_per_step * every
    for holds, what in (
        (counts.generated == sum(fates), "a rollout is lost"),
        (counts.ready == sum(len(group.rollouts) for group in state.ready), "the buffer differs from the ledger"),
        (trained + ready + running <= admitted, "the gate admits too many groups"),
        (ready + running <= state.capacity, "the buffer overflows"),
        (state.version - state.published // every <= 2, "the trainer runs ahead of its publishes"),
    ):
        if not holds:
            raise Broken(what)
    if simulation.processed > 50_000:
        raise Broken("the run makes no progress")
    if simulation.records and max(simulation.records[-1].lags) > options.max_lag:
        raise Broken("a token is older than max_lag")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    max_lag=st.integers(0, 4), groups=st.integers(1, 6), every=st.integers(1, 3), engines=st.integers(1, 4),
    slots=st.integers(1, 12), turns=st.integers(1, 3), spread=st.sampled_from([0.0, 0.5, 1.5]),
    placement=st.sampled_from(["disaggregated", "disaggregated", "colocated", "single_copy"]),
    in_flight=st.sampled_from(["continue", "recompute", "retry"]), kv_tokens=st.sampled_from([1200.0, 1e6]),
    faulty=st.booleans(), overlaps=st.booleans(), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_invariants_hold_with_faults_of_all_kinds(
    max_lag: int, groups: int, every: int, engines: int, slots: int, turns: int, spread: float, placement: str,
    in_flight: str, kv_tokens: float, faulty: bool, overlaps: bool, seed: int,
) -> None:  # fmt: skip
    rng = random.Random(seed)
    faults = Faults()
    if faulty:
        faults = Faults(rng.uniform(5, 50), rng.uniform(50, 200), rng.uniform(0.1, 3), rng.choice([0, 0.02, 0.2]), 3)
    given_work = work(
        Lengths(200, spread, 800), groups=groups, every=every, turns=turns, steps=20, group_size=4,
        tool=Delay(0.05, 1.0), tool_tokens=5, scoring=Delay(rng.choice([0, 0.02]), 1.0), scorers=2,
    )  # fmt: skip
    slow = PublishCost("nccl", rng.uniform(0, 0.5), rng.uniform(0, 0.1), 0.01, 0.0)
    found = scenario(
        given_work, max_lag=max_lag, engines=engines, slots=slots, kv_tokens=kv_tokens, placement=placement,
        in_flight=in_flight, faults=faults, seed=seed, publish=slow, shared_slowdown=1.5, retries=rng.randint(0, 3),
        overlaps=overlaps,
    )  # fmt: skip
    simulation = Simulation(found, check)
    simulation.run()
    assert simulation.state.step == 20
    assert simulation.state.ledger.groups_trained == 20 * groups


def sow(monkeypatch: pytest.MonkeyPatch, name: str, fault: Any) -> None:
    monkeypatch.setattr(loop_state, name, fault)


def test_a_gate_off_by_one_breaks_an_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    right = loop_state.capacity
    sow(monkeypatch, "capacity", lambda **given: right(**(given | {"max_lag": given["max_lag"] + 1})))
    with pytest.raises(Broken, match="gate"):
        Simulation(scenario(max_lag=1, rates=Rates(train=0.01)), check).run()


def test_a_staleness_check_off_by_one_breaks_an_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    sow(monkeypatch, "is_stale", lambda version, oldest, max_lag: version - oldest > max_lag + 1)
    stragglers = work(Lengths(200, 1.5, 4000), groups=4, steps=60)
    with pytest.raises(Broken, match="older"):
        Simulation(scenario(stragglers, max_lag=1, slots=64), check).run()


def test_the_same_seed_gives_the_same_run() -> None:
    found = scenario(work(Lengths(200, 0.5)), faults=Faults(30, 60, 1, 0.05))
    runs = [Simulation(found).run() for _ in range(2)]
    assert runs[0] == runs[1]
    assert Simulation(dataclasses.replace(found, seed=1)).run() != runs[0]


def test_a_seed_gives_one_run_in_every_process() -> None:
    code = (
        "from tests.plan.cases import *; from slipstream.plan.simulator import Simulation; "
        "print(Simulation(scenario(work(Lengths(200, 0.5)), engines=5)).run()[-1])"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True,
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join([str(ROOT), *sys.path])},
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(found) == 1 and "StepRecord" in found.pop()


def test_a_synchronous_run_has_no_lag_and_sides_that_take_turns() -> None:
    simulation = Simulation(scenario(max_lag=0))
    records = simulation.run()
    assert set(sum((record.lags for record in records), Counter())) == {0}
    for before, record in itertools.pairwise(records):
        assert record.sampled == pytest.approx(before.sampled + record.tokens)
        assert record.start >= before.end


@pytest.mark.parametrize("max_lag", [0, 2])
def test_at_most_max_concurrent_rollouts_are_in_flight(max_lag: int) -> None:
    most = 0

    def observe(simulation: Simulation) -> None:
        nonlocal most
        most = max(most, simulation.in_flight)

    simulation = Simulation(scenario(work(max_concurrent=6), max_lag=max_lag), observe)
    bounded, free = simulation.run(), Simulation(scenario(max_lag=max_lag)).run()
    assert most == 6 and bounded[-1].end > 1.5 * free[-1].end


def test_no_side_is_busy_for_longer_than_the_time() -> None:
    figures = simulated_figures(scenario(work(Lengths(512, 0.8, 4096)), engines=4, slots=64), warm=1)
    for before, after in itertools.pairwise(figures.records):
        assert after.engine_busy - before.engine_busy <= 4 * (after.end - before.end) * (1 + 1e-9)


def test_one_hundred_steps_of_512_rollouts_on_64_engines_take_seconds() -> None:
    """Two seconds on an idle core; the bound leaves room for a loaded machine."""
    large = work(Lengths(1024, 0.6, 4096), groups=64, group_size=8, steps=100)
    simulation = Simulation(scenario(large, engines=64, slots=16))
    began = time.process_time()
    simulation.run()
    assert time.process_time() - began < 10
