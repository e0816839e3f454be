"""Placement `colocated`: engines and trainer alternate on the same GPUs, whose memory each side frees for the other."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager

from slipstream.controller.engine_calls import duration
from slipstream.generators.pool import GeneratorPool
from slipstream.trainers.base import TrainerWorker

KEEP, DISCARD = 1, 2  # vLLM's sleep levels: keep the weights in host memory, or discard them
WEIGHTS, KV_CACHE = "weights", "kv_cache"  # vLLM's tags of the memory that `wake` allocates


class ColocatedScheduler:
    """Placement `colocated`: engines and trainer alternate on the same GPUs, engines first. See ARCHITECTURE.md.

    Requests wait in the pool while engines sleep, and the clocks of episodes are paused (`generators.pausable_clock`).
    `seconds` has the durations of the last turn and its parts, by name.
    """

    def __init__(self, trainer: TrainerWorker, pool: GeneratorPool) -> None:
        self._trainer, self._pool = trainer, pool
        self._asleep: tuple[str, ...] = ()  # tags of the engines' memory that is free
        self.seconds: dict[str, float] = {}

    @asynccontextmanager
    async def trainer_turn(self, publishes: bool) -> AsyncIterator[None]:
        """Context in which the trainer has the GPUs. If it `publishes`, engines discard their weights.

        After an error the GPUs stay with the trainer, because the run ends.
        """
        self.seconds, began = {}, time.perf_counter()
        self._pool.pause()
        await self._timed(
            "sleep", self._pool.call_all(lambda engine: engine.sleep(DISCARD if publishes else KEEP), "sleep")
        )
        self._asleep = WEIGHTS, KV_CACHE
        await self._timed("onload", self._trainer.onload())
        yield
        await self._timed("offload", self._trainer.offload())
        await self._timed("wake", self._wake(self._asleep))
        self._asleep = ()
        self._pool.resume()
        self.seconds["turn"] = time.perf_counter() - began

    async def wake_weights(self) -> None:
        """Within `trainer_turn`, let engines allocate their weights, to take a version from a trainer on their GPUs."""
        if WEIGHTS in self._asleep:
            await self._timed("wake_weights", self._wake((WEIGHTS,)))
            self._asleep = (KV_CACHE,)

    async def _wake(self, tags: tuple[str, ...]) -> None:
        await self._pool.call_all(lambda engine: engine.wake(tags), "wake")

    async def _timed(self, part: str, call: Awaitable[object]) -> None:
        self.seconds[part] = await duration(call)
