"""Fit the planner's rates to what a run has recorded, for plans and advice. Fits of steps and decoding have errors."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.config.schema import Config, ConfigError
from slipstream.plan.costs import SHARED_SLOWDOWN, EngineCost, PublishCost, TrainerCost, turn_cost
from slipstream.plan.hardware import Cluster, Rates, find_gpu
from slipstream.plan.scenario import Scenario
from slipstream.plan.shapes import Shape
from slipstream.plan.workload import Delay, Lengths, Workload

Record = Mapping[str, Any]
Array = NDArray[np.float64]
LEAST_STEPS, WARM_UP = 6, 2  # steps that a fit needs; first steps that it ignores, since they compile and fill buffers
LEAST_COMPLETIONS = 32


@dataclass(frozen=True)
class TimedCompletion:
    """One completion: its engine, the seconds at which its request started and ended, and its tokens."""

    engine: str
    start: float
    end: float
    tokens: int


@dataclass(frozen=True)
class Fit:
    """The rates, lengths, throughput and lag of a run. Errors are root mean squares, relative.

    `rates` are without the slowdown of shared GPUs, and `slowdown` is its factor: 1 on separate GPUs.
    """

    rates: Rates
    prompt: Lengths
    completion: Lengths
    step_error: float
    decode_error: float
    pause_s: float
    transfer_s: float
    tokens_per_s: float
    trainer_busy: float
    engines_busy: float
    lag_mean: float
    overlaps: bool  # whether engines on the trainer's GPUs may sample during its steps
    slowdown: float
    turns: int  # of a rollout
    tool_s: float  # from the end of a turn to the next one
    tool_tokens: int  # that the next turn's prompt has in addition

    @property
    def tool(self) -> Delay:
        """The time of a tool after each turn but the last, with the spread that is assumed of unknown times."""
        return Delay(self.tool_s, 1.0 if self.tool_s else 0.0)

    def describe(self) -> str:
        """The rates of decode and optimizer step, and their errors, in one line."""
        rates = self.rates
        alone = ", each alone on its GPUs" if self.slowdown > 1 else ""
        return (
            f"decode step {1000 * rates.decode_fixed_s:.3g} ms + {1e6 * rates.decode_sequence_s:.3g} us a sequence "
            f"(error {self.decode_error:.0%}), optimizer step {rates.train_fixed_s:.3g} s + "
            f"{1e6 * rates.train_token_s:.3g} us a token and rank (error {self.step_error:.0%}){alone}"
        )


def rollouts(events: Sequence[Record]) -> list[list[TimedCompletion]]:
    """The completions of each rollout that the events of a run record, in the order of their turns."""
    found: list[list[TimedCompletion]] = []
    for event in (event for event in events if event.get("kind") == "group"):
        by_number: dict[int, list[TimedCompletion]] = {}
        for row in event["rollouts"]:
            engine, start, end, tokens = row[:4]
            if engine and tokens and end > start:
                by_number.setdefault(row[8], []).append(TimedCompletion(engine, start, end, tokens))
        found += by_number.values()
    return found


def _timed_steps(metrics: Sequence[Record]) -> list[Record]:
    """The steps that took time. Raises `ConfigError` if they are too few, or trained on no tokens after `WARM_UP`."""
    steps = [record for record in metrics if record.get("time/step_s")]
    if len(steps) < LEAST_STEPS:
        raise ConfigError(f"it has {len(steps)} steps, and a fit needs {LEAST_STEPS}; give a longer run")
    if not any(record["train/packed_tokens"] for record in steps[WARM_UP:]):
        raise ConfigError("its steps trained on no tokens; give a run that trained")
    return steps


def fit(
    metrics: Sequence[Record], events: Sequence[Record], config: Config, prompts: Sequence[int], tool_tokens: float = 0
) -> Fit:
    """Rates of a run from its records. `prompts` are the numbers of tokens of rollouts' first prompts.

    `tool_tokens` is that of the tokens that a tool adds before each further turn.

    Raises `ConfigError` if the records are too short or have no timeline.
    """
    steps, played = _timed_steps(metrics), rollouts(events)
    timed, speed = steps[WARM_UP:], _speed(steps)
    overlaps, slowdown = _sharing(config, steps[-1])
    slowed_by = slowdown if config.loop.max_lag else 1.0  # without a lag one side waits for the other
    train = fit_line([(r["train/packed_tokens"] / config.trainer.ranks, r["time/step_s"] / slowed_by) for r in timed])
    alone = 1 - speed.trainer_busy + speed.trainer_busy / slowed_by  # time of a decode step alone, relative
    points = _whole_completions(played, config, steps[WARM_UP - 1]["time/wall_s"])
    decode = fit_line([(sequences, seconds * alone) for sequences, seconds in points])
    lengths = tuple(sum(one.tokens for one in each) for each in played)
    prompt = Lengths(fmean(prompts or [1]), samples=tuple(prompts))
    reference = config.generator.gpus_per_engine, prompt.mean + fmean(lengths) / 2
    rates = replace(
        Rates(), train_fixed_s=train.fixed, train_token_s=train.each, decode_fixed_s=decode.fixed,
        decode_sequence_s=decode.each, step_overhead_s=max(0.0, median(_gaps(steps))), decode_reference=reference,
    )  # fmt: skip
    pauses = [record["sync/pause_ms"] / 1000 for record in timed if record.get("sync/pause_ms") is not None]
    between = [after.start - turn.end for each in played for turn, after in pairwise(each)]
    return Fit(
        rates, prompt, Lengths(fmean(lengths), samples=lengths), train.error, decode.error,
        median(pauses or [0.0]), median(_publish_seconds(events) or [0.0]), *speed, overlaps, slowdown,
        round(fmean(map(len, played))), max(0.0, fmean(between or [0.0])), max(0, round(tool_tokens)),
    )  # fmt: skip


def _sharing(config: Config, last: Record) -> tuple[bool, float]:
    """Whether engines on the trainer's GPUs may sample during its steps, and the factor by which that slows both."""
    together = config.sync.placement == "colocated" and not last.get("sync/onload_s")
    overlaps = together or config.sync.link == "single_copy"
    on_gpu = last.get("train/max_memory_gb")  # 0.0 on a CPU
    return overlaps, SHARED_SLOWDOWN if overlaps and on_gpu else 1.0


