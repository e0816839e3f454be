"""The change to a run's options that would make it faster, by a simulation with the rates that the run has recorded."""

from __future__ import annotations

import asyncio
import math
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pyarrow.compute as pc

from slipstream.config.loading import load_config
from slipstream.config.schema import Config, ConfigError
from slipstream.observe.run_data import Run
from slipstream.plan.calibration import Fit, fit, scenario_of_run
from slipstream.plan.ranking import simulated_figures
from slipstream.plan.scenario import Figures, Scenario
from slipstream.plan.shapes import SHAPES, find_shape
from slipstream.plan.splits import can_shard_trainer
from slipstream.rollout import mean
from slipstream.runtime.priority import OBSERVER_NICENESS, lower_process_priority
from slipstream.runtime.process import Launch, child_environment

STEPS, LEAST_STEPS, MAX_ROLLOUTS = 24, 6, 20_000  # of one simulation
LEAST_GAIN = 1.05
TIMEOUT_S = 60.0  # of the process that simulates for a run
MOST_ERROR = 0.2  # of the busy time of each side, as a share of the run's time, in the simulation of the run as it is
SHAPE = SHAPES["0.6B"]  # of no effect: all rates are measured


class Advice(NamedTuple):
    """A change, trained tokens/s with it over those without it by simulation, and what the simulation was wrong by."""

    change: str
    gain: float
    error: float
    idle: str

    def __str__(self) -> str:
        return (
            f"{self.idle}: {self.change} would train {self.gain:.1f} times as fast (simulated, off by {self.error:.0%})"
        )


def advise(run: Run) -> Advice | None:
    """The most effective single change, or None if none helps by `LEAST_GAIN`. Raises `ConfigError` as `fit`.

    None, too, if the simulation of the run as it is differs from the run in which side waits, by `MOST_ERROR`.
    """
    found, config = fit_run(run), run_config(run)
    rollouts = config.loop.groups_per_step * config.loop.group_size
    steps = max(LEAST_STEPS, min(STEPS, MAX_ROLLOUTS // rollouts))
    scenario = scenario_of_run(found, config, SHAPE, steps)
    now = simulated_figures(scenario)
    errors = now.trainer_busy - found.trainer_busy, now.engines_busy - found.engines_busy
    if max(map(abs, errors)) > MOST_ERROR:
        return None
    gains = [
        (simulated_figures(other).tokens_per_s / now.tokens_per_s, text)
        for text, other in changes(scenario, grows=not on_cpu(run, config))
        if _accepts(run, text)
    ]
    gain, change = max(gains, default=(1.0, ""))
    error = abs(now.tokens_per_s / found.tokens_per_s - 1)
    return Advice(change, gain, error, _idle(found)) if gain >= LEAST_GAIN else None


def fit_run(run: Run) -> Fit:
    """The rates of a run. Raises `ConfigError` as `fit`."""
    columns = ["visit_id", "rollout", "turn", "prompt_ids", "completion_ids"]
    table = run.table(run.rollout_steps[-1], columns) if run.rollout_steps else None
    lengths: dict[tuple[int, int, int], tuple[int, int]] = {}
    if table is not None:
        keys = (table[name].to_pylist() for name in columns[:3])
        sizes = (pc.list_value_length(table[name]).to_pylist() for name in columns[3:])
        lengths = dict(zip(zip(*keys, strict=True), zip(*sizes, strict=True), strict=True))
    prompts = [prompt for (_, _, turn), (prompt, _) in lengths.items() if turn == 0]
    added = [
        prompt - sum(lengths[visit, rollout, turn - 1])
        for (visit, rollout, turn), (prompt, _) in lengths.items()
        if (visit, rollout, turn - 1) in lengths
    ]
    return fit(run.metrics, run.events, run_config(run), prompts, mean(added))


def run_config(run: Run, *flags: str) -> Config:
    """The configuration of a run, with options changed by `flags`. Raises `ConfigError`."""
    return load_config(run.path / "config.toml", flags)


def changes(scenario: Scenario, grows: bool) -> Iterator[tuple[str, Scenario]]:
    """Single changes of a run's options, each with its simulation.

    `grows`: whether an engine or a rank may be added. The simulation gives it a further GPU.
    """
    lag, engines, ranks = scenario.max_lag + 1, scenario.engines + 1, scenario.trainer.ranks + 1
    if scenario.placement == "disaggregated" and grows:
        yield f"generator.replicas = {engines}", replace(scenario, engines=engines)
        yield f"trainer.ranks = {ranks}", replace(scenario, trainer=replace(scenario.trainer, ranks=ranks))
    if scenario.placement != "colocated":
        yield f"loop.max_lag = {lag}", replace(scenario, max_lag=lag)


def on_cpu(run: Run, config: Config) -> bool:
    """Whether the trainer has no GPU. Further engines and ranks would then take processor cores from the others."""
    return run.metrics[-1].get("train/max_memory_gb") == 0 and ":" not in config.trainer.kind


def _accepts(run: Run, change: str) -> bool:
    """Whether the run's configuration is valid with a change such as "trainer.ranks = 2"."""
    try:
        config = run_config(run, f"--{change.replace(' = ', '=')}")
        if config.trainer.parallel != "tensor":
            return True
        return can_shard_trainer(find_shape(config.model.path, "model.path"), config.trainer.ranks)
    except ConfigError:
        return False


async def advice_in_process(path: Path) -> str:
    """`describe_advice` of the run in a directory, computed by a process of low priority.

    Returns "" if the process can't be started, fails, or takes longer than `TIMEOUT_S`. A simulation takes seconds, in
    which a thread would compete with the event loop for the interpreter.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", __name__, path, stdout=PIPE, stderr=DEVNULL,
            start_new_session=True, env=child_environment(Launch("advice")),
        )  # fmt: skip
    except OSError:  # such as too many processes: advice must not end a run
        return ""
    try:
        output, _ = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
        return output.decode().strip()
    except TimeoutError:
        return ""
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def describe_advice(run: Run) -> str:
    """The advice for a run in words; "" without advice, or with too few records."""
    try:
        found = advise(run)
    except Exception:  # of records that are short, damaged or of another release: advice must not end a run
        return ""
    return f"{found}" if found else ""


def _idle(found: Fit) -> str:
    trainer, engines = 1 - found.trainer_busy, 1 - found.engines_busy
    return f"trainer idle {trainer:.0%}" if trainer >= engines else f"engines idle {engines:.0%}"


def describe_figures(found: Fit, simulated: Figures) -> str:
    """What a run reached, and what its simulation reaches with the fitted rates."""
    error = simulated.tokens_per_s / found.tokens_per_s - 1
    return (
        f"the run: {found.tokens_per_s:,.0f} tokens/s, trainer busy {found.trainer_busy:.0%}, engines "
        f"{found.engines_busy:.0%}, lag {found.lag_mean:.2f}; simulated: {simulated.tokens_per_s:,.0f} tokens/s "
        f"({error:+.0%}), {simulated.trainer_busy:.0%}, {simulated.engines_busy:.0%}, {simulated.lag_mean:.2f}"
    )


if __name__ == "__main__":
    signal.alarm(math.ceil(TIMEOUT_S))  # also if the controller was killed
    lower_process_priority(OBSERVER_NICENESS)
    print(describe_advice(Run(Path(sys.argv[1]))))
