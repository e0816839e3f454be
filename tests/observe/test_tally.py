"""The running totals: times add up over the sittings of a run, and a snapshot carries them."""

from __future__ import annotations

import json
from collections import Counter
from types import SimpleNamespace

import pytest

from slipstream.observe.tally import Tally, metric_means
from slipstream.rollout import Rollout
from slipstream.scoring.stage import Lap


def test_times_add_up_over_sittings(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("slipstream.observe.tally.time", SimpleNamespace(perf_counter=lambda: now))
    saved = None
    for sitting in (1, 2):
        tally = Tally()
        now += 3  # processes start
        if saved:
            tally.restore(json.loads(saved))
        tally.open({"tokens": 50.0, "busy": 7.0})
        now += 4
        assert tally.lap() == 4
        now += 1
        tally.close({"tokens": 90.0, "busy": 9.0}, trainer_seconds=1.5)
        assert tally.generator_rate == 40 / 5 and tally.lap() == 0
        tally.lag[2] += 8
        now += 2  # a last evaluation, which belongs to no window
        assert tally.wall() == 10 * sitting
        saved = json.dumps(tally.snapshot())
    assert (tally.window_seconds, tally.generator_busy, tally.trainer_busy) == (10, 4, 3)
    assert tally.lag == Counter({2: 16})
    summary = tally.summary()
    assert summary["busy"] == {"generator": 0.4, "trainer": 0.3} and summary["wall_seconds"] == 20
    assert (
        summary["samples"] == {"before": [], "after": [], "better": 0, "worse": 0} and summary["eval"]["final"] is None
    )


def test_a_metric_is_averaged_over_the_rollouts_that_have_it() -> None:
    rollouts = [Rollout((), 0.0, {"correct": 1.0, "turns": 3}), Rollout((), 0.0, {"correct": 0.0}), Rollout((), 0.0)]
    assert metric_means(rollouts) == {"correct": 0.5, "turns": 3.0}


def test_scoring_is_told_by_step_and_in_total() -> None:
    tally = Tally()
    first = Lap(queue=2, running=1, scored=4, seconds=2.0, waited=6.0, longest_queue=5, retries={"judge timeout": 1})
    assert tally.scoring(first) == {
        "scored": 4, "scoring": 1, "scoring_queue": 2, "scoring_seconds": 0.5, "scoring_wait_seconds": 1.5,
        "scoring_retries": {"judge timeout": 1},
    }  # fmt: skip
    tally.scoring(Lap(longest_queue=3))
    resumed = Tally()
    resumed.restore(tally.snapshot())
    wanted = {"scored": 4, "seconds": 0.5, "wait_seconds": 1.5, "longest_queue": 5}
    assert tally.summary()["scoring"] == resumed.summary()["scoring"] == wanted
