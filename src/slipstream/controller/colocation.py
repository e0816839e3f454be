"""Placement `colocated`: engines and trainer alternate on the same GPUs, whose memory each side frees for the other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager

from slipstream.controller.engine_calls import Pause, duration
from slipstream.generators.base import KV_CACHE, SCHEDULING, WEIGHTS
from slipstream.generators.pool import GeneratorPool
from slipstream.trainers.base import TrainerWorker

PAUSE, KEEP, DISCARD = 0, 1, 2  # vLLM's sleep levels: stop sampling; keep the weights in host memory; discard them
PARTS = "sleep", "onload", "wake_weights", "offload", "wake"  # of a turn, in the order of a publish


class ColocatedScheduler:
    """Placement `colocated`: engines and trainer alternate on the same GPUs, engines first. See ARCHITECTURE.md.

    Requests wait in the pool while engines sleep, and the clocks of episodes are paused (`generators.pausable_clock`).
    Once the trainer reports that the GPUs hold a step and the engines together, engines keep sampling in its turns, and
    pause only to receive weights. `seconds` has the durations of the last turn and its parts, by name.
    """

    def __init__(self, trainer: TrainerWorker, pool: GeneratorPool) -> None:
        self._trainer, self._pool = trainer, pool
        self._asleep: tuple[str, ...] = ()  # tags of what sleeping engines lack; empty while they are awake
        self._stopped = 0.0  # when they last stopped sampling, on the pool's clock
        self._fits = False  # whether the GPUs hold a step and the engines together
        self.seconds: dict[str, float] = {}

    @asynccontextmanager
    async def trainer_turn(self, publishes: bool) -> AsyncIterator[None]:
        """Context in which the trainer may compute. Engines sleep, unless the GPUs hold both a step and the engines.

        If they sleep, the trainer's state is moved to the GPUs before the block, and off them after it. Sleeping
        engines discard their weights if the trainer `publishes`, and else keep them in host memory. After an
        error the engines are not woken, because the run ends.
        """
        self.seconds, began = dict.fromkeys(PARTS, 0.0), time.perf_counter()
        if not self._fits:
            await self._sleep(DISCARD if publishes else KEEP)
            await self._timed("onload", self._trainer.onload())
        yield
        if not self._fits:
            offloading = asyncio.ensure_future(self._trainer.offload())
            await self._timed("offload", offloading)
            self._fits = bool(offloading.result())
        if self._asleep:
            await self._timed("wake", self._wake(self._asleep))
            self._asleep = ()
            self._pool.resume()
        self.seconds["turn"] = time.perf_counter() - began

    async def before_publish(self, in_place: bool) -> None:
        """Called within `trainer_turn`: prepare the engines to receive weights.

        Sleeping engines allocate their weights. Engines that are awake pause until the end of the turn if they receive
        versions `in_place`.
        """
        if WEIGHTS in self._asleep:
            await self._timed("wake_weights", self._wake((WEIGHTS,)))
            self._asleep = (KV_CACHE,)
        elif in_place and not self._asleep:
            await self._sleep(PAUSE)

    def pauses_from_sleep(self, pauses: Sequence[Pause]) -> list[Pause]:
        """Pauses of the publish in this turn, from the time at which the engines stopped sampling, if they did.

        They end at the swap, before the wake-up.
        """
        return [(track, min(start, self._stopped) if self._asleep else start, end) for track, start, end in pauses]

    async def _sleep(self, level: int) -> None:
        self._pool.pause()
        self._stopped = self._pool.now()
        await self._timed("sleep", self._pool.call_all(lambda engine: engine.sleep(level), "sleep"))
        self._asleep = (SCHEDULING,) if level == PAUSE else (WEIGHTS, KV_CACHE)

    async def _wake(self, tags: tuple[str, ...]) -> None:
        await self._pool.call_all(lambda engine: engine.wake(tags), "wake")

    async def _timed(self, part: str, call: Awaitable[object]) -> None:
        self.seconds[part] = await duration(call)
