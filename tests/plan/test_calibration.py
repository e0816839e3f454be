"""Rates fitted to records: known rates are found again, and short records are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from slipstream.config.loading import load_config
from slipstream.config.schema import Config, ConfigError
from slipstream.plan.calibration import TimedCompletion, decode_points, fit, fit_line, scenario_of_run
from slipstream.plan.costs import SHARED_SLOWDOWN, EngineCost
from slipstream.plan.engine import Request, SimulatedEngine
from slipstream.plan.hardware import Cluster, Rates, find_gpu
from slipstream.plan.ranking import simulated_figures
from slipstream.plan.shapes import find_shape
from slipstream.plan.workload import Lengths
from tests.plan.cases import scenario, work

SHAPE = find_shape("0.6B")
RATES = Rates(decode_fixed_s=0.004, decode_sequence_s=0.0002)


def config(*flags: str) -> Config:
    return load_config(None, ["--model.path=model", "--environment.name=addition", *flags])


def sampled(slots: int, lengths: list[int]) -> list[TimedCompletion]:
    """Completions of one simulated engine; all requests start almost at once and wait for a slot."""
    engine = SimulatedEngine(EngineCost(SHAPE, Cluster(find_gpu("h100"), 1), RATES, 1), slots, 1e9)
    for number, length in enumerate(lengths):
        engine.add(Request((1e-9 * number, length), 0, length, object(), 0))
    engine.advance(0.0)
    found: list[TimedCompletion] = []
    while (at := engine.next_event()) is not None:
        ended = [request.owner for request in engine.advance(at)]
        found += [TimedCompletion("engine 0", start, at, length) for start, length in ended]
    return found


def test_decode_rates_are_found_again() -> None:
    lengths = [50 + 37 * i % 400 for i in range(64)]
    points = decode_points(sampled(4, lengths), 4, -1.0) + decode_points(sampled(32, lengths), 32, -1.0)
    found = fit_line(points)
    assert found.fixed == pytest.approx(0.004, rel=0.1)
    assert found.each == pytest.approx(0.0002, rel=0.1)
    assert found.error < 0.05


def records(steps: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Metrics and events of steps of 0.5 s + 1 ms a token, each after a wait of 0.3 s."""
    metrics, events, now = [], [], 0.0
    for step in range(1, steps + 1):
        tokens = 1000 + 50 * (step % 7)
        seconds = 0.5 + 0.001 * tokens
        now += seconds + 0.3 + 0.02
        metrics.append({
            "step": step, "time/wall_s": now, "time/window_s": now, "time/step_s": seconds, "time/batch_wait_s": 0.3,
            "train/packed_tokens": tokens, "train/tokens": tokens, "train/busy_s": 0.8 * now, "gen/busy_s": now,
            "sync/pause_ms": 3.0, "lag/mean": 1.0,
        })  # fmt: skip
        rows = [["engine 0", now - 1, now, 100, 0, 0, 1.0, None, i] for i in range(10)]
        events.append({"kind": "group", "track": "controller", "rollouts": rows})
    return metrics, events


def test_training_rates_and_gaps_are_found_again() -> None:
    found = fit(*records(20), config("--generator.max_num_seqs=16"), [14, 6])
    assert found.prompt.values == (6, 14) and found.prompt.mean == 10
    assert found.rates.train_fixed_s == pytest.approx(0.5, rel=1e-6)
    assert found.rates.train_token_s == pytest.approx(0.001, rel=1e-6)
    assert found.rates.step_overhead_s == pytest.approx(0.02, rel=1e-6)
    assert found.pause_s == pytest.approx(0.003)
    assert found.completion.samples.count(100) == len(found.completion.samples)


SINGLE_COPY = (
    "--generator.engine=vllm",
    "--sync.link=single_copy",
    "--trainer.keep_compute_copy=true",
    "--model.dtype=bfloat16",
)
COLOCATED = ("--sync.placement=colocated",)


