"""Publishes by links whose receivers are independent: each engine swaps when it has the version, and none waits long.

An engine that takes much longer than the first one is left behind: it serves its old version, receives in the
background, and takes part in the next publish after that. So a slow network of one host does not hold up the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from slipstream.controller.publish_calls import PublishError, differing
from slipstream.controller.weight_publisher import CALL_TIMEOUT_S, Pause, WeightPublisher
from slipstream.generators.pool import EngineReplica
from slipstream.runtime.worker import WorkerDied, WorkerError, succeeded
from slipstream.sync.changes import RolledBack
from slipstream.sync.frames import Superseded
from slipstream.sync.link import PublishHandle

PATIENCE = 2.0  # times the duration of the first engine, for which a publish waits for the others
MIN_PATIENCE_S = 1.0
WHOLE = RolledBack.__name__, Superseded.__name__  # errors of engines that still serve a whole version


class StaggeredPublisher(WeightPublisher):
    """A `WeightPublisher` for links with `late_receivers`, in runs in which engines may lag."""

    async def leave(self, generator: EngineReplica) -> None:
        await super().leave(generator)
        if late := self._late.pop(generator, None):
            late.cancel()

    async def close(self) -> None:
        for late in self._late.values():
            late.cancel()

    async def _publish_version(
        self, version: int, verify: str, free: asyncio.Event
    ) -> tuple[list[Pause], float, float]:
        self._failed = {}
        for generator in [g for g, late in self._late.items() if late.done()]:
            self._members.append(generator)
            self._judge(generator, self._late.pop(generator))
        self._remove_members(self._failed)
        return await super()._publish_version(version, verify, free)

    async def _exchange(
        self, publish_handle: PublishHandle, sent: asyncio.Future[float], names: list[str],
        wanted: Awaitable[dict[str, int]] | None, version: int, free: asyncio.Event,
    ) -> tuple[list[Pause], float, float]:  # fmt: skip
        """Bring each member to the version, and stop waiting for those that take much longer than the first."""
        began, published = self._pool.now(), asyncio.ensure_future(wanted) if wanted else None
        tasks = {
            g: asyncio.ensure_future(self._bring(g, publish_handle, names, published, version)) for g in self._members
        }
        for task in tasks.values():
            task.add_done_callback(succeeded)  # judged below, or at the next publish
        try:
            sending = await sent
            waiting, limit = set(tasks.values()), None
            while waiting:
                done, waiting = await asyncio.wait(waiting, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    break
                if any(map(succeeded, done)) and self._connected:
                    patience = max(MIN_PATIENCE_S, PATIENCE * (self._pool.now() - began))
                    limit = limit or patience
        except BaseException:
            for task in tasks.values():
                task.cancel()
            raise
        self._failed, pauses = {}, []
        for generator, task in tasks.items():
            if not task.done():
                self._late[generator] = task
                self._members.remove(generator)
            elif pause := self._judge(generator, task):
                pauses.append(pause)
        if not pauses:
            raise next(iter(tasks.values())).exception() or PublishError(f"no engine received version {version}")
        self._remove_members(self._failed)
        return pauses, sending, max(ended for _, _, ended in pauses)

    async def _commit(self, names: list[str], wanted: Awaitable[dict[str, int]] | None, version: int) -> None:
        """Do nothing: `_bring` has compared the checksums of each engine."""

    def _judge(self, generator: EngineReplica, task: asyncio.Future[Pause]) -> Pause | None:
        """The pause of an engine that has finished. Records its failure unless it still serves a whole version."""
        error = task.exception()
        if error is None:
            return task.result()
        if isinstance(error, WorkerError) and error.kind in WHOLE:
            generator.release()
        elif isinstance(error, WorkerError | WorkerDied | PublishError):
            self._failed[generator] = error
        else:
            raise error
        return None

    async def _bring(
        self, generator: EngineReplica, publish_handle: PublishHandle, names: list[str],
        published: asyncio.Future[dict[str, int]] | None, version: int,
    ) -> Pause:  # fmt: skip
        """Bring one engine to the version, and compare its checksums before its completions are used."""
        limit = CALL_TIMEOUT_S + self._travel
        await generator.wait_for(generator.worker.prepare(publish_handle), f"receive version {version}", limit)
        pause = await generator.wait_for(
            self._swap(generator, version), f"swap in version {version}", limit + self._drain
        )
        if published:
            call = generator.worker.checksums(names)
            served = await generator.wait_for(call, f"return the checksums of version {version}", limit)
            if error := differing(generator, names, served, await asyncio.shield(published), version):
                raise error
        generator.release()
        self._pool.serve(generator)
        return pause
