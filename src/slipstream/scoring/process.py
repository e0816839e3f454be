"""The process of a teacher or a reward model. It is restarted when it dies; its state is in files."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from slipstream.runtime.worker import WorkerDied, WorkerError, describe_death, succeeded
from slipstream.runtime.worker_process import WorkerProcess

Result = TypeVar("Result")


class ScoringProcess:
    """Base class of a teacher and a reward model. `new` returns a process that is not started.

    `dead` is the last death, once `max_restarts` restarts are used up.
    """

    def __init__(self, new: Callable[[], WorkerProcess], max_restarts: int) -> None:
        self.process = new()
        self.dead: WorkerDied | None = None
        self.warn: Callable[[str], None] = lambda text: None
        self._new, self._max_restarts, self._restarts = new, max_restarts, 0
        self._restarting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the worker and load the model. Raises the worker's error as `WorkerError`."""
        await self._start(self.process)

    async def _start(self, process: WorkerProcess) -> None:
        raise NotImplementedError

    async def repeat(self, call: Callable[[], Awaitable[Result]]) -> Result:
        """Result of a call to the worker, which is repeated after each restart. Raises `WorkerDied` after the last."""
        while True:
            try:
                return await call()
            except WorkerDied as died:
                await self._restart(died)

    async def _restart(self, died: WorkerDied) -> None:
        """Restart the process after this death, once for all callers. Raises `dead`."""
        if self.process.dead is died and not self.dead and (not self._restarting or self._restarting.done()):
            self._restarting = asyncio.create_task(self._replace(died))
            self._restarting.add_done_callback(succeeded)
        if self._restarting:
            await asyncio.shield(self._restarting)
        if self.dead:
            raise self.dead

    async def _replace(self, died: WorkerDied) -> None:
        while self._restarts < self._max_restarts:
            self._restarts += 1
            limit = f"{self._restarts} of runtime.max_restarts = {self._max_restarts}"
            self.warn(f"{describe_death(died)}; it restarts ({limit}) and repeats the scores that were pending")
            await self.process.stop()
            process = self._new()
            try:
                await self._start(process)
            except (WorkerDied, WorkerError) as error:
                await process.stop()
                died = (
                    error if isinstance(error, WorkerDied) else WorkerDied(f"{process.name} did not restart: {error}")
                )
            except BaseException:
                await process.stop(grace=0.5)
                raise
            else:
                self.process = process
                return
        self.dead = died

    async def close(self) -> None:
        if self._restarting:
            self._restarting.cancel()
            await asyncio.wait((self._restarting,))
        await self.process.stop()
