"""Splits of GPUs between trainer and engines: all that Slipstream can run, their memory, and their speed by formula."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from slipstream.config.engine_args import DEFAULT_MEMORY
from slipstream.config.schema import TrainerConfig
from slipstream.plan.costs import (
    ENGINE_OVERHEAD,
    SHARED_SLOWDOWN,
    TURN_RESERVE,
    EngineCost,
    PublishCost,
    TrainerCost,
    colocated_turn_cost,
    publish_cost,
)
from slipstream.plan.hardware import GIB, Cluster, Rates
from slipstream.plan.memory import HEADROOM, OPTIONS, SAFE, candidates, cheapest, single_copy_engine
from slipstream.plan.scenario import Figures, Scenario
from slipstream.plan.shapes import Shape
from slipstream.plan.workload import Workload

CHOSEN_ALWAYS = ("activation_checkpointing", "tokens_per_microbatch")
MAX_SLOTS = 256  # 512 gained 5 % with 1.7 B (vllm_core_batches_h200.json), for twice the lag
FRAGMENTATION = 1.1  # memory that the trainer reserves, relative to its estimate


@dataclass(frozen=True)
class Problem:
    """Model, GPUs and work for which splits are ranked."""

    shape: Shape
    cluster: Cluster
    work: Workload
    rates: Rates
    seed: int = 0
    slots: int = 0  # 0: chosen
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    fp8_engines: bool = False  # serve the matrices of layers in FP8
    reference: str = ""  # as in `TrainerCost`

    @property
    def served(self) -> Shape:
        """The model as engines serve it."""
        return replace(self.shape, matrix_bytes=1) if self.fp8_engines else self.shape


@dataclass(frozen=True)
class Split:
    """A placement of trainer ranks and engines of `tp` GPUs, and the lag that it is run with."""

    placement: str
    ranks: int
    parallel: str
    context_parallel: int
    engines: int
    tp: int
    max_lag: int
    expert_parallel: int = 1

    @property
    def gpus(self) -> int:
        """GPUs in use."""
        engines = self.engines * self.tp
        return max(self.ranks, engines) if self.placement != "disaggregated" else self.ranks + engines

    def __str__(self) -> str:
        kind = f" {self.parallel}" if self.ranks > 1 else ""
        kind += f" cp{self.context_parallel}" if self.context_parallel > 1 else ""
        kind += f" ep{self.expert_parallel}" if self.expert_parallel > 1 else ""
        engines = f"{self.engines} x tp{self.tp}" if self.tp > 1 else f"{self.engines}"
        where = "" if self.placement == "disaggregated" else f", {self.placement.replace('_', ' ')}"
        return f"trainer {self.ranks}{kind}, engines {engines}{where}"


@dataclass(kw_only=True)
class Plan(Figures):
    """A split with its costs and figures. `missing` says what does not fit and by how much; "" if all fits."""

    split: Split
    problem: Problem
    engine: EngineCost
    trainer: TrainerCost
    publish: PublishCost
    slots: int = 0
    kv_tokens: float = 0.0
    memory: dict[str, dict[str, float]] = field(default_factory=dict)  # bytes by part, of a GPU of each role
    missing: str = ""
    missing_bytes: float = 0.0
    source: str = "formula"

    @property
    def is_simulated(self) -> bool:
        """Whether the figures are those of a simulation, not of the formula."""
        return self.source == "simulation"

    @property
    def order(self) -> tuple[bool, bool, float]:
        """The key of a ranking, best first: splits that fit, simulated ones before others, by trained tokens/s."""
        return bool(self.missing), not self.is_simulated, -self.tokens_per_s

    @property
    def overlaps(self) -> bool:
        """Whether engines on the trainer's GPUs sample during its steps, as `trainers.offload` finds in a run."""
        if self.split.placement == "colocated" and not self.missing:
            used = FRAGMENTATION * sum(self.memory["trainer"].values()) + sum(self.memory["engine"].values())
            return used + TURN_RESERVE <= self.problem.cluster.gpu.memory
        return self.split.placement == "single_copy"

    @property
    def run_s(self) -> float:
        return self.step_s * self.problem.work.steps

    @property
    def gpu_hours(self) -> float:
        return self.run_s * self.problem.cluster.gpus / 3600

    def scenario(self, steps: int) -> Scenario:
        """The simulation of the first `steps` steps of this plan."""
        return Scenario(
            replace(self.problem.work, steps=steps), self.engine, self.trainer, self.publish, self.split.engines,
            self.slots, self.kv_tokens, self.split.max_lag, self.split.placement,
            overlaps=self.overlaps, shared_slowdown=SHARED_SLOWDOWN, step_overhead_s=self.problem.rates.step_overhead_s,
            seed=self.problem.seed, continues=steps < self.problem.work.steps,
        )  # fmt: skip


