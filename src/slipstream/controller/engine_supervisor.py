"""Replaces engines that die, and adds or removes engines of a running run, while the other engines continue.

A new engine joins the pool once a publish has brought it to the current version with equal checksums.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from slipstream.config.schema import Config, ConfigError
from slipstream.controller.engine_restart import RestartPublisher
from slipstream.controller.weight_publisher import WeightPublisher
from slipstream.generators.pool import STOP_TIMEOUT_S, EngineReplica, GeneratorPool, Start
from slipstream.runtime.process import NOT_PLACED
from slipstream.runtime.runtime import current_runtime
from slipstream.runtime.worker import WorkerDied, WorkerError

STABLE_S = 600.0  # of service after which earlier restarts of an engine count no more
BACKOFF_S = 0.5  # before a restart, doubled with each further one until an engine serves for `MAX_BACKOFF_S`
MAX_BACKOFF_S = 60.0
LEAVE_TIMEOUT_S = 60.0  # in which an engine that leaves may finish its requests; others sample the rest again
LEAVE_POLL_S = 0.05


@dataclass(frozen=True)
class EngineEvents:
    """Callbacks by which the supervisor reports events to the run, and asks it to publish."""

    lost: Callable[[str, str, str], None]
    """An engine has died: its track, a line that says why, and the end of its log."""
    restarted: Callable[[str, str, float], None]
    """A successor serves: its track, a line that says so, and the seconds since the death."""
    serving: Callable[[str], None]
    """An engine was added or has left: a line that says so."""
    changed: Callable[[], None]
    """The number of engines that serve has changed, or no engine will serve any more."""
    publish: Callable[[], Awaitable[None]]
    """Bring engines that wait to join to the current version, unless the next publish does so soon."""


class EngineSupervisor:
    """Keeps as many engines in the pool as the run wants. `exclusive` is the context of a start."""

    def __init__(
        self,
        pool: GeneratorPool,
        link: Callable[[], WeightPublisher | RestartPublisher],
        config: Config,
        events: EngineEvents,
        exclusive: Callable[[], AbstractAsyncContextManager[object]],
    ) -> None:
        self._pool, self._link, self._config, self._events, self._exclusive = pool, link, config, events, exclusive
        self._restarts = 0 if config.sync.link == "single_copy" else config.generator.max_restarts
        self._scaling = asyncio.Lock()
        pool.supervised = True
        self._watching = {engine: asyncio.create_task(self._watch(engine)) for engine in pool.generators}

    @property
    def lost(self) -> int:
        """Engines that died and are not restarted any more."""
        return sum(engine not in self._watching for engine in self._pool.generators if not engine.leaving)

    async def close(self) -> None:
        """End all watches and starts."""
        for task in self._watching.values():
            task.cancel()
        await asyncio.gather(*self._watching.values(), return_exceptions=True)

    async def scale(self, engines: int) -> None:
        """Start or end engines until there are `engines`. Dead engines without restarts left are started again, too.

        Returns once surplus engines have ended. Others start in the background.
        """
        async with self._scaling:
            await asyncio.gather(*map(self._leave, self._pool.generators[engines:]))
            for engine in self._pool.generators:
                if engine not in self._watching:
                    self._watching[engine] = asyncio.create_task(self._watch(engine))
            for number in range(len(self._pool.generators), engines):
                assert self._pool.begin
                engine, start = self._pool.begin(number, self._link().start_config(self._config))
                self._pool.change(add=[engine])
                self._watching[engine] = asyncio.create_task(self._watch(engine, start))
            self._events.changed()

    async def _leave(self, engine: EngineReplica) -> None:
        """Let an engine finish its requests, and end it. Others sample again what it does not finish in time."""
        engine.leaving = True
        watching = self._watching.pop(engine, None)
        if watching and not engine.started:
            watching.cancel()
        last = time.monotonic() + LEAVE_TIMEOUT_S
        while engine.pending_requests and not engine.process.dead and time.monotonic() < last:
            await asyncio.sleep(LEAVE_POLL_S)
        await self._link().leave(engine)
        await engine.process.stop(STOP_TIMEOUT_S)
        self._pool.change(remove=[engine])
        current_runtime().release(engine.process.name)
        self._events.serving(f"{engine.process.name} has left the pool")

    async def _watch(self, engine: EngineReplica, start: Start | None = None) -> None:
        """Start the engine if `start` is given, and replace it each time it dies, until no restarts are left."""
        try:
            await self._keep(engine, start)
        except Exception as error:
            name = engine.process.name
            self._fail(WorkerDied(f"{name} can't be replaced any more: {type(error).__name__}: {error}"))
            raise

    async def _keep(self, engine: EngineReplica, start: Start | None) -> None:
        tries = delays = 0
        if start:
            await self._start(engine, start)
            if engine.alive:
                self._events.serving(f"{engine.process.name} was added to the pool and serves")
        while True:
            since = time.monotonic()
            died = await _death(engine)
            if engine.leaving:
                return
            pending = NOT_PLACED in str(died) and self._pool.alive
            served = time.monotonic() - since if engine.serving.is_set() else 0.0
            tries = 0 if pending or served >= STABLE_S else tries
            delays = 0 if pending or served >= MAX_BACKOFF_S else delays
            again = engine.replaceable and tries < self._restarts
            self._report_death(engine, died, tries if again else None)
            if not again:
                self._give_up(engine, died)
                return
            await asyncio.sleep(min(MAX_BACKOFF_S, BACKOFF_S * 2**delays))
            tries, delays = tries + 1, delays + 1
            if engine.process.dead and not engine.leaving:  # else a publish has restarted it
                engine = await self._replace(engine)

    async def _replace(self, engine: EngineReplica) -> EngineReplica:
        """Start a successor of a dead engine, and wait until it serves or dies. Returns it."""
        began = time.monotonic()
        successor, start = engine.successor(self._link().start_config(self._config))
        self._pool.change(add=[successor], remove=[engine])
        self._watching[successor] = self._watching.pop(engine)
        await engine.process.stop(STOP_TIMEOUT_S)  # also frees the place of an actor
        await self._start(successor, start)
        if not successor.process.dead:
            took = time.monotonic() - began
            line = f"{successor.process.name} was restarted and serves again after {took:.1f} s"
            self._events.restarted(successor.track, line, took)
        return successor

    async def _start(self, engine: EngineReplica, start: Start) -> None:
        """Start an engine, and wait until it serves. An engine that does not is terminated."""
        try:
            async with self._exclusive():
                await start()
            engine.started = True
            await self._link().join(engine)
            if not engine.serving.is_set():
                await self._events.publish()
            await _first(engine.serving.wait(), engine.process.ended.wait())
        except (WorkerDied, WorkerError, ConfigError, OSError) as error:
            engine.terminate(f"{engine.process.name} did not start: {error}")
        self._events.changed()

    def _report_death(self, engine: EngineReplica, died: WorkerDied, tries: int | None) -> None:
        first, _, log = str(died).partition("\n")
        left = f"{len(self._pool.alive)} of {len(self._pool.generators)} generators are left"
        again = "" if tries is None else f"; it is restarted (try {tries + 1} of {self._restarts})"
        self._events.lost(engine.track, f"{first}; {left}{again}", log)
        self._events.changed()

    def _give_up(self, engine: EngineReplica, died: WorkerDied) -> None:
        """End the run if fewer engines remain than it needs."""
        del self._watching[engine]
        if len(self._watching) < self._config.generator.min_replicas:
            self._fail(died)

    def _fail(self, died: WorkerDied) -> None:
        self._pool.fail(died)
        self._events.changed()


async def _death(engine: EngineReplica) -> WorkerDied:
    """Wait until the engine is dead. Returns why. A publish that restarts engines gives them other processes."""
    while True:
        process = engine.process
        await process.ended.wait()
        if engine.process is process:
            assert process.dead
            return process.dead


async def _first(*waits: Awaitable[object]) -> None:
    """Wait until one of these is done."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
