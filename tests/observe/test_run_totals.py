"""The running totals: times add up over the processes of a resumed run, and a snapshot contains them."""

from __future__ import annotations

import json
from collections import Counter
from types import SimpleNamespace

import pytest

from slipstream.observe.run_totals import ENDS, RunTotals, metric_means
from slipstream.rollout import Batch, Completion, Group, Rollout, VersionSpan, float32_array, int32_array


def test_times_add_up_over_resumed_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("slipstream.observe.run_totals.time", SimpleNamespace(perf_counter=lambda: now))
    saved = None
    for sitting in (1, 2):
        totals = RunTotals()
        now += 3  # processes start
        if saved:
            totals.restore(json.loads(saved))
        totals.open({"tokens": 50.0, "busy_s": 7.0})
        now += 4
        assert totals.seconds_since_step() == 4
        now += 1
        totals.extend_window({"tokens": 90.0, "busy_s": 9.0}, trainer_seconds=1.5)
        assert totals.generator_rate == 40 / 5 and totals.seconds_since_step() == 0
        totals.lag[2] += 8
        now += 2  # a last evaluation, which belongs to no window
        assert totals.wall() == 10 * sitting
        saved = json.dumps(totals.snapshot())
    assert (totals.window_seconds, totals.generator_busy, totals.trainer_busy) == (10, 4, 3)
    assert totals.lag == Counter({2: 16})
    summary = totals.summary()
    assert summary["busy"] == {"generator": 0.4, "trainer": 0.3} and summary["wall_s"] == 20
    assert summary["samples"] == {"before": [], "after": [], "better": 0, "worse": 0, "compared": 0}
    assert summary["eval"]["final"] is None


def test_a_metric_is_averaged_over_the_rollouts_that_have_it() -> None:
    rollouts = [Rollout((), 0.0, {"correct": 1.0, "turns": 3}), Rollout((), 0.0, {"correct": 0.0}), Rollout((), 0.0)]
    assert metric_means(rollouts) == {"correct": 0.5, "turns": 3.0}


def test_rollouts_with_equal_ends_may_differ() -> None:
    ends = [3] * ENDS

    def rollout(*middle: int) -> Rollout:
        tokens = int32_array([*ends, *middle, *ends])
        spans = (VersionSpan(0, 0, len(tokens)),)
        return Rollout((Completion(tokens[:1], tokens, float32_array([-1.0] * len(tokens)), spans, "stop"),), 0.0)

    group = Group(0, "a", (rollout(1, 2), rollout(2, 1), rollout(1), rollout(1, 2)))
    metrics = RunTotals().batch(Batch((group,), ((0.0,) * 4,), version=0), version=0)
    assert metrics["completions/identical_fraction"] == 0.5


def test_metrics_of_a_batch() -> None:
    def rollout(reward: float, version: int, finish: str) -> Rollout:
        tokens = int32_array([7] * (version + 1))
        spans = (VersionSpan(version, 0, len(tokens)),)
        completion = Completion(int32_array([5]), tokens, float32_array([-1.0] * len(tokens)), spans, finish)
        return Rollout((completion,), reward, {"correct": reward})

    groups = (
        Group(0, "a", (rollout(0.0, 2, "stop"), rollout(1.0, 2, "length")), "x"),
        Group(1, "b", (rollout(0.0, 0, "stop"), rollout(0.0, 0, "stop")), "y"),
    )
    metrics = RunTotals().batch(Batch(groups, ((-0.5, 0.5), (0.0, 0.0)), version=3), version=3)
    assert metrics == pytest.approx({
        "reward/mean": 0.25, "reward/std": 0.1875**0.5, "reward/frac_groups_with_signal": 0.5,
        "lag/mean": (6 * 1 + 2 * 3) / 8, "lag/max": 3, "completions/mean_length": 2.0,
        "completions/clipped_ratio": 0.25, "completions/identical_fraction": 1.0, "env/correct": 0.25,
        "environments/x/groups": 1, "environments/x/reward": 0.5, "environments/x/mean_length": 3.0,
        "environments/x/clipped_ratio": 0.5,
        "environments/y/groups": 1, "environments/y/reward": 0.0, "environments/y/mean_length": 1.0,
        "environments/y/clipped_ratio": 0.0,
    })  # fmt: skip
