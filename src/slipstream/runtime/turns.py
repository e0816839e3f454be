"""Placement `colocated`: generators and the trainer use the same GPUs, one side at a time.

    generators draw until a batch is there
    sleep            generators   sequences in flight are finished, or kept to be computed again; memory is freed
    load             trainer      parameters and optimizer state come back from the host's memory
    step             trainer      as often as a turn has steps
    stage            trainer      the new version lies in the host's memory
    offload          trainer      its memory is freed
    wake weights     generators   there is room for them
    prepare, swap    generators   the new version is in place
    wake kv_cache    generators   they go on drawing

Nobody is asked to compute while it sleeps: requests wait in the pool, and a process that is asked all the same refuses.
The clocks of episodes stand still meanwhile (`generators.clock`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from slipstream.actor import Actor
from slipstream.runtime.pool import GeneratorPool
from slipstream.runtime.ranks import Ranks

KEEP, DISCARD = 1, 2  # what becomes of an engine's weights: vLLM's levels of sleep


class Turns:
    """Whose turn it is: at first the generators'."""

    def __init__(self, trainer: Actor | Ranks, pool: GeneratorPool) -> None:
        self._trainer, self._pool = trainer, pool
        self._handed_over = True

    @asynccontextmanager
    async def of_the_trainer(self, publishes: bool) -> AsyncIterator[None]:
        """The trainer's turn. If it `publishes`, engines need not keep the weights that they have.

        A turn that fails stays where it is: the run is over.
        """
        self._pool.hold()
        await self._pool.ask("sleep", DISCARD if publishes else KEEP)
        await self._trainer.call("load")
        self._handed_over = False
        yield
        if self._handed_over:
            await self._pool.ask("wake", ["kv_cache"])
        else:
            await self._trainer.call("offload")
            await self._pool.ask("wake", ["weights", "kv_cache"])
        self._handed_over = True
        self._pool.resume()

    async def hand_over(self) -> None:
        """Within the trainer's turn: it is done with the GPU, and weights may come."""
        if not self._handed_over:
            await self._trainer.call("offload")
            await self._pool.ask("wake", ["weights"])
            self._handed_over = True
