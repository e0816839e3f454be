"""Options that trade a trainer's memory for time or accuracy, and the choice of `trainer.memory = "auto"`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from slipstream.config.checks import spares_copy
from slipstream.config.engine_args import SHARED_MEMORY
from slipstream.config.loading import with_options
from slipstream.config.schema import Config
from slipstream.plan.costs import ENGINE_OVERHEAD, TrainerCost
from slipstream.plan.hardware import GIB, Cluster, Gpu, Rates
from slipstream.plan.shapes import Shape, find_shape
from slipstream.plan.workload import Lengths, Workload

HEADROOM = 1.0 * GIB  # that stays free on every GPU
SAFE = 0.95  # of the memory: estimates err by up to 5%
HOST_SHARE = 0.5  # of the host's memory for moments: pinned memory is rounded up, and engines take some, too
PASSES = (("selective", 16384), ("selective", 8192), ("selective", 4096), ("full", 16384), ("full", 8192),
          ("full", 4096))  # fmt: skip
# For a trainer of all weights in compiled layers that has its GPUs to itself: an engine would lack the memory. Others
# were not measured.
LARGE_PASSES = (("none", 32768), ("none", 16384), ("selective", 32768))
# A step may take this much longer before 8-bit moments, or weights without float32 masters, are taken instead. Casting
# layer by layer has a cost that the estimate of a step does not have (trainer_h200.json).
PRICE = {"adamw_8bit": 1.1, "bfloat16": 1.15, "cast": 1.3}
SMALL_PASS = 300  # tokens: a pass of n tokens takes (1 + 300 / n) as long for each token
SPREAD = 0.6  # assumed deviation of the logarithm of completion lengths, whose mean is half their limit
PROMPT = 512  # assumed tokens
OPTIONS = {  # of `trainer`, and the field of `TrainerCost`
    "optimizer": "optimizer", "master_weights": "master_weights", "offload_optimizer": "offload_optimizer",
    "keep_compute_copy": "keep_compute_copy", "activation_checkpointing": "checkpointing",
    "tokens_per_microbatch": "microbatch",
}  # fmt: skip


def workload_of(config: Config) -> Workload:
    """The work of a run whose lengths are not known yet."""
    loop, most = config.loop, config.longest_completion
    return Workload(
        Lengths(PROMPT), Lengths(max(1, most / 2), SPREAD, most), loop.groups_per_step, loop.group_size,
        loop.steps, config.sync.every, max_concurrent=config.environment.max_concurrent, lora_rank=config.lora.rank,
    )  # fmt: skip


def cost_of(config: Config, shape: Shape, cluster: Cluster) -> TrainerCost:
    """The cost of a configuration's trainer."""
    trainer = config.trainer
    options = {field: getattr(trainer, option) for option, field in OPTIONS.items()}
    return TrainerCost(
        shape, cluster, Rates(), workload_of(config), trainer.ranks, trainer.parallel, trainer.context_parallel,
        expert_parallel=trainer.expert_parallel,
        own_copy=config.sync.link != "single_copy", shard_size=trainer.fsdp_shard_size,
        compiled=trainer.compile, fp8=trainer.fp8, **options,
    )  # fmt: skip


def candidates(cost: TrainerCost, given: Mapping[str, Any], may_cast: bool, alone: bool = False) -> list[TrainerCost]:
    """The cost with all combinations of options other than those `given`, least price first.

    `given` has names of fields. `may_cast`: whether `keep_compute_copy = false` is possible. `alone`: whether the
    trainer has its GPUs to itself.
    """
    full = not cost.work.lora_rank
    values: dict[str, Sequence[Any]] = {
        "optimizer": ("adamw", "adamw_8bit") if full and cost.optimizer == "adamw" else (cost.optimizer,),
        "master_weights": ("float32", "bfloat16") if full else (cost.master_weights,),
        "offload_optimizer": (False, True) if full else (cost.offload_optimizer,),
        "keep_compute_copy": (True, False) if may_cast else (cost.keep_compute_copy,),
    }
    values |= {name: (value,) for name, value in given.items() if name in values}
    least = math.ceil(cost.work.longest / cost.context_parallel)
    passes = dict.fromkeys(
        (given.get("checkpointing", checkpointing), given.get("microbatch", max(tokens, least)))
        for checkpointing, tokens in (*(LARGE_PASSES if full and alone and cost.runs_compiled else ()), *PASSES)
    )
    found = [
        replace(cost, **dict(zip(values, combination, strict=True)), checkpointing=checkpointing, microbatch=tokens)
        for combination in product(*values.values())
        for checkpointing, tokens in passes
    ]
    return sorted((c for c in found if c.keep_compute_copy or c.master_weights == "float32"), key=price)


def price(cost: TrainerCost) -> float:
    """Seconds of a step, times the price of what an estimate of time does not have."""
    seconds = cost.step(cost.work.sampled, cost.work.packed) * (1 + SMALL_PASS / cost.microbatch)
    seconds *= PRICE.get(cost.optimizer, 1.0) * PRICE.get(cost.master_weights, 1.0)
    return seconds * (1.0 if cost.keep_compute_copy else PRICE["cast"])


