"""Generators, a trainer and their weight link as processes of this host."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.actor import Actor, ActorError
from slipstream.config import Config, ConfigError
from slipstream.generators.base import GenerationError
from slipstream.rollout import Batch, Completion, Sampling
from slipstream.sync.link import PublishStats
from slipstream.trainers.trainer import StepStats

# What `generator.kind` and `trainer.kind` name; anything else is a user's own `runtime.actor.Service`.
SERVICES = {
    "torch": "slipstream.runtime.services:GeneratorService",
    "pytorch": "slipstream.runtime.services:TrainerService",
}


class ProcessGenerator:
    """An embedded engine in a process of its own, as a `Generator`."""

    def __init__(self, actor: Actor) -> None:
        self.actor = actor
        self.outstanding = 0
        self._keys = itertools.count()
        self.version = 0
        self.totals: dict[str, float] = {}

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        self.outstanding += 1
        key = next(self._keys)
        try:
            completion: Completion = await self.actor.call("generate", key, tuple(prompt_ids), sampling)
        except asyncio.CancelledError:
            self.actor.post("abort", key)
            raise
        except ActorError as error:
            raise (GenerationError(str(error)) if error.kind == "GenerationError" else error) from None
        finally:
            self.outstanding -= 1
        return completion

    async def stats(self) -> dict[str, float]:
        """Tokens generated and seconds busy since the start."""
        self.totals = await self.actor.call("stats")
        return self.totals

    async def close(self) -> None:
        await self.actor.stop()


class GeneratorPool:
    """Several generators as one: each request goes to the one with the fewest outstanding."""

    def __init__(self, generators: Sequence[ProcessGenerator]) -> None:
        self.generators = generators

    @property
    def version(self) -> int:
        return min(g.version for g in self.generators)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        return await min(self.generators, key=lambda g: g.outstanding).generate(prompt_ids, sampling)

    async def stats(self) -> dict[str, float]:
        """Tokens of all generators, and seconds busy of the average one."""
        await asyncio.gather(*(g.stats() for g in self.generators))
        return self.totals

    @property
    def totals(self) -> dict[str, float]:
        """The same as of the last publish or call of `stats`."""
        totals = [g.totals for g in self.generators]
        return {"tokens": sum(t["tokens"] for t in totals), "busy": sum(t["busy"] for t in totals) / len(totals)}

    async def close(self) -> None:
        await asyncio.gather(*(g.close() for g in self.generators))


class ProcessTrainer:
    """A trainer in a process of its own."""

    def __init__(self, actor: Actor) -> None:
        self.actor = actor

    async def step(self, batch: Batch) -> StepStats:
        stats: StepStats = await self.actor.call("step", batch)
        return stats

    async def score(self, completions: Sequence[Completion]) -> list[list[float]]:
        scores: list[list[float]] = await self.actor.call("score", list(completions))
        return scores

    async def save(self, path: Path) -> None:
        await self.actor.call("save", path)

    async def restore(self, path: Path) -> None:
        await self.actor.call("restore", path)

    async def export(self, path: Path) -> None:
        await self.actor.call("export", path)

    async def close(self) -> None:
        await self.actor.stop()


class WeightLink:
    """The controller's view of a link: it carries tickets from one end to the other, and commits a version."""

    def __init__(self, trainer: ProcessTrainer, generators: Sequence[ProcessGenerator]) -> None:
        self._trainer, self._generators = trainer, generators
        self._released: asyncio.Future[None] | None = None

    async def connect(self, version: int) -> None:
        """Connect both ends; afterwards every generator serves the trainer's weights as `version`."""
        offer = await self._trainer.actor.call("open_link")
        await asyncio.gather(*(g.actor.call("connect", offer, version) for g in self._generators))
        for generator in self._generators:
            generator.version = version

    async def publish(self, version: int) -> PublishStats:
        """Bring every generator to the trainer's weights. Raises if one of them can't be."""
        began = time.perf_counter()
        if self._released:
            await self._released
        ticket = await self._trainer.actor.call("stage", version)
        holds = await asyncio.gather(*(self._swap(g, ticket, version) for g in self._generators))
        # The trainer reads calls in order: it has released the buffer before it takes its next step.
        self._released = asyncio.ensure_future(self._trainer.actor.call("release", ticket))
        self._released.add_done_callback(
            lambda done: done.cancelled() or done.exception()
        )  # the next publish raises it
        return PublishStats(version, max(holds), time.perf_counter() - began)

    async def _swap(self, generator: ProcessGenerator, ticket: Any, version: int) -> float:
        hold: float
        hold, generator.totals = await generator.actor.call("swap", ticket, version)
        generator.version = version
        return hold


class Pools:
    """Every process of a run, started and stopped together."""

    def __init__(self, generator: GeneratorPool, trainer: ProcessTrainer) -> None:
        self.generator = generator
        self.trainer = trainer
        self.link = WeightLink(trainer, generator.generators)

    @classmethod
    async def start(cls, config: Config, directory: Path) -> Pools:
        """Start all processes at once and load the model in each. Raises `ConfigError` for what they refuse."""
        trainer = Actor("trainer", directory / "logs" / "trainer.log")
        generators = [
            Actor(f"generator {i}", directory / "logs" / f"generator_{i}.log") for i in range(config.generator.count)
        ]
        starts = [trainer.start(SERVICES.get(config.trainer.kind, config.trainer.kind), config, str(directory))]
        kind = SERVICES.get(config.generator.kind, config.generator.kind)
        starts += [g.start(kind, config, i) for i, g in enumerate(generators)]
        failures = [f for f in await asyncio.gather(*starts, return_exceptions=True) if f is not None]
        if failures:
            await asyncio.gather(*(actor.stop(grace=0.5) for actor in (trainer, *generators)))
            raise _for_a_user(failures[0])
        return cls(GeneratorPool([ProcessGenerator(g) for g in generators]), ProcessTrainer(trainer))

    async def close(self) -> None:
        await asyncio.gather(self.generator.close(), self.trainer.close())


def _for_a_user(failure: BaseException) -> BaseException:
    """What a process refused at start is the user's to mend: one line, no traceback."""
    if isinstance(failure, ActorError) and failure.kind in ("ConfigError", "GenerationError", "ValueError", "OSError"):
        return ConfigError(str(failure))
    return failure
