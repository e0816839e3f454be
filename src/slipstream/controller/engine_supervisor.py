"""Replaces engines that die, and adds or removes engines of a running run, while the other engines continue.

A new engine joins the pool once a publish has brought it to the current version with equal checksums.
"""

from __future__ import annotations

import asyncio
import time

from slipstream.config.schema import Config, ConfigError
from slipstream.controller.publishing import publish_to_new_engines
from slipstream.controller.run_context import RunContext
from slipstream.environments.episode import episode_slots
from slipstream.generators.pool import STOP_TIMEOUT_S, EngineReplica, Start
from slipstream.runtime.closing import wait_first
from slipstream.runtime.process import NOT_PLACED
from slipstream.runtime.runtime import current_runtime
from slipstream.runtime.worker import WorkerDied, WorkerError, describe_death

STABLE_S = 600.0  # of service after which earlier restarts of an engine count no more
BACKOFF_S = 0.5  # before a restart, doubled with each further one until an engine serves for `MAX_BACKOFF_S`
MAX_BACKOFF_S = 60.0
LEAVE_TIMEOUT_S = 60.0  # in which an engine that leaves may finish its requests; others sample the rest again
LEAVE_POLL_S = 0.05


def supervise_engines(run: RunContext) -> None:
    """Replace engines that die from now on. Does nothing if the engines are supervised already."""
    pool = run.cluster.generator
    if not pool.supervised:
        pool.supervised, pool.on_serve = True, run.changed.set
        for engine in pool.generators:
            watch(run, engine)


async def close_cluster(run: RunContext) -> None:
    """End all watches and starts of engines, then all processes."""
    watches, run.engine_watches = list(run.engine_watches.values()), {}
    for task in watches:
        task.cancel()
    await asyncio.gather(*watches, return_exceptions=True)
    if run.started_cluster:
        await run.started_cluster.close()


async def scale(run: RunContext, engines: int) -> None:
    """Start or end engines until there are `engines`. Dead engines without restarts left are started again, too.

    Returns once surplus engines have ended. Others start in the background. Raises `ConfigError` for a number of
    engines that the run can't have.
    """
    cluster, pool = run.cluster, run.cluster.generator
    cluster.validate_engine_count(engines)
    await asyncio.gather(*(remove_engine(run, engine) for engine in pool.generators[engines:]))
    for engine in pool.generators:
        if engine not in run.engine_watches:
            watch(run, engine)
    for number in range(len(pool.generators), engines):
        assert pool.begin
        engine, start = pool.begin(number, cluster.link.start_config(run.config))
        pool.change(add=[engine])
        watch(run, engine, start)
    engines_changed(run)


def watch(run: RunContext, engine: EngineReplica, start: Start | None = None) -> None:
    """Start the engine if `start` is given, and replace it each time it dies, in a background task."""
    run.engine_watches[engine] = asyncio.create_task(keep_engine(run, engine, start))


async def remove_engine(run: RunContext, engine: EngineReplica) -> None:
    """Let an engine finish its requests, and end it. Other engines sample its unfinished requests again."""
    engine.leaving = True
    watching = run.engine_watches.pop(engine, None)
    if watching and not engine.started:
        watching.cancel()
    last = time.monotonic() + LEAVE_TIMEOUT_S
    while engine.pending_requests and not engine.process.dead and time.monotonic() < last:
        await asyncio.sleep(LEAVE_POLL_S)
    await run.cluster.link.leave(engine)
    await engine.process.stop(STOP_TIMEOUT_S)
    run.cluster.generator.change(remove=[engine])
    current_runtime().release(engine.process.name)
    run.progress.note(f"{engine.process.name} has left the pool")


