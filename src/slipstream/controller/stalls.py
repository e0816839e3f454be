"""End a run that makes no progress, with a message that names the waiting functions and calls.

Single workers are watched by `runtime/worker_process.py`. This watch covers all other waits of a run.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from slipstream.controller.run_context import RunContext
from slipstream.errors import RunError
from slipstream.runtime.worker_process import HEARTBEAT_S, alive_workers

PACKAGE = Path(__file__).parents[1]
WORKER_WATCH = 3  # further intervals: the watch of a single worker has the same limit, and restarts a hung worker first


@asynccontextmanager
async def end_if_stalled(run: RunContext) -> AsyncIterator[None]:
    """Context that raises `RunError` if the run makes no progress for too long. It cancels `run.main` to do so.

    The limit is `runtime.progress_timeout` and three intervals of this watch, in which a hung worker is restarted
    first. While a worker starts, `runtime.start_timeout` is added; during an episode, the longest episode timeout;
    during scoring, `scoring.timeout`. A paused run has no limit.
    """
    main, found = run.main, list[str]()

    async def watch() -> None:
        found.append(await _wait_for_stall(run, main))
        while True:  # until the context ends: a task may swallow its cancellation
            main.cancel()
            await asyncio.sleep(HEARTBEAT_S)

    watching = asyncio.create_task(watch())
    try:
        yield
    except BaseException:
        if not found:
            raise
        while main.uncancel():
            pass
        raise RunError(found[0]) from None
    finally:
        watching.cancel()


async def _wait_for_stall(run: RunContext, main: asyncio.Task[Any]) -> str:
    """Wait until the run is stalled, and describe it. Intervals are counted: the host may have been suspended."""
    idle, before = 0.0, _activity(run)
    interval = _interval(run)
    while idle < _limit(run):
        await asyncio.sleep(interval)
        now = _activity(run)
        idle = 0.0 if now != before or run.paused else idle + interval
        before = now
    return "\n".join(_describe(run, idle, main))


def _activity(run: RunContext) -> object:
    """A value that changes with any progress: steps, publishes, rollouts, and the work of any worker."""
    fates = dataclasses.astuple(run.state.ledger.counts)
    workers = [(id(worker), worker.activity) for worker in alive_workers()]
    return run.state.step, run.state.published, run.totals.tokens_generated, fates, workers


def _interval(run: RunContext) -> float:
    return min(HEARTBEAT_S, run.config.runtime.progress_timeout / 4)


def _limit(run: RunContext) -> float:
    """Seconds without progress that are permitted now."""
    limit = run.config.runtime.progress_timeout + WORKER_WATCH * _interval(run)
    limit += run.config.runtime.start_timeout if any(worker.starting for worker in alive_workers()) else 0.0
    limit += run.config.longest_timeout if run.episode_slots.longest else 0.0
    return limit + (run.config.scoring.timeout if run.scoring and run.scoring.running else 0.0)


def _describe(run: RunContext, idle: float, main: asyncio.Task[Any]) -> Iterator[str]:
    yield (
        f"the run has made no progress for {idle:.3g} s (runtime.progress_timeout = "
        f"{run.config.runtime.progress_timeout:g}): after step {run.state.step} of {run.config.loop.steps}, "
        f"{len(run.state.ready)} groups ready and {run.state.running} in flight"
    )
    background = {"a publish": run.publishing, "an evaluation": run.evaluation, "a checkpoint": run.checkpoint}
    for name, task in ({"the loop": main} | background).items():
        if task and not task.done():
            yield f"{name}: waits in {_where(task)}"
    if longest := run.episode_slots.longest:
        where = f", at {longest.where}" if longest.where else ""
        yield f"longest episode: task {longest.task_id} for {longest.seconds:.0f} s{where}"
    workers = alive_workers()
    for worker in workers:
        calls = f"pending calls: {worker.pending_calls}" if worker.pending_calls else "no pending call"
        yield f"{worker.name}: {calls}, last progress {worker.seconds_since_progress:.0f} s ago"
    for worker in [worker for worker in workers if worker.pending_calls] or workers:
        if tail := worker.log_tail():
            yield f"end of the log of {worker.name}:\n{tail}"


def _where(task: asyncio.Task[Any]) -> str:
    """The last three functions of this package that a task awaits in, outermost first."""
    coroutine: Any = task.get_coro()
    found = []
    while coroutine is not None:
        code = getattr(coroutine, "cr_code", None)
        if code and Path(code.co_filename).is_relative_to(PACKAGE):
            found.append(f"{code.co_name} ({Path(code.co_filename).name}, line {coroutine.cr_frame.f_lineno})")
        coroutine = getattr(coroutine, "cr_await", None)
    return " > ".join(found[-3:])
