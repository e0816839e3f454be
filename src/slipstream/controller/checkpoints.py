"""Write checkpoints of weights, optimizer, loop state and totals while generation and training continue."""

from __future__ import annotations

import asyncio
from pathlib import Path

from slipstream.controller.run_context import RunContext
from slipstream.errors import RunError
from slipstream.observe.events import CONTROLLER
from slipstream.runtime.closing import finish_in_thread
from slipstream.runtime.disk import directory_bytes
from slipstream.runtime.run_directory import write_state
from slipstream.runtime.worker import fail_unawaited


async def save_if_due(run: RunContext) -> None:
    """Start a checkpoint every `checkpoint.every` steps. Returns once the trainer's call is sent.

    The trainer copies its state before it takes another step.
    """
    if run.state.step % run.config.checkpoint.every == 0:
        await begin_checkpoint(run)


async def save_if_requested(run: RunContext) -> None:
    """Start the requested checkpoint, if any, between two steps. Checkpoints hold a version, so they fall on
    publishes."""
    if not run.requested_checkpoint:
        return
    if run.state.step % run.config.sync.every == 0:
        await begin_checkpoint(run)
    elif run.paused:
        found = f"step {run.state.step} lies between two publishes (sync.every = {run.config.sync.every})"
        error = RunError(f"{found}, so it has no checkpoint; resume the run first")
        fail_unawaited(run.requested_checkpoint, error)
        run.requested_checkpoint = None


async def begin_checkpoint(run: RunContext) -> None:
    """Start a checkpoint once the one before is written. Returns as `save_if_due`."""
    if run.checkpoint:
        await run.checkpoint
    sent = asyncio.Event()
    run.checkpoint = run.tasks.create_task(save_checkpoint(run, sent))
    await sent.wait()


async def save_checkpoint(run: RunContext, sent: asyncio.Event) -> None:
    """Write all state needed to resume from this step. Sets `sent` just before the trainer is called.

    Answers the request of a checkpoint made before it begins.
    """
    request, run.requested_checkpoint = run.requested_checkpoint, None
    path, step, began = run.directory.checkpoint(run.state.step), run.state.step, run.events.now()
    try:
        await write_checkpoint(run, path, sent)
    except BaseException as error:
        if request:
            reason = f"the checkpoint was not written: {error or type(error).__name__}"
            fail_unawaited(request, RunError(reason))
        raise
    run.events.add("checkpoint", CONTROLLER, began, run.events.now(), step=step)
    if request:
        request.set_result(str(path.absolute()))


async def write_checkpoint(run: RunContext, written: Path, sent: asyncio.Event) -> None:
    """Write the checkpoint of this step, or the loop's state again if it has been written."""
    # Captured before any batch of the next step is taken, so ledger and weights belong to the same step.
    known = run.state.snapshot() | {"totals": run.totals.snapshot()}
    ready, last = tuple(run.state.ready), run.ending
    if written.exists():
        sent.set()
        await run.recorder.flush()
        # The weights of this step are already there; ledger and totals may have advanced.
        await finish_in_thread(write_state, written, known, ready)
        return
    async with run.directory.new_checkpoint(run.state.step, run.config.checkpoint.keep) as path:
        sent.set()  # a task that waits for `sent` continues after the call in the next line is made
        await run.cluster.trainer.save(path / "trainer", last)
        await run.recorder.flush()
        await finish_in_thread(write_state, path, known, ready)
        run.checkpoint_gb = await asyncio.to_thread(directory_bytes, path) / 1e9