def _whole_completions(
    played: Sequence[Sequence[TimedCompletion]], config: Config, began: float
) -> list[tuple[float, float]]:
    """The `decode_points` of a run's completions from the time `began` on. Raises `ConfigError` for too few."""
    sampled = sorted((one for each in played for one in each), key=lambda one: one.end)
    points = decode_points(sampled, config.generator.max_num_seqs, began)
    if len(points) < LEAST_COMPLETIONS:
        raise ConfigError(
            f"events.jsonl has {len(points)} whole completions after step {WARM_UP}, and a fit needs "
            f"{LEAST_COMPLETIONS}; give a longer run"
        )
    return points


class _Speed(NamedTuple):
    tokens_per_s: float
    trainer_busy: float
    engines_busy: float
    lag_mean: float


def _speed(steps: Sequence[Record]) -> _Speed:
    """Trained tokens/s, the busy shares of trainer and engines, and the mean lag, after `WARM_UP`."""
    before, timed = steps[WARM_UP - 1], steps[WARM_UP:]
    seconds = timed[-1]["time/window_s"] - before["time/window_s"]
    trained = sum(record["train/tokens"] for record in timed)
    train, engines = ((timed[-1][f"{name}/busy_s"] - before[f"{name}/busy_s"]) / seconds for name in ("train", "gen"))
    return _Speed(trained / seconds, train, engines, sum(r["lag/mean"] * r["train/tokens"] for r in timed) / trained)


def _gaps(steps: Sequence[Record]) -> list[float]:
    """Seconds between the steps after `WARM_UP`, without the wait for a batch."""
    return [
        now["time/window_s"] - last["time/window_s"] - now["time/step_s"] - now["time/batch_wait_s"]
        for last, now in pairwise(steps[WARM_UP - 1 :])
    ]


def _publish_seconds(events: Sequence[Record]) -> list[float]:
    """Seconds of each publish until the engines had its weights, or of its transfer if that is all that it records."""
    publishes = [event for event in events if event.get("kind") == "publish" and event.get("transfer_s") is not None]
    return [float(publish["ready_s"] or publish["transfer_s"]) for publish in publishes]