@pytest.mark.parametrize(
    ("flags", "memory", "lag", "slowed_by"),
    [
        (SINGLE_COPY, 40.0, 1, SHARED_SLOWDOWN),
        (SINGLE_COPY, 40.0, 0, 1.0),  # one side waits for the other, but it may get a lag
        (COLOCATED, 40.0, 1, SHARED_SLOWDOWN),
        (COLOCATED, 0.0, 1, 1.0),  # on a CPU
        ((), 40.0, 1, 1.0),
    ],
)
def test_rates_on_shared_gpus_are_those_of_each_side_alone(
    flags: tuple[str, ...], memory: float, lag: int, slowed_by: float
) -> None:
    """The trainer is busy for 80 % of the time, in which engines are slowed down."""
    metrics, events = records(20)
    for record in metrics:
        record["train/max_memory_gb"] = memory
    own = config("--generator.max_num_seqs=16", f"--loop.max_lag={lag}", *flags)
    found, observed = fit(metrics, events, own, [10]), fit(*records(20), config("--generator.max_num_seqs=16"), [10])
    assert found.slowdown == (SHARED_SLOWDOWN if flags and memory else 1.0)
    assert found.rates.train_fixed_s == pytest.approx(observed.rates.train_fixed_s / slowed_by)
    assert found.rates.train_token_s == pytest.approx(observed.rates.train_token_s / slowed_by)
    assert found.rates.decode_sequence_s == pytest.approx(
        observed.rates.decode_sequence_s * (1 - found.trainer_busy * (1 - 1 / slowed_by))
    )
    simulated = scenario_of_run(found, own, SHAPE)
    assert (simulated.shared_slowdown, simulated.overlaps) == (found.slowdown, bool(flags))


def test_turns_of_a_rollout_are_no_rollouts() -> None:
    """Each completion of 100 tokens in two turns, with a tool of 0.2 s between them."""
    metrics, events = records(20)
    for event in events:
        event["rollouts"] = [
            [engine, start + part * 0.6, start + part * 0.6 + 0.4, 50, *rest]
            for engine, start, _, _, *rest in event["rollouts"]
            for part in (0, 1)
        ]
    found = fit(metrics, events, config("--generator.max_num_seqs=16"), [10])
    assert (found.turns, found.completion.mean) == (2, 100)
    assert found.tool_s == pytest.approx(0.2)
    own = scenario_of_run(found, config("--loop.groups_per_step=2", "--loop.group_size=5"), SHAPE)
    assert (own.work.turns, own.work.tool.mean) == (2, pytest.approx(0.2))


def test_short_records_are_refused() -> None:
    metrics, events = records(5)
    with pytest.raises(ConfigError, match="it has 5 steps, and a fit needs 6"):
        fit(metrics, events, config(), [10])
    metrics, events = records(8)
    with pytest.raises(ConfigError, match=r"events.jsonl has 0 whole completions"):
        fit(metrics, [], config(), [10])


def test_a_run_is_simulated_with_its_own_options() -> None:
    found = fit(*records(20), config("--generator.max_num_seqs=16"), [10])
    own = scenario_of_run(
        found, config("--loop.max_lag=0", "--loop.groups_per_step=2", "--loop.group_size=5", "--loop.steps=20"), SHAPE
    )
    figures = simulated_figures(own)
    assert (own.max_lag, own.work.rollouts, own.work.steps, own.continues) == (0, 10, 20, False)
    assert figures.lag_mean == 0
    assert figures.step_s == pytest.approx(0.5 + 0.02 + 0.003 + 0.001 * (1000 + 2 * 10) + 1.0, rel=0.1)


def test_the_simulated_part_of_a_long_run_has_no_end() -> None:
    """At the end of a run engines start nothing, so that they would be less busy than in the run."""
    found = fit(*records(20), config("--generator.max_num_seqs=16"), [10])
    found = replace(found, completion=Lengths(256, 0.6, 2048))  # with stragglers, which the last steps wait for
    whole, part = (
        simulated_figures(scenario_of_run(found, config("--loop.max_lag=4", "--loop.steps=200"), SHAPE, most))
        for most in (200, 14)
    )
    assert part.tokens_per_s == pytest.approx(whole.tokens_per_s, rel=0.05)
    assert part.engines_busy == pytest.approx(whole.engines_busy, abs=0.03)


def test_measured_rates_ignore_the_gpu() -> None:
    slow, fast = (
        simulated_figures(scenario(work(), Rates(decode_sequence_s=0.001, train_token_s=each))) for each in (1e-3, 1e-5)
    )
    assert slow.step_s > fast.step_s > 0
