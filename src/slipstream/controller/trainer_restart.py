"""Restart a dead trainer from the last whole checkpoint, as `--resume` does, while engines continue to run.

ARCHITECTURE.md says why that is sound. Engines are restarted, too, if they can't connect to another trainer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from slipstream.config.schema import ConfigError
from slipstream.controller.errors import RunError
from slipstream.controller.run_context import RunContext
from slipstream.controller.setup import continue_from, start_cluster
from slipstream.controller.weight_publisher import PublishError
from slipstream.observe.events import TRAINER
from slipstream.runtime.rank_group import RankGroup
from slipstream.runtime.worker import WorkerDied, WorkerError, describe_death
from slipstream.runtime.worker_process import WorkerProcess


async def restart_trainer(run: RunContext, error: Exception) -> None:
    """Continue from the newest whole checkpoint after the death of a trainer rank.

    Raises `error` if it has another cause. Raises `RunError` after `runtime.max_restarts` restarts.
    """
    before, steps, first, died_at = run.totals, run.state.step, run.trainer_restarts, run.events.now()
    failure: WorkerDied | WorkerError | PublishError | None = trainer_death(run, error)
    limit = run.config.runtime.max_restarts
    if failure is None or not limit:
        raise error
    dead = next(rank.name for rank in trainer_ranks(run) if rank.dead)
    run.events.add("fault", dead, died_at, what=describe_death(failure))
    engines_stay = run.cluster.engines_can_stay
    while run.trainer_restarts < limit:
        run.trainer_restarts += 1
        try:
            rewound_to = await _rewind_and_restart(run, failure, steps, engines_stay)
        except ConfigError as again:
            raise RunError(f"the trainer can't be restarted: {again}") from None
        except (WorkerDied, WorkerError, PublishError) as again:
            engines_stay = run.cluster.engines_can_stay and trainer_death(run, again) is not None
            failure = again
        else:
            run.totals.carry_over(before, run.trainer_restarts - first, steps - run.state.step)
            lost, what = steps - run.state.step, f"the trainer continues from step {run.state.step}"
            keys = {"what": what, "step": run.state.step, "steps_lost": lost, "rewound_to": rewound_to}
            run.events.add("recovery", TRAINER, died_at, run.events.now(), **keys)
            return
    raise RunError(f"{failure}\nThe trainer was restarted {limit} times before (runtime.max_restarts)") from None


def trainer_death(run: RunContext, error: BaseException) -> WorkerDied | None:
    """The death of a trainer rank that is (one of) the errors; None for other errors."""
    deaths = [rank.dead for rank in trainer_ranks(run) if rank.dead]
    group = BaseExceptionGroup("", [error])
    return next((death for death in deaths if group.subgroup(lambda one: one is death)), None)  # noqa: B023


def trainer_ranks(run: RunContext) -> Sequence[WorkerProcess]:
    """The processes of the trainer."""
    trainer = run.cluster.trainer_process
    return trainer.processes if isinstance(trainer, RankGroup) else (trainer,)


async def _rewind_and_restart(run: RunContext, failure: Exception, steps: int, engines_stay: bool) -> float:
    """Go back to the newest whole checkpoint, and start the trainer from it, and the engines unless they stay.

    `steps` is the number of steps taken before. Returns the time of the run at which it wrote the checkpoint.
    """
    await run.cluster.trainer_process.stop()
    await run.recorder.flush()
    await asyncio.to_thread(run.directory.remove_partial)
    checkpoint, state, damaged = await asyncio.to_thread(run.directory.newest_whole)
    for line in damaged:
        run.progress.warn(line)
    step = state.get("step", 0)
    run.progress.warn(
        f"{describe_death(failure)}; {'the trainer restarts' if engines_stay else 'trainer and engines restart'} "
        f"({run.trainer_restarts} of runtime.max_restarts = {run.config.runtime.max_restarts}) and the run continues "
        f"from step {step}: {steps - step} steps are lost"
    )
    run.rewind()
    if engines_stay:
        await run.cluster.restart_trainer()
    else:
        await run.cluster.close()
        await start_cluster(run)
    await continue_from(run, checkpoint, state)
    return float(state["totals"]["wall_seconds"]) if state else 0.0