def splits(problem: Problem, lags: tuple[int, ...]) -> Iterator[Split]:
    """All splits of the cluster that Slipstream can run."""
    shape, gpus = problem.shape, problem.cluster.gpus
    sizes = [tp for tp in tensor_parallel_sizes(shape) if tp <= min(gpus, problem.cluster.per_node)]
    for lag in lags:
        for tp in sizes:
            if gpus >= tp:
                for parallel, context, experts in (
                    parallelisms(problem, gpus) if gpus <= problem.cluster.per_node else ()
                ):
                    yield Split("colocated", gpus, parallel, context, gpus // tp, tp, lag, experts)
            alone = not problem.work.lora_rank and problem.work.every == 1 and supports_tensor(problem, tp)
            if lag and gpus == tp and alone:
                yield Split("single_copy", tp, "tensor" if tp > 1 else "fsdp", 1, 1, tp, lag)
            if lag and tp == 1 < gpus <= problem.cluster.per_node and alone and shape.experts == 1:
                yield Split("single_copy", gpus, "ddp", 1, gpus, 1, lag)
            for ranks in range(1, gpus - tp + 1):
                engines = (gpus - ranks) // tp
                if ranks + engines * tp < gpus and 1 in sizes and tp > 1 and (gpus - ranks) % tp:
                    continue  # idle GPUs
                for parallel, context, experts in parallelisms(problem, ranks):
                    yield Split("disaggregated", ranks, parallel, context, engines, tp, lag, experts)


def parallelisms(problem: Problem, ranks: int) -> Iterator[tuple[str, int, int]]:
    """Kinds of parallelism of the trainer, with its sizes of context and expert parallelism."""
    yield "fsdp", 1, 1
    if ranks == 1:
        return
    yield "ddp", 1, 1
    node = min(ranks, problem.cluster.per_node)
    if problem.shape.experts > 1 and not problem.shape.experts % node and not ranks % node:
        yield "fsdp", 1, node
    for context in (2, 4, 8):
        if ranks % context == 0 and problem.work.longest > 8192 * context:
            yield "fsdp", context, 1
    if supports_tensor(problem, ranks) and ranks <= problem.cluster.per_node and not problem.work.lora_rank:
        yield "tensor", 1, 1


def supports_tensor(problem: Problem, ranks: int) -> bool:
    """Whether the trainer can have `parallel = "tensor"` over `ranks`; FP8 products can't be sharded."""
    return can_shard_trainer(problem.shape, ranks) and (ranks == 1 or not problem.trainer.fp8)


def can_shard_trainer(shape: Shape, ranks: int) -> bool:
    """Whether `trainer.parallel = "tensor"` can shard the model over `ranks`, as `trainers.tensor_parallel` does."""
    sizes = shape.heads, shape.kv_heads, shape.intermediate, shape.vocabulary
    return ranks == 1 or (shape.experts == 1 and not any(size % ranks for size in sizes))


def tensor_parallel_sizes(shape: Shape) -> list[int]:
    """Numbers of GPUs over which heads and widths divide evenly: key/value heads are split or copied."""
    sizes = shape.heads, shape.intermediate
    return [
        tp for tp in (1, 2, 4, 8, 16)
        if not any(size % tp for size in sizes) and not (shape.kv_heads % tp and tp % shape.kv_heads)
    ]  # fmt: skip


def evaluate(problem: Problem, split: Split) -> Plan:
    """The figures of a split by formula."""
    engine = EngineCost(problem.served, problem.cluster, problem.rates, split.tp, bool(problem.work.lora_rank))
    trainer = choose_microbatch(problem, split)
    publish = publish_cost(
        problem.shape, problem.cluster, problem.rates, problem.work, split.placement, split.tp, split.gpus
    )
    plan = Plan(split=split, problem=problem, engine=engine, trainer=trainer, publish=publish)
    place_memory(plan)
    if split.placement == "colocated":
        free = problem.cluster.gpu.memory - sum(plan.memory["engine"].values())
        plan.publish = colocated_turn_cost(trainer, free, plan.overlaps)
    if not plan.missing:
        choose_slots(plan)
        estimate(plan)
    return plan


def choose_microbatch(problem: Problem, split: Split) -> TrainerCost:
    """The cheapest micro-batch and kind of checkpointing that fit, else the smallest; other options are the run's, or
    those of `trainer.memory = "auto"`."""
    free = problem.cluster.gpu.memory - HEADROOM - engine_beside_trainer(problem, split)
    trainer, own = problem.trainer, split.placement != "single_copy"
    auto = trainer.memory == "auto"
    free *= SAFE if auto else 1
    kept = [n for n in OPTIONS if (n in trainer.model_fields_set if auto else n not in CHOSEN_ALWAYS)]
    given = {OPTIONS[name]: getattr(trainer, name) for name in kept}
    cost = TrainerCost(
        problem.shape, problem.cluster, problem.rates, problem.work, split.ranks, split.parallel,
        split.context_parallel, expert_parallel=split.expert_parallel, own_copy=own, compiled=trainer.compile,
        fp8=trainer.fp8, reference=problem.reference,
    )  # fmt: skip
    may_cast = auto and split.ranks == 1 and split.placement == "disaggregated" and not problem.work.lora_rank
    return cheapest(candidates(cost, given, may_cast, auto and split.placement == "disaggregated"), free)


def engine_beside_trainer(problem: Problem, split: Split) -> float:
    """Bytes that an engine on a trainer's GPU holds during a step, asleep if colocated."""
    if split.placement == "single_copy":
        return single_copy_engine(problem.shape, problem.work, split.tp)
    return ENGINE_OVERHEAD if split.placement == "colocated" else 0.0


def place_memory(plan: Plan) -> None:
    """Set the memory of each role, the tokens in an engine's cache, and what does not fit."""
    split, problem = plan.split, plan.problem
    total, longest = problem.cluster.gpu.memory, problem.work.longest
    key_bytes = problem.shape.kv_bytes / min(split.tp, problem.shape.kv_heads)
    trainer = plan.trainer.memory()
    weights = problem.served.weight_bytes / split.tp
    reserved = plan.publish.staging + (sum(trainer.values()) if split.placement == "single_copy" else 0)
    share = total - HEADROOM - reserved if reserved else DEFAULT_MEMORY * total
    usable = max(0.0, min(DEFAULT_MEMORY * total, share) - weights - ENGINE_OVERHEAD)
    if split.placement == "colocated":  # more would only make the trainer's state leave the GPU
        usable = min(usable, (problem.slots or MAX_SLOTS) * longest * key_bytes)
    plan.kv_tokens = usable / key_bytes
    engine = {"weights": weights, "keys and values": usable, "staging": plan.publish.staging}
    engine["overhead"] = ENGINE_OVERHEAD
    short = {"an engine": longest * key_bytes - usable if usable < longest * key_bytes else 0.0}
    if split.placement == "single_copy":
        plan.memory = {"trainer and engine": engine | {n: v for n, v in trainer.items() if n != "overhead" and v}}
        plan.memory["trainer and engine"]["overhead"] += trainer["overhead"]
        short["the trainer with its engine"] = sum(plan.memory["trainer and engine"].values()) - (total - HEADROOM)
    else:
        plan.memory = {"trainer": trainer, "engine": engine}
        short["the trainer"] = sum(trainer.values()) + engine_beside_trainer(problem, split) - (total - HEADROOM)
    over = weights + ENGINE_OVERHEAD + plan.publish.staging + longest * key_bytes - (total - HEADROOM)
    if short["an engine"] > 0:
        short["an engine"] = max(short["an engine"], over)
    who, lacks = max(short.items(), key=lambda item: item[1])
    if lacks > 0:
        plan.missing_bytes = lacks
        plan.missing = f"{who} lacks {lacks / GIB:,.1f} GiB on each GPU"


def choose_slots(plan: Plan) -> None:
    """Set the sequences of one engine: as many as the gate admits and keys and values have space for."""
    work, split = plan.problem.work, plan.split
    wanted = work.in_flight(split.max_lag + 1) / split.engines
    mean = work.read + 0.75 * work.completion.typical  # lower would preempt sequences, higher would leave space
    most = min(wanted, plan.problem.slots or MAX_SLOTS, max(1.0, plan.kv_tokens / mean))
    plan.slots = plan.problem.slots or (max(8, math.ceil(most / 8) * 8) if most >= 8 else max(1, int(most)))


def engine_rate(plan: Plan, sequences: float) -> float:
    """Sampled tokens/s of one engine that decodes `sequences`, prefills included."""
    work, cost = plan.problem.work, plan.engine
    sequences = max(1.0, min(sequences, plan.slots, plan.kv_tokens / work.context))
    decode = cost.step(sequences, sequences * work.context) / sequences
    prompts = cost.prefill(work.prompt.typical) / work.group_size + (work.turns - 1) * cost.prefill(work.tool_tokens)
    return 1 / (decode + prompts / work.completion.typical)


def slowest_group_s(plan: Plan, sequences: float) -> float:
    """Least seconds of a step with a lag, in which each engine decodes `sequences`.

    A group in flight takes the time of its longest rollout, tools and score, and the gate bounds the groups in flight.
    Scorers need `work.scoring_s`.
    """
    work, count = plan.problem.work, plan.problem.work.group_size
    latency = work.completion.largest_of(count) * plan.engine.step(sequences, sequences * work.context)
    latency += work.tool.largest_of(count, work.turns - 1) + work.scoring.largest_of(count)
    varies = work.completion.spread or work.completion.samples or work.tool.spread or work.scoring.spread
    waves = plan.split.max_lag + (0.5 if varies else 1.0)
    return max(latency / waves, work.scoring_s)


def estimate(plan: Plan) -> None:
    """Set step time, rates, busy shares and lag by formula. The lag is a bound: what the gate allows."""
    work, split, overhead = plan.problem.work, plan.split, plan.problem.rates.step_overhead_s
    train = plan.trainer.step(work.sampled, work.packed)
    rollouts = work.in_flight(1 if split.max_lag == 0 else split.max_lag + 0.5)
    sequences = min(rollouts / split.engines, plan.slots)
    generate = work.sampled / (split.engines * engine_rate(plan, sequences))
    alone = plan.engine.step(8, 8 * work.context)  # of the last sequences of a wave
    tail = max(0.0, work.completion.largest_of(work.rollouts) - work.completion.typical) * alone
    publish, slowest = plan.publish.hold + overhead, slowest_group_s(plan, sequences)
    if split.max_lag == 0:
        scoring = max(work.scoring_s, work.scoring.largest_of(work.rollouts))
        generate += tail + work.tool.largest_of(work.rollouts, work.turns - 1) + scoring
        step = generate + train + publish + plan.publish.pause
    elif plan.overlaps:
        both = (generate + train) * SHARED_SLOWDOWN / 2
        step = max(both, generate, train, slowest) + publish + plan.publish.pause
        generate = min(generate * SHARED_SLOWDOWN, step)
        train *= SHARED_SLOWDOWN
    elif split.placement == "colocated":
        # In simulations about half of the sequences have tokens at a swap: the others have just ended or not begun.
        recomputed = sequences / 2 * plan.engine.prefill(work.context)
        step = max(generate, slowest) + train + publish + recomputed
    else:
        step = max(generate, train + publish, slowest)
    plan.step_s, plan.tokens_per_s = step, work.sampled / step
    plan.trainer_busy, plan.engines_busy = min(1.0, train / step), min(1.0, generate / step)
    plan.lag_mean = max(0.0, min(split.max_lag, rollouts / work.rollouts - 0.5)) if split.max_lag else 0.0
    plan.lag_p99 = float(split.max_lag)
