"""The input of a simulation, and its records of each step."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from slipstream.plan.costs import EngineCost, PublishCost, TrainerCost
from slipstream.plan.workload import Workload


@dataclass(frozen=True)
class Faults:
    """Mean seconds between failures (0: none) of one engine and of the trainer, and seconds until each is restarted.

    `rollout` is the probability that a rollout fails.
    """

    engine_s: float = 0.0
    trainer_s: float = 0.0
    restart_s: float = 60.0
    rollout: float = 0.0
    checkpoint_steps: int = 10


@dataclass(frozen=True)
class Scenario:
    """The input of a simulation: engines, trainer, publishes, the work, and the options of the loop."""

    work: Workload
    engine: EngineCost
    trainer: TrainerCost
    publish: PublishCost
    engines: int
    slots: int
    kv_tokens: float
    max_lag: int
    placement: str = "disaggregated"
    in_flight: str = "continue"
    force_max_lag: bool = False
    buffer_size: int = 0
    retries: int = 3
    overlaps: bool = False  # whether engines on the trainer's GPUs sample during its steps
    shared_slowdown: float = 1.0  # of both sides while they do
    step_overhead_s: float = 0.0
    first_step_s: float = 0.0  # added to the first step, in which kernels are compiled
    continues: bool = False  # whether further steps follow those of `work`, for which engines sample
    faults: Faults = Faults()
    seed: int = 0

    @property
    def keeps_version(self) -> bool:
        """Whether sequences in flight keep the version that they started with: on adapters, unless they restart."""
        return self.publish.link == "lora" and self.in_flight != "retry"

    @property
    def at_swap(self) -> str:
        """What a swap does to sequences in flight: `in_flight`, but engines that slept have lost keys and values."""
        slept = self.placement == "colocated" and not self.overlaps
        return "recompute" if slept and self.in_flight == "continue" else self.in_flight


@dataclass
class StepRecord:
    """One step: when its batch was complete, when it ended, its tokens, and its trained tokens by lag."""

    start: float
    end: float
    tokens: int
    lags: Counter[int]
    sampled: float = 0.0  # by all engines so far
    engine_busy: float = 0.0  # seconds of all engines so far
    publish: tuple[float, float] = (0.0, 0.0)


@dataclass
class Figures:
    """Speed, busy shares and lag of a run without its first steps. `records` are the steps of a simulation."""

    step_s: float = math.inf
    tokens_per_s: float = 0.0
    trainer_busy: float = 0.0
    engines_busy: float = 0.0
    lag_mean: float = 0.0
    lag_p99: float = 0.0
    stale: float = 0.0  # rollouts that were dropped, over those generated
    preemptions: float = 0.0  # per rollout
    records: list[StepRecord] = field(default_factory=list)