def cheapest(options: Sequence[TrainerCost], free: float) -> TrainerCost:
    """The first that fits `free` bytes, else the one that needs least."""
    fitting = (cost for cost in options if sum(cost.memory().values()) <= free)
    return next(fitting, None) or min(options, key=lambda cost: sum(cost.memory().values()))


def choose_memory(config: Config, gpus: int, gpu: Gpu | None, host: float = math.inf) -> Config:
    """The configuration with the options that `trainer.memory = "auto"` takes on GPUs like `gpu`, of a host with `host`
    bytes of memory.

    Options that are set stay. `trainer.chosen` says what was taken, by which estimate. Without a GPU, and in float32,
    nothing is taken.
    """
    if gpu is None or config.model.dtype == "float32":
        why = "float32" if gpu else "no GPU on this host"
        return _with_chosen(config, {}, f"the options as they are: {why}")
    shape = find_shape(config.model.path, "model.path")
    alone = not (_may_share_gpus(config) or any(_engine_parts(config, shape, gpus, gpu)))
    free, cost = free_memory(config, shape, gpus, gpu), cost_of(config, shape, Cluster(gpu, gpus))
    given = {field: getattr(cost, field) for option, field in OPTIONS.items()
             if option in config.trainer.model_fields_set}  # fmt: skip
    if cost.ranks * cost.moments > HOST_SHARE * host:
        given.setdefault("offload_optimizer", False)
    if config.algorithm.kl_coef and config.algorithm.reference == "average":  # bfloat16 is refused
        given.setdefault("master_weights", "float32")
    best = cheapest(candidates(cost, given, spares_copy(config), alone), free)
    values = {option: getattr(best, field) for option, field in OPTIONS.items() if field not in given}
    taken = {option: value for option, value in values.items() if value != getattr(config.trainer, option)}
    return _with_chosen(config, taken, _describe(cost, best, taken, free))


def _with_chosen(config: Config, taken: Mapping[str, Any], chosen: str) -> Config:
    trainer = config.trainer.model_dump(exclude_unset=True)
    return with_options(config, trainer={**trainer, **taken, "memory": "manual", "chosen": chosen})


def _describe(cost: TrainerCost, best: TrainerCost, taken: Mapping[str, Any], free: float) -> str:
    """One line: the options taken, and why."""
    needs, needed = (sum(each.memory().values()) for each in (best, cost))
    listed = ", ".join(f"{name} = {str(value).lower()}" for name, value in taken.items()) or "the options as they are"
    fits = f"about {needs / 1e9:.0f} of {free / 1e9:.0f} GB"
    if needs > free:
        return f"{listed}: needs {fits}, and no options need less; add ranks, or train adapters (lora.rank)"
    return f"{listed}: {fits}" + (f"; without, {needed / 1e9:.0f} GB" if taken else "")


def free_memory(config: Config, shape: Shape, gpus: int, gpu: Gpu) -> float:
    """Bytes of a GPU that the trainer's estimate may take: all but a KL reference, an engine there, and a margin."""
    cost = replace(cost_of(config, shape, Cluster(gpu, gpus)), reference=kl_reference(config))
    others = sum(_engine_parts(config, shape, gpus, gpu)) + cost.reference_bytes
    return SAFE * (gpu.memory - others) - HEADROOM


def kl_reference(config: Config) -> str:
    """The `TrainerCost.reference` of a configuration."""
    reference = config.algorithm.reference if config.algorithm.kl_coef else ""
    return reference if reference in ("", "start", "average") else "model"


def single_copy_engine(shape: Shape, work: Workload, tp: int) -> float:
    """Bytes on each GPU of an engine that shares its weights: overhead, weights, keys and values of 8 sequences."""
    kept = 8 * work.longest * shape.kv_bytes / min(tp, shape.kv_heads)
    return ENGINE_OVERHEAD + shape.weight_bytes / tp + kept


def _may_share_gpus(config: Config) -> bool:
    """Whether another process of the run, or a server of the user, may use a GPU of the trainer."""
    named = (config.generator.device, config.trainer.device) != ("auto", "auto")
    others = config.generator.servers, config.teacher.path, config.teacher.lag, config.scoring.kind == "model"
    return named or any(others)


def _engine_parts(config: Config, shape: Shape, gpus: int, gpu: Gpu) -> Iterator[float]:
    tp = config.generator.gpus_per_engine
    if config.sync.link == "single_copy":
        yield single_copy_engine(shape, workload_of(config), tp)
    elif config.sync.placement == "colocated":  # what a sleeping engine keeps: the embedded one also its weights
        yield ENGINE_OVERHEAD + (shape.weight_bytes if config.generator.engine == "torch" else 0)
    elif gpus < config.trainer.ranks + config.generator.engines * tp:
        engines = math.ceil(config.generator.engines * tp / max(1, gpus))
        share = config.generator.gpu_memory_utilization or SHARED_MEMORY / (engines + 1)
        yield engines * share * gpu.memory
