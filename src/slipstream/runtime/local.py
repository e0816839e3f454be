"""Generators, a trainer and their weight link as processes of this host."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from slipstream.actor import Actor, ActorError
from slipstream.closing import close_at_once, closing
from slipstream.config import Config, ConfigError
from slipstream.rollout import Batch, Completion, StepStats
from slipstream.runtime.placement import GpuLocks, Placement, gpus_here, place, ranks_here, settled, visible
from slipstream.runtime.pool import GeneratorPool, ProcessGenerator
from slipstream.runtime.publish import WeightLink, nothing
from slipstream.runtime.ranks import Ranks, trainer_actor
from slipstream.runtime.restart import RestartLink
from slipstream.runtime.servers import Server
from slipstream.runtime.turns import Turns

# What `generator.kind` and `trainer.kind` name; anything else is a user's own `runtime.actor.Service`.
SERVICES = {
    "torch": "slipstream.runtime.generating:GeneratorService",
    "vllm": "slipstream.runtime.vllm:VllmService",
    "pytorch": "slipstream.runtime.training:TrainerService",
}


class ProcessTrainer:
    """A trainer in a process of its own, or in several. Calls reach it in the order in which they are made."""

    def __init__(self, actor: Actor | Ranks) -> None:
        self.actor = actor

    async def step(self, batch: Batch) -> StepStats:
        stats: StepStats = await self.actor.call_large("step", batch)
        return stats

    async def score(self, completions: Sequence[Completion]) -> list[list[float]]:
        scores: list[list[float]] = await self.actor.call("score", list(completions))
        return scores

    async def save(self, path: Path, last: bool) -> None:
        """Write a checkpoint; after the `last` no step follows."""
        await self.actor.call("save", path, last)

    async def restore(self, path: Path) -> None:
        await self.actor.call("restore", path)

    async def export(self, path: Path) -> None:
        await self.actor.call("export", path)

    async def close(self) -> None:
        await self.actor.stop()


class Pools:
    """Every process of a run, started and stopped together."""

    def __init__(self, generator: GeneratorPool, trainer: ProcessTrainer, config: Config, directory: Path) -> None:
        self.generator = generator
        self.trainer = trainer
        self._turns = Turns(trainer.actor, generator) if config.sync.placement == "colocated" else None
        hand_over = self._turns.hand_over if self._turns else nothing
        self.link: WeightLink | RestartLink = (
            RestartLink(trainer.actor, generator, config, directory)
            if config.sync.restart
            else WeightLink(trainer.actor, generator, config.sync, hand_over, config.environment.time_limit)
        )

    @classmethod
    async def start(cls, config: Config, directory: Path) -> Pools:
        """Start all processes and load the model in each. Raises `ConfigError` for what they refuse.

        Those that share a GPU start one after the other, the trainer first; all others at once. Engines that take turns
        with the trainer wait until it has left the GPU.
        """
        config = settled(config)
        placement = place(config, gpus_here(), ranks_here(config.trainer.ranks))
        trainer = await trainer_actor(directory, placement, config.trainer.ranks, config.runtime.progress_timeout)
        free, locks = asyncio.Event(), GpuLocks()

        async def generators() -> GeneratorPool:
            await free.wait()
            return await start_generators(config, directory, placement, locks=locks)

        starting = asyncio.ensure_future(generators())
        try:
            kind = SERVICES.get(config.trainer.kind, config.trainer.kind)
            async with locks.hold(placement.trainer):
                if config.sync.placement != "colocated":
                    free.set()
                await _start(
                    [trainer], [trainer.start(kind, config, str(directory))], f'trainer.kind = "{config.trainer.kind}"'
                )
            if config.sync.placement == "colocated":
                await trainer.call("offload")
                free.set()
            return cls(await starting, ProcessTrainer(trainer), config, directory)
        except BaseException:
            starting.cancel()
            pool, _ = await asyncio.gather(starting, trainer.stop(grace=0.5), return_exceptions=True)
            if isinstance(pool, GeneratorPool):  # it was there before it could be called off
                await pool.close()
            raise

    def trainers_turn(self, publishes: bool) -> AbstractAsyncContextManager[None]:
        """The time in which the trainer works, and publishes or does not. Only `colocated` engines sleep for it."""
        return self._turns.of_the_trainer(publishes) if self._turns else nullcontext()

    async def close(self) -> None:
        async with closing(self.link.close):
            await close_at_once(self.generator.close, self.trainer.close)


async def start_generators(
    config: Config, directory: Path, placement: Placement, service: str = "", locks: GpuLocks | None = None
) -> GeneratorPool:
    """The generators alone, each with the model's own weights; `service` is in the place of the one that
    `generator.kind` names, and `locks` are shared with what else starts. Raises `ConfigError` for what they refuse."""
    if config.generator.servers:
        run = uuid4().hex
        servers = [Server(url, config, run) for url in config.generator.servers]
        await _start(servers, [server.start() for server in servers])
        return GeneratorPool([ProcessGenerator(server, server.ranks, slots=server.slots) for server in servers])
    kind = service or SERVICES.get(config.generator.kind, config.generator.kind)

    locks = locks or GpuLocks()

    def begin(number: int, config: Config) -> tuple[Actor, Callable[[], Coroutine[Any, Any, None]]]:
        log, gpus = directory / "logs" / f"generator_{number}.log", placement.generators[number]
        actor = Actor(f"generator {number}", log, visible(gpus), progress_timeout=config.runtime.progress_timeout)

        async def start() -> None:
            async with locks.hold(gpus):
                await actor.start(kind, config, log, placement.sharers(gpus))

        return actor, start

    begun = [begin(number, config) for number in range(len(placement.generators))]
    await _start([actor for actor, _ in begun], [start() for _, start in begun], f'generator.kind = "{kind}"')
    ranks = config.generator.tensor_parallel
    slots: int = config.generator.options.get("max_num_seqs", config.generator.slots)
    return GeneratorPool([
        ProcessGenerator(actor, ranks, partial(begin, number), slots=slots) for number, (actor, _) in enumerate(begun)
    ])  # fmt: skip


async def _start(
    actors: Sequence[Actor | Ranks | Server], starts: Sequence[Coroutine[Any, Any, None]], option: str = ""
) -> None:
    """Start all of these, whose service `option` names (for messages), or none of them."""
    starting = [asyncio.ensure_future(start) for start in starts]
    try:
        await asyncio.gather(*starting)
    except BaseException as error:
        for start in starting:  # else those that wait for a GPU would start later
            start.cancel()
        await asyncio.gather(*starting, return_exceptions=True)
        await asyncio.gather(*(actor.stop(grace=0.5) for actor in actors))
        raise _for_a_user(error, option) from None


def _for_a_user(failure: BaseException, option: str) -> BaseException:
    """What a process refused at start is the user's to mend: one line, no traceback."""
    if isinstance(failure, ActorError) and failure.kind == "LoadError":
        return ConfigError(f"{option} can't be loaded: {failure}")
    if isinstance(failure, ActorError) and failure.kind in ("ConfigError", "GenerationError", "ValueError", "OSError"):
        return ConfigError(str(failure))
    return failure
