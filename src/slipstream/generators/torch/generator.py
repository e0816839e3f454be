"""The embedded engine in the caller's process, as a `Generator`.

Used by `slipstream eval` and `slipstream generate`; in a run, `GeneratorWorker` steps the engine.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Hashable, Sequence

from slipstream.generators.base import EngineFailed, finish_request
from slipstream.generators.pausable_clock import Clock, EngineSlots
from slipstream.generators.torch.engine import Engine
from slipstream.rollout import Completion, Sampling


class TorchGenerator:
    """Steps an engine, one step per iteration of the event loop."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._slots = EngineSlots(engine.slots)
        self._requests: dict[Hashable, asyncio.Future[Completion]] = {}
        self._stepping: asyncio.Task[None] | None = None
        self._keys = itertools.count()

    @property
    def version(self) -> int:
        return self.engine.version

    def session(self) -> TorchSession:
        """A `TorchSession` for the requests of one episode."""
        return TorchSession(self)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, clock: Clock | None = None) -> Completion:
        """As `Generator.generate`. The episode's `clock` is stopped while the request is queued for a slot.

        Raises `EngineFailed` if a step of the engine fails.
        """
        key = next(self._keys)
        self.engine.submit(key, prompt_ids, sampling)
        future = self._requests[key] = asyncio.get_running_loop().create_future()
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step())
        try:
            with self._slots.request(clock or Clock()):
                completion: Completion = await future
            return completion
        finally:
            self._requests.pop(key, None)
            self.engine.abort(key)

    async def close(self) -> None:
        if self._stepping is not None:
            self._stepping.cancel()

    async def _step(self) -> None:
        await asyncio.sleep(0)  # so that all callers of this iteration of the event loop submit first
        while self.engine.busy:
            try:
                finished = self.engine.step()
            except Exception as error:  # fail the pending requests: no further step will finish them
                for future in self._requests.values():
                    if not future.done():
                        future.set_exception(EngineFailed(f"the engine failed: {error}"))
                return
            for key, outcome in finished:
                if key in self._requests:
                    finish_request(self._requests[key], outcome)
            await asyncio.sleep(0)


class TorchSession:
    """A `TorchGenerator` for one episode, with the episode's clock."""

    def __init__(self, generator: TorchGenerator) -> None:
        self.clock = Clock()
        self._generator = generator

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """As `Generator.generate`."""
        return await self._generator.generate(prompt_ids, sampling, self.clock)