@dataclass(frozen=True)
class LinearFit:
    """y = fixed + each * x, both 0 or more, and the relative error of the fit."""

    fixed: float
    each: float
    error: float


def fit_line(points: Sequence[tuple[float, float]]) -> LinearFit:
    """Least squares; through the origin if `fixed` would be negative, or if all x are equal."""
    x, y = np.array(points).T
    alike = x.std() <= 1e-3 * x.mean()
    each, fixed = (y.mean() / x.mean(), 0.0) if alike else np.polyfit(x, y, 1)
    if fixed < 0 or each < 0:
        each, fixed = (y.mean() / x.mean(), 0.0) if fixed < 0 else (0.0, y.mean())
    return LinearFit(float(fixed), float(each), float(np.sqrt(np.mean(((fixed + each * x) / y - 1) ** 2))))


def decode_points(sampled: Sequence[TimedCompletion], slots: int, after: float) -> list[tuple[float, float]]:
    """For each completion, mean number of sequences that its engine decoded meanwhile, and seconds of a step.

    A request's time includes its wait for a slot, so a sequence counts from when a slot was free.
    """
    points: list[tuple[float, float]] = []
    for engine in {one.engine for one in sampled}:
        own = [one for one in sampled if one.engine == engine]
        begins, ends = np.array(slot_times(own, slots)), np.array([one.end for one in own])
        tokens = np.array([one.tokens for one in own])
        active = (
            _count_integral(begins, ends)
            - _count_integral(begins, begins)
            - _count_integral(ends, ends)
            + _count_integral(ends, begins)
        )
        kept = (begins >= after) & (tokens > 1) & (ends > begins)
        seconds = (ends - begins)[kept]
        points += zip(active[kept] / seconds, seconds / tokens[kept], strict=True)
    return points


def slot_times(sampled: Sequence[TimedCompletion], slots: int) -> list[float]:
    """When each request got a slot, if slots are given in the order of starts; in the order of `sampled`."""
    free: list[float] = [-math.inf] * slots
    begins: dict[int, float] = {}
    for index in sorted(range(len(sampled)), key=lambda i: sampled[i].start):
        begins[index] = max(sampled[index].start, heapq.heappop(free))
        heapq.heappush(free, sampled[index].end)
    return [begins[index] for index in range(len(sampled))]


def _count_integral(times: Array, upto: Array) -> Array:
    """Integral, up to each of `upto`, of the number of `times` that have passed."""
    ordered = np.sort(times)
    count = np.searchsorted(ordered, upto, side="right")
    found: Array = count * upto - np.concatenate([[0.0], np.cumsum(ordered)])[count]
    return found


def scenario_of_run(found: Fit, config: Config, shape: Shape, most: int = 40) -> Scenario:
    """The scenario of the run itself, with its fitted rates: its `loop.steps` steps, or the first `most` of them."""
    loop, engines, sync = config.loop, config.generator, config.sync
    colocated = sync.placement == "colocated"
    work = Workload(
        found.prompt, found.completion, loop.groups_per_step, loop.group_size, min(loop.steps, most), sync.every,
        found.turns, found.tool, found.tool_tokens, max_concurrent=config.environment.max_concurrent,
    )  # fmt: skip
    cluster = Cluster(find_gpu("h100"), 8)  # whose rates the fitted ones replace
    if colocated:
        publish = turn_cost(sync.link, found.transfer_s, found.rates.step_overhead_s, found.overlaps)
    else:
        publish = PublishCost(sync.link, found.transfer_s, 0.0, found.pause_s, 0.0)
    return Scenario(
        work, EngineCost(shape, cluster, found.rates, engines.gpus_per_engine),
        TrainerCost(shape, cluster, found.rates, work, config.trainer.ranks),
        publish, engines.replicas, engines.max_num_seqs, math.inf, loop.max_lag,
        sync.link if sync.link == "single_copy" else sync.placement, sync.in_flight,
        loop.force_max_lag, loop.buffer_size, overlaps=found.overlaps, shared_slowdown=found.slowdown,
        step_overhead_s=0.0 if colocated else found.rates.step_overhead_s, continues=loop.steps > most,
    )  # fmt: skip
