"""Rank the splits of a cluster: all by formula, the best by a simulation of the run."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from slipstream.config.schema import ConfigError
from slipstream.plan.scenario import Figures, Scenario
from slipstream.plan.simulator import Simulation
from slipstream.plan.splits import Plan, Problem, evaluate, splits

SIMULATED = 6  # best splits by formula
STEPS, WARM_UP = 24, 8  # simulated steps, and those that are left out of the figures
LEAST_STEPS = 6
TOLERANCE = 0.97  # the smallest lag, and the fewest engines, that reach this share of the best rate are chosen
MOST_STALE = 0.02  # share of the rollouts, above which fewer slots are considered
MAX_SIMULATED_TURNS, MAX_SIMULATED_TOKENS = 60_000, 6e7  # of one simulation; fewer steps if they have more turns


def plan(problem: Problem, lags: tuple[int, ...], simulated: int = SIMULATED) -> list[Plan]:
    """All splits, best first. Figures of the best by formula, and of the best of each lag, are simulated.

    The first has the smallest lag that reaches `TOLERANCE` of the best rate; the others are by rate. Simulated splits
    come first: rates by formula are no reason to prefer others.
    """
    plans = rank(problem, lags)
    fitting = distinct([plan for plan in plans if not plan.missing])
    chosen = fitting[:simulated]
    for lag in lags:
        chosen += [plan for plan in fitting if plan.split.max_lag == lag and plan not in chosen][:1]
    others = [plan for plan in plans if plan not in chosen]
    chosen = sorted(map(simulate_slots, chosen), key=lambda plan: plan.order)
    alike = [plan for plan in chosen if plan.source == chosen[0].source]
    close = [plan for plan in alike if plan.tokens_per_s >= TOLERANCE * chosen[0].tokens_per_s]
    first = min(close, key=lambda plan: plan.split.max_lag)
    return [first] + [plan for plan in chosen if plan is not first] + others


def rank(problem: Problem, lags: tuple[int, ...]) -> list[Plan]:
    """All splits: those that fit by trained tokens/s, then the others by what they lack.

    Raises `ConfigError` if sequences exceed the model's context, or if the model fits nowhere.
    """
    work, shape, cluster = problem.work, problem.shape, problem.cluster
    if work.longest > shape.context:
        raise ConfigError(
            f"prompt and completion have up to {work.longest:,} tokens together, and {shape.name} has a context of "
            f"{shape.context:,}; lower --prompt, --completion, --spread or --max-tokens"
        )
    plans = [evaluate(problem, split) for split in splits(problem, lags)]
    fitting = [plan for plan in plans if not plan.missing]
    if not fitting:
        nearest = min(plans, key=lambda plan: plan.missing_bytes)
        raise ConfigError(
            f"{shape.name} fits on no split of {cluster.gpus} x {cluster.gpu.name}: in the nearest ({nearest.split}) "
            f"{nearest.missing}; use more GPUs, a kind with more memory, "
            '--lora-rank, trainer.memory = "auto" in a CONFIG.toml, or shorter completions'
        )
    fitting.sort(key=lambda plan: -plan.tokens_per_s)
    return fitting + sorted((plan for plan in plans if plan.missing), key=lambda plan: plan.missing_bytes)


def distinct(plans: list[Plan]) -> list[Plan]:
    """The first plan of each placement, size of trainer and engines, and lag: with the trainer's best parallelism."""
    seen: dict[tuple[object, ...], Plan] = {}
    for found in plans:
        split = found.split
        seen.setdefault((split.placement, split.ranks, split.engines, split.tp, split.max_lag), found)
    return list(seen.values())


def simulated_figures(scenario: Scenario, warm: int = 0) -> Figures:
    """Simulate a run. Figures leave out the first `warm` steps; 0: a third, at most `WARM_UP`.

    A run that does not continue after the scenario's steps starts no rollouts in its last ones.
    """
    work, further = scenario.work, scenario.max_lag + 1 if scenario.continues else 0
    simulation = Simulation(replace(scenario, work=replace(work, steps=work.steps + further)))
    records = simulation.run()[: work.steps]
    warm = warm or min(WARM_UP, len(records) // 3)
    before, timed = records[warm - 1], records[warm:]
    seconds = timed[-1].end - before.end
    lags = sum((record.lags for record in timed), Counter[int]())
    tokens = sum(lags.values())
    counts = simulation.state.ledger.counts
    return Figures(
        seconds / len(timed), tokens / seconds, sum(record.end - record.start for record in timed) / seconds,
        (timed[-1].engine_busy - before.engine_busy) / seconds / scenario.engines,
        sum(lag * count for lag, count in lags.items()) / tokens, float(quantile(lags, 0.99)),
        counts.dropped_stale / max(1, counts.generated),
        sum(engine.preemptions for engine in simulation.engines) / max(1, counts.generated), records,
    )  # fmt: skip


def simulate(plan: Plan) -> None:
    """Replace the figures of a plan by those of a simulation; keep them if it would have too many turns or tokens."""
    work, after = plan.problem.work, plan.split.max_lag + 1  # steps after those of the figures
    batches = LEAST_STEPS + after
    turns = work.rollouts * work.turns
    if turns * batches > MAX_SIMULATED_TURNS or work.sampled * batches > MAX_SIMULATED_TOKENS:
        return
    steps = max(LEAST_STEPS, min(STEPS, MAX_SIMULATED_TURNS // turns - after))
    for name, value in vars(simulated_figures(plan.scenario(steps))).items():
        setattr(plan, name, value)
    plan.source = "simulation"


def simulate_slots(plan: Plan) -> Plan:
    """Simulate a plan. Returns it, or the same split with half the slots if that keeps the rate and far fewer rollouts
    become stale: each of fewer sequences takes less time.

    Considered with computed rates only, which tell how the time of a step depends on the number of sequences.
    """
    simulate(plan)
    problem, rates = plan.problem, plan.problem.rates
    given = problem.slots or rates.engine_tokens_per_s or rates.measured_decode
    if plan.stale <= MOST_STALE or plan.slots < 2 or given:
        return plan
    fewer = evaluate(replace(problem, slots=plan.slots // 2), plan.split)
    simulate(fewer)
    keeps_rate = not fewer.missing and fewer.tokens_per_s >= TOLERANCE * plan.tokens_per_s
    return fewer if keeps_rate and fewer.stale < plan.stale / 2 else plan


def quantile(counts: Counter[int], share: float) -> int:
    """The smallest value that at least this share of the counted ones does not exceed."""
    left = share * sum(counts.values())
    for value in sorted(counts):
        left -= counts[value]
        if left <= 0:
            return value
    return max(counts)
