"""Publish the trainer's weights as the next version, while the trainer continues where the weight link permits it."""

from __future__ import annotations

import asyncio

from slipstream.controller.rollouts import admit_groups
from slipstream.controller.run_context import RunContext
from slipstream.observe.events import CONTROLLER
from slipstream.runtime.worker import WorkerDied, succeeded
from slipstream.scoring.teacher import rotate_snapshots
from slipstream.sync.link import PublishStats


async def publish(run: RunContext) -> None:
    """Start to publish the trainer's weights, and return once the trainer may take its next step.

    A synchronous run waits until every engine serves the version. So do runs with `loop.force_max_lag`, with a lagging
    teacher, and with colocated placement. First waits for the end of the previous publish. Raises the error of any
    publish that it waits for.
    """
    await wait_published(run)  # one publish at a time
    trainer_free = asyncio.Event()
    run.publishing = run.tasks.create_task(publish_version(run, trainer_free))
    freed = asyncio.ensure_future(trainer_free.wait())
    await asyncio.wait((run.publishing, freed), return_when=asyncio.FIRST_COMPLETED)
    freed.cancel()
    loop, sync, teacher = run.config.loop, run.config.sync, run.config.teacher
    if not loop.max_lag or loop.force_max_lag or teacher.lag or sync.placement == "colocated":
        await wait_published(run)


async def wait_published(run: RunContext) -> None:
    """Wait until all engines that are not late serve the last version. Raises the error of a failed publish."""
    if run.publishing:
        await run.publishing


async def publish_version(run: RunContext, trainer_free: asyncio.Event) -> None:
    """Publish to the engines, then admit groups. Sets `trainer_free` once the trainer may take its next step.

    If no engine is alive, the version is not served: the first engine to be restarted is brought to the newest weights.
    """
    step = run.state.step
    run.state.stage()
    try:
        stats = await run.cluster.link.publish(run.state.version, free=trainer_free)
    except WorkerDied:
        if run.cluster.trainer_process.dead or run.cluster.generator.dead:
            raise
        return
    run.state.publish(step)
    run.totals.pauses.append(stats.pause_s)
    run.last_publish = stats
    record_publish(run, stats)
    await refresh_teacher(run)
    if run.config.loop.max_lag:  # a synchronous run admits groups after the step is recorded
        admit_groups(run)
    run.changed.set()


def record_publish(run: RunContext, stats: PublishStats) -> None:
    """Record a publish with the pause of each engine."""
    run.events.add(
        "publish", CONTROLLER, stats.began, stats.began + stats.total, version=stats.version, pauses=stats.pauses,
        transfer_s=stats.sending, ready_s=stats.ready, verify_s=stats.total - stats.ready,
    )  # fmt: skip


async def publish_to_new_engines(run: RunContext) -> None:
    """Bring engines that wait to join to the weights of the last version.

    If the trainer has newer weights, the next publish does so, unless the run waits for these engines.
    """
    async with run.cluster.trainer_turn(publishes=False):  # it may have nothing to publish
        if run.publishing:
            await asyncio.wait((run.publishing,))
        if run.cluster.trainer_process.dead or (run.publishing and not succeeded(run.publishing)):
            return  # the run ends, or a restart of the trainer brings all engines to its version
        if run.state.staged == run.state.step:
            if stats := await run.cluster.link.publish_again(run.state.version):
                record_publish(run, stats)
            run.state.publish(run.state.staged)
        elif len(run.cluster.generator.alive) < run.config.generator.min_replicas:
            await publish_version(run, asyncio.Event())
    run.changed.set()


def enough_engines(run: RunContext) -> bool:
    """Whether `generator.min_replicas` engines serve. Warns when they become too few.

    Raises the death of an engine if none is alive and none will return.
    """
    pool, wanted = run.cluster.generator, run.config.generator.min_replicas
    if pool.dead:
        raise pool.dead
    enough = len(pool.alive) >= wanted
    if not enough and not run.waits_for_engines:
        run.progress.warn(
            f"the run waits for engines: {len(pool.alive)} serve, and generator.min_replicas = {wanted} must serve "
            "before the trainer takes the next step"
        )
    run.waits_for_engines = not enough
    return enough


async def refresh_teacher(run: RunContext) -> None:
    """Load the policy of `teacher.lag` publishes ago into the teacher, if the policy is its own teacher."""
    lag = run.config.teacher.lag
    if lag and run.scoring and run.scoring.teacher:
        new, behind = rotate_snapshots(run.directory.path / "teacher", lag, run.state.version)
        await run.cluster.trainer.export(new)
        await run.scoring.teacher.load(behind)
