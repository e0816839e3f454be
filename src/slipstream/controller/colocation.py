"""Placement `colocated`: engines and trainer alternate on the same GPUs; ARCHITECTURE.md has the order of events.

Requests wait in the pool while engines sleep, and the clocks of episodes are paused (`generators.pausable_clock`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from slipstream.generators.pool import GeneratorPool
from slipstream.trainers.base import TrainerWorker

KEEP, DISCARD = 1, 2  # vLLM's sleep levels: keep the weights in host memory, or discard them


class ColocatedScheduler:
    """Switches the GPUs between engines and trainer. Engines have them first."""

    def __init__(self, trainer: TrainerWorker, pool: GeneratorPool) -> None:
        self._trainer, self._pool = trainer, pool
        self._handed_over = True

    @asynccontextmanager
    async def trainer_turn(self, publishes: bool) -> AsyncIterator[None]:
        """Context in which the trainer has the GPUs. If it `publishes`, engines discard their weights.

        After an error the GPUs stay with the trainer, because the run ends.
        """
        self._pool.pause()
        await self._pool.call_all(lambda engine: engine.sleep(DISCARD if publishes else KEEP), "sleep")
        await self._trainer.onload()
        self._handed_over = False
        yield
        if self._handed_over:
            await self._wake("kv_cache")
        else:
            await self._trainer.offload()
            await self._wake("weights", "kv_cache")
        self._handed_over = True
        self._pool.resume()

    async def hand_over(self) -> None:
        """Within `trainer_turn`, offload the trainer and wake the engines' weights, so that engines take a version."""
        if not self._handed_over:
            await self._trainer.offload()
            await self._wake("weights")
            self._handed_over = True

    async def _wake(self, *tags: str) -> None:
        await self._pool.call_all(lambda engine: engine.wake(tags), "wake")
