"""The values of `loop.max_lag = "auto"` and `generator.replicas = "auto"`: the planner's choice for a run's GPUs."""

from __future__ import annotations

from dataclasses import replace

from slipstream.config.engine_args import serves_fp8
from slipstream.config.loading import with_options
from slipstream.config.schema import AUTO, Config
from slipstream.plan.hardware import Cluster, Rates, kind_of
from slipstream.plan.memory import kl_reference, workload_of
from slipstream.plan.ranking import TOLERANCE, simulate
from slipstream.plan.shapes import find_shape
from slipstream.plan.splits import Plan, Problem, Split, evaluate

LAGS = (1, 2, 4, 8)


def choose_options(config: Config, gpus: int, gpu_name: str) -> Config:
    """The configuration with both options as numbers. `gpu_name` is CUDA's; 1 each without a GPU of a known kind."""
    auto_lag, auto_engines = config.loop.max_lag == AUTO, config.generator.replicas == AUTO
    if not (auto_lag or auto_engines):
        return config
    lag, engines = 1 if auto_lag else config.loop.max_lag, 1 if auto_engines else config.generator.replicas
    kind, tp = kind_of(gpu_name), config.generator.gpus_per_engine
    if kind and gpus > 1:
        colocated = config.sync.placement == "colocated"
        most = max(1, (gpus - (0 if colocated else config.trainer.ranks)) // tp)
        plans = Candidates(config, Cluster(kind, gpus))
        if auto_engines:
            counts = range(1, most + 1)
            engines = _smallest([(n, plans.evaluate(n, 2 if auto_lag else lag)) for n in counts]) or most
        if auto_lag:
            found = [(n, plans.evaluate(engines, n)) for n in LAGS]
            for _, plan in found:
                if not plan.missing:
                    simulate(plan)
            lag = _smallest(found) or lag
    loop, generator = (section.model_dump(exclude_unset=True) for section in (config.loop, config.generator))
    return with_options(config, loop=loop | {"max_lag": lag}, generator=generator | {"replicas": engines})


class Candidates:
    """Plans for a run's trainer and different engines and lags."""

    def __init__(self, config: Config, cluster: Cluster) -> None:
        shape = replace(find_shape(config.model.path, "model.path"), context=10**9)
        self._problem = Problem(
            shape, cluster, workload_of(config), Rates(), slots=config.generator.max_num_seqs, trainer=config.trainer,
            fp8_engines=serves_fp8(config), reference=kl_reference(config),
        )  # fmt: skip
        self._config = config

    def evaluate(self, engines: int, lag: int) -> Plan:
        trainer, tp = self._config.trainer, self._config.generator.gpus_per_engine
        placement = self._config.sync.placement
        parallel = trainer.parallel, trainer.context_parallel
        split = Split(placement, trainer.ranks, *parallel, engines, tp, lag, trainer.expert_parallel)
        return evaluate(self._problem, split)


def _smallest(plans: list[tuple[int, Plan]]) -> int | None:
    """The first number whose plan reaches `TOLERANCE` of the best rate; None if no plan fits."""
    best = max((plan.tokens_per_s for _, plan in plans), default=0.0)
    return next((number for number, plan in plans if 0 < TOLERANCE * best <= plan.tokens_per_s), None)
