"""Publishes by links that allow `late_receivers`: each engine has a task that brings it to the newest version.

A publish ends without the engines that take much longer than the first one. Such a late engine serves the version that
it has while `loop.max_lag` permits it, then gets no new requests until its task has brought it to a newer version.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import Any

from slipstream.controller.engine_calls import NotServed, Pause, find_difference, prepare_version, swap_version
from slipstream.controller.weight_publisher import CALL_TIMEOUT_S, WeightPublisher
from slipstream.generators.pool import EngineReplica
from slipstream.runtime.event_loop import throttle
from slipstream.runtime.worker import WorkerDied, succeeded
from slipstream.sync.checksum import chosen
from slipstream.sync.link import PublishHandle

PATIENCE = 2.0  # times the duration of the first engine, for which a publish waits for engines that were not late
MIN_PATIENCE_S = 1.0
SLOWEST = 10.0  # times the duration of the slowest regular transfer: the time limit of a transfer
TRAINER_POLL_S = 1.0  # interval at which a publish that waits for engines checks whether the trainer is alive
RETRY_S = 0.5  # after which an engine tries the same version again


@dataclass(frozen=True, eq=False)
class _Staged:
    """A version: its handle, the duration of the send, and the trainer's checksums of the parameters to compare."""

    handle: PublishHandle
    sent: asyncio.Future[float]
    names: list[str]
    sums: asyncio.Future[dict[str, int]]

    @property
    def trainer_failed(self) -> bool:
        return any(call.done() and not succeeded(call) for call in (self.sent, self.sums))


class StaggeredPublisher(WeightPublisher):
    """A `WeightPublisher` that leaves slow engines behind; with `max_lag` 0 it waits for all that serve."""

    def __init__(self, *arguments: Any, max_lag: int) -> None:
        super().__init__(*arguments)
        self._max_lag = max_lag
        self._newest: _Staged | None = None
        self._updates: dict[EngineReplica, asyncio.Task[None]] = {}  # of engines without the newest version
        self._pauses: list[Pause] = []  # since the end of the last publish

    async def join(self, generator: EngineReplica) -> None:
        """Begin to bring a started engine to the newest version, or let the first publish do so."""
        if self._newest:
            self._members.append(generator)
            self._late.add(generator)
            self._begin_update(generator)
        else:
            await super().join(generator)

    async def leave(self, generator: EngineReplica) -> None:
        """Remove an engine from all publishes, also from the current one, and end its update."""
        for engines in (self._members, self._joining):
            engines[:] = [g for g in engines if g is not generator]
        if update := self._updates.pop(generator, None):
            update.cancel()

    async def close(self) -> None:
        """End all updates."""
        for generator in list(self._updates):
            self._updates.pop(generator).cancel()

    async def _publish_version(
        self, version: int, verify: str, free: asyncio.Event
    ) -> tuple[list[Pause], float, float]:
        """Publish to all members, and wait for members that are not late. Returns as `_try_publish`."""
        self._remove_members([g for g in self._members if g.process.dead])
        self._members += self._joining
        self._joining = []
        names = chosen(self._names, version, verify)
        self._published = await self._trainer.stage(version)
        sent, sums = self._begin_send(self._published, names, free)
        self._newest = staged = _Staged(self._published, sent, names, sums)
        if self._max_lag:
            self._pool.oldest = version - self._max_lag
        for generator in self._members:
            self._begin_update(generator)
        current = await self._wait_for_engines(staged)
        if self._process.dead:
            raise self._process.dead
        sending, _ = await asyncio.gather(staged.sent, staged.sums)
        if not current:
            raise self._pool.dead or WorkerDied(f"no engine received version {version}")
        self._late = set(self._updates)
        pauses, self._pauses = self._pauses, []
        self._release(staged.handle)
        return pauses, sending, self._pool.now()

    async def _wait_for_engines(self, staged: _Staged) -> list[EngineReplica]:
        """Wait for all engines that were not late, or for the first late one if these fail.

        Engines that joined since the last publish count as late, unless they serve and `max_lag` is 0. With `max_lag`,
        except in the first publish: once one engine has the version, the others get `PATIENCE` times its duration
        more. Returns the engines with the version. Returns early if the trainer fails or dies.
        """
        clock, limit = asyncio.get_running_loop().time, math.inf
        began = clock()
        while True:
            current = [g for g in self._members if g not in self._updates]
            if current and self._max_lag and self._connected:
                limit = min(limit, clock() + max(MIN_PATIENCE_S, PATIENCE * (clock() - began)))
            waiting = [update for g, update in self._updates.items() if not current or not self._may_be_late(g)]
            if not waiting or clock() >= limit or staged.trainer_failed or self._process.dead:
                return current
            timeout = min(limit - clock(), TRAINER_POLL_S)  # it may die after its calls, while engines receive
            calls = [call for call in (staged.sent, staged.sums) if not call.done()]
            await asyncio.wait([*waiting, *calls], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)

    def _may_be_late(self, generator: EngineReplica) -> bool:
        return generator in self._late and (self._max_lag > 0 or not generator.serving.is_set())

    def _begin_update(self, generator: EngineReplica) -> None:
        if generator not in self._updates:
            self._updates[generator] = asyncio.create_task(self._update(generator))

    async def _update(self, generator: EngineReplica) -> None:
        """Bring an engine to the newest version, also if a newer one is published meanwhile. Removes it if it fails."""
        clock, reached, deadline = asyncio.get_running_loop().time, None, 0.0
        try:
            while (newest := self._newest) and newest is not reached:
                deadline = deadline or clock() + CALL_TIMEOUT_S + SLOWEST * self._travel
                try:
                    await self._bring(generator, newest, deadline)
                    reached, deadline = newest, 0.0
                except NotServed:
                    if clock() > deadline or newest.trainer_failed:
                        raise
                    if newest is self._newest:
                        await asyncio.sleep(RETRY_S)
        except Exception as error:
            if not (self._process.dead or (newest and newest.trainer_failed)):
                self._failed[generator] = error
                self._lose(generator)
        finally:
            self._updates.pop(generator, None)

    async def _bring(self, generator: EngineReplica, staged: _Staged, deadline: float) -> None:
        """Bring one engine to a version, and compare checksums before its completions are returned.

        Raises `NotServed` if it serves the version before, and `PublishError` if checksums differ.
        """
        await throttle()  # of hundreds of engines only a few begin in one iteration of the event loop
        clock, version = asyncio.get_running_loop().time, staged.handle["version"]
        if generator not in self._joined:
            await self._connect([generator])[0]
            self._joined.append(generator)
        receiving = prepare_version(generator, staged.handle)
        await generator.wait_for(receiving, f"receive version {version}", deadline - clock())
        swapping = swap_version(generator, version, self._sync.in_flight)
        self._pauses.append(
            await generator.wait_for(swapping, f"swap in version {version}", CALL_TIMEOUT_S + self._drain)
        )
        if staged.names:
            names = staged.names if generator.serving.is_set() else self._names  # all of a new engine
            call = generator.worker.checksums(names)
            served = await generator.wait_for(call, f"return the checksums of version {version}", CALL_TIMEOUT_S)
            _, sums = await asyncio.shield(asyncio.gather(staged.sent, staged.sums))
            published = {name: int(value) for name, value in staged.handle["sums"].items()} | sums
            if error := find_difference(generator, served, published, version):
                raise error
        generator.release()
        if generator.serving.is_set() or staged is self._newest:
            self._pool.serve(generator)
