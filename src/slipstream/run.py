"""The training loop: the order of events; `controller/` implements each of them.

The rollouts of a task form a group, groups form a batch, a batch is one optimizer step, and its weights are published
to the engines. Generation and training run concurrently.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from slipstream.config.loading import load_run_config
from slipstream.config.schema import Config
from slipstream.controller.checkpoints import save_if_due, save_if_requested
from slipstream.controller.control import serve_commands
from slipstream.controller.evaluation import evaluate_if_due
from slipstream.controller.finish import (
    close,
    finish,
    record_failure,
    report_file_errors,
    stop_generation,
    stop_on_signals,
)
from slipstream.controller.metrics import record_step, record_trainer_time
from slipstream.controller.publishing import enough_engines, publish
from slipstream.controller.rollouts import admit_groups, take_groups
from slipstream.controller.run_context import RunContext
from slipstream.controller.setup import resolve_config, restart_trainer, start
from slipstream.controller.stalls import end_if_stalled
from slipstream.environments.episode import EventLoopWatchdog, blocked_limit, first_error
from slipstream.errors import RunError
from slipstream.objective import build_batch
from slipstream.rollout import Batch
from slipstream.runtime.closing import closing, run_bounded
from slipstream.runtime.memory import raise_gc_thresholds
from slipstream.runtime.run_directory import RunDirectory
from slipstream.runtime.runtime import open_runtime
from slipstream.step_stats import StepStats

SWITCH_INTERVAL_S = 0.0005  # short, so that the event loop gets the interpreter from threads that record or send


def train(config: Config, *, quiet: bool = False) -> dict[str, Any]:
    """Run a configuration to its end. Returns the summary, as in `summary.json` of the run directory."""
    with open_runtime(config.runtime):
        config = resolve_config(config)
        path = Path(config.run.dir or f"runs/{run_name(config)}-{time.strftime('%Y%m%d-%H%M%S')}")
        with report_file_errors(path), contextlib.closing(RunDirectory.create(path)) as directory:
            return run_bounded(run_in(directory, config, quiet))


def run_name(config: Config) -> str:
    """The names of the environments in that of the run directory: of a dataset the name of its file."""
    names = (each.label if each.name == "dataset" else each.name.partition(":")[0] for each in config.each_environment)
    return "-".join(Path(name).stem for name in names)


def resume(path: Path, flags: Sequence[str] = (), *, quiet: bool = False) -> dict[str, Any]:
    """Continue the run in `path` from its last checkpoint, or from its start if it has none.

    `flags` override its configuration, and are saved in it once the run has started.
    """
    with report_file_errors(path), contextlib.closing(RunDirectory.open(path)) as directory:
        config = load_run_config(directory.config, flags)
        with open_runtime(config.runtime):
            return run_bounded(run_in(directory, resolve_config(config), quiet))


async def run_in(directory: RunDirectory, config: Config, quiet: bool) -> dict[str, Any]:
    """Train in this run directory. Returns the summary.

    Raises the first error of an exception group. Once the run has started, its attribute `resumable` is the directory.
    """
    run, interval, thresholds = RunContext(config, directory, quiet), sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    raise_gc_thresholds()
    try:
        async with closing(partial(close, run)):
            return await training_loop(run)
    except BaseException as raised:
        error: Any = first_error(raised)
        if directory.config.exists() and not directory.changed_options(config):  # the run had started
            error.resumable = directory.path
        if error is raised:
            raise
        raise error from None
    finally:
        sys.setswitchinterval(interval)
        gc.set_threshold(*thresholds)


async def training_loop(run: RunContext) -> dict[str, Any]:
    """Train until the last step, the last token, or a signal. Returns the summary.

    After the death of a trainer rank, training continues from the last checkpoint with new ranks.
    """
    limit = blocked_limit(environment.options.timeout for environment in run.environments)
    with run.progress, stop_on_signals(run), EventLoopWatchdog(limit, run.progress.warn):
        async with serve_commands(run):
            await start(run)
            async with end_if_stalled(run):
                while True:
                    try:
                        await train_steps(run)
                        return await finish(run)
                    except Exception as error:
                        with record_failure(run):
                            await restart_trainer(run, error)  # raises all other errors again


async def train_steps(run: RunContext) -> None:
    """Take steps until the run is complete or stopped, with all tasks of the loop. An error cancels these tasks."""
    async with asyncio.TaskGroup() as run.tasks:
        # A trainer may die while no call to it is pending, and engines can't join the pool without it.
        watches = [run.tasks.create_task(rank.raise_death()) for rank in run.cluster.trainer_ranks]
        admit_groups(run)
        while batch := await next_batch(run):
            waited = run.totals.seconds_since_step()
            batch_metrics = await asyncio.to_thread(run.totals.batch, batch, run.state.version)
            publishes = (run.state.step + 1) % run.config.sync.every == 0
            async with run.cluster.trainer_turn(publishes):
                stats = await take_step(run, batch, waited)
                run.state.step += 1
                if publishes:
                    await publish(run)
            record_step(run, batch, stats, batch_metrics, waited)
            await run.recorder.room()
            await evaluate_if_due(run, batch.tokens)
            await save_if_due(run)
            admit_groups(run)
        await stop_generation(run)
        for watch in watches:
            watch.cancel()


async def next_batch(run: RunContext) -> Batch | None:
    """Wait for enough groups within `max_lag`. Returns None once the run is ending."""
    while not run.ending:
        await save_if_requested(run)
        held = run.paused or run.evaluates_snapshot
        if enough_engines(run) and not held and (groups := take_groups(run)):
            # A reward part that all rollouts lack is an error in the first step, and chance later.
            strict = run.state.step == 0
            try:
                return await asyncio.to_thread(
                    build_batch, run.objective, run.config, groups, run.state.version, strict=strict
                )
            except ValueError as error:
                raise RunError(str(error)) from None
        admit_groups(run)
        run.recorder.write()
        run.changed.clear()
        await run.changed.wait()
    return None


async def take_step(run: RunContext, batch: Batch, waited: float) -> StepStats:
    """Send the batch to the trainer, then write the record of the previous step during the optimizer step."""
    step = asyncio.ensure_future(run.cluster.trainer.step(batch))
    for _ in range(2):  # yield twice so that the queued call is flushed
        await asyncio.sleep(0)
    run.recorder.write()
    run.stepping = True
    try:
        stats = await step
    finally:
        run.stepping = False
    record_trainer_time(run, batch, stats, waited)
    return stats
