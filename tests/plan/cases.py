"""Small problems and scenarios for tests of the planner."""

from __future__ import annotations

from typing import Any

from slipstream.plan.costs import EngineCost, PublishCost, TrainerCost
from slipstream.plan.hardware import Cluster, Rates, find_gpu
from slipstream.plan.scenario import Scenario
from slipstream.plan.shapes import find_shape
from slipstream.plan.splits import Problem
from slipstream.plan.workload import Lengths, Workload


def work(completion: Lengths | None = None, **options: Any) -> Workload:
    return Workload(Lengths(64), completion or Lengths(256), **({"groups": 8, "group_size": 4, "steps": 12} | options))


def problem(model: str = "7B", gpu: str = "h100", gpus: int = 8, **options: Any) -> Problem:
    given = options.pop("work", None) or work(Lengths(2048), groups=64, group_size=8)
    return Problem(find_shape(model), Cluster(find_gpu(gpu), gpus), given, Rates(), **options)


def scenario(given: Workload | None = None, rates: Rates | None = None, **options: Any) -> Scenario:
    """One small model on GPUs of its own: engines are slower than the trainer unless `rates` change it."""
    given, rates = given or work(), rates or Rates()
    shape, cluster = find_shape("0.6B"), Cluster(find_gpu("h100"), 8)
    parts = EngineCost(shape, cluster, rates, 1), TrainerCost(shape, cluster, rates, given)
    defaults: dict[str, Any] = {
        "publish": PublishCost("nccl", 0.02, 0.02, 0.002, 0.0),
        "engines": 2,
        "slots": 16,
        "kv_tokens": 1e6,
        "max_lag": 2,
    }
    return Scenario(given, *parts, **(defaults | options))