async def keep_engine(run: RunContext, engine: EngineReplica, start: Start | None) -> None:
    """Start the engine if `start` is given, and replace it each time it dies, until no restarts are left.

    After `STABLE_S` of service, earlier restarts count no more. Returns when the engine leaves the pool. Once
    no restarts are left, a death ends the run if fewer engines remain than it needs.
    """
    pool = run.cluster.generator
    limit = 0 if run.config.sync.link == "single_copy" else run.config.generator.max_restarts
    tries = delays = 0
    try:
        if start:
            await start_engine(run, engine, start)
            if engine.alive:
                run.progress.note(f"{engine.process.name} was added to the pool and serves")
        while True:
            since = time.monotonic()
            died = await wait_dead(engine)
            if engine.leaving:
                return
            pending = NOT_PLACED in str(died) and pool.alive
            served = time.monotonic() - since if engine.serving.is_set() else 0.0
            tries = 0 if pending or served >= STABLE_S else tries
            delays = 0 if pending or served >= MAX_BACKOFF_S else delays
            again = engine.replaceable and tries < limit
            report_death(run, engine, died, f"; it is restarted (try {tries + 1} of {limit})" if again else "")
            if not again:
                break
            await asyncio.sleep(min(MAX_BACKOFF_S, BACKOFF_S * 2**delays))
            tries, delays = tries + 1, delays + 1
            if engine.process.dead and not engine.leaving:  # else a publish has restarted it
                engine = await replace_engine(run, engine)
    except Exception as error:
        name = engine.process.name
        pool.fail(WorkerDied(f"{name} can't be replaced any more: {type(error).__name__}: {error}"))
        engines_changed(run)
        raise
    del run.engine_watches[engine]
    if len(run.engine_watches) < least_engines(run.config):
        pool.fail(died)
        engines_changed(run)


def least_engines(config: Config) -> int:
    """Engines without which a run ends: by `single_copy` all, since a trainer rank computes on the weights of each."""
    return config.generator.engines if config.sync.link == "single_copy" else config.generator.min_replicas


async def replace_engine(run: RunContext, engine: EngineReplica) -> EngineReplica:
    """Start a successor of a dead engine, and wait until it serves or dies. Returns it."""
    began = time.monotonic()
    successor, start = engine.create_successor(run.cluster.link.start_config(run.config))
    run.cluster.generator.change(add=[successor], remove=[engine])
    run.engine_watches[successor] = run.engine_watches.pop(engine)
    await engine.process.stop(STOP_TIMEOUT_S)  # also frees the place of an actor
    await start_engine(run, successor, start)
    if not successor.process.dead:
        now, took = run.events.now(), time.monotonic() - began
        line = f"{successor.process.name} was restarted and serves again after {took:.1f} s"
        run.events.add("recovery", successor.track, now - took, now, what=line)
        run.totals.engine_restarts += 1
        run.progress.warn(line)
    return successor


async def start_engine(run: RunContext, engine: EngineReplica, start: Start) -> None:
    """Start an engine, and wait until it serves. An engine that does not is terminated."""
    try:
        async with run.cluster.engine_start():  # a sleeping engine could not join
            await start()
            engine.started = True
            await run.cluster.link.join(engine)
        if not engine.serving.is_set():
            await publish_to_new_engines(run)
        await wait_first(engine.serving.wait(), engine.process.ended.wait())
    except (WorkerDied, WorkerError, ConfigError, OSError) as error:
        engine.terminate(f"{engine.process.name} did not start: {error}")
    engines_changed(run)


def engines_changed(run: RunContext) -> None:
    """Tell the loop that the number of engines has changed, or that none will serve any more.

    The limit of concurrent episodes grows with the number.
    """
    run.episode_slots.grow(episode_slots(run.config, run.cluster.generator.max_num_seqs).count)
    run.changed.set()


def report_death(run: RunContext, engine: EngineReplica, died: WorkerDied, consequence: str) -> None:
    """Record and show why an engine died, with the end of its log."""
    pool = run.cluster.generator
    first, _, log = str(died).partition("\n")
    left = f"{len(pool.alive)} of {len(pool.generators)} generators are left{consequence}"
    line = f"{describe_death(died)}; {left}"
    run.events.add("fault", engine.track, what=line)
    run.totals.engines_lost.append(line)
    run.progress.warn(f"{first}; {left}\n{log}".rstrip())
    engines_changed(run)


async def wait_dead(engine: EngineReplica) -> WorkerDied:
    """Wait until the engine is dead. Returns why. A publish that restarts engines gives them other processes."""
    while True:
        process = engine.process
        await process.ended.wait()
        if engine.process is process:
            assert process.dead
            return process.dead
