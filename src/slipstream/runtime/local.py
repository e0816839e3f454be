"""Generators, a trainer and their weight link as processes of this host."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import OrderedDict
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from slipstream.actor import Actor, ActorDied, ActorError
from slipstream.config import Config, ConfigError, SyncConfig
from slipstream.generators.base import GenerationError
from slipstream.rollout import Batch, Completion, Sampling
from slipstream.runtime.placement import Placement, place, visible
from slipstream.runtime.servers import Server
from slipstream.sync.checksum import chosen
from slipstream.sync.link import PublishStats
from slipstream.trainers.trainer import StepStats

BEGINNING = 64  # tokens by which prompts are taken to begin alike
HOMES = 4096  # beginnings that are remembered
SLACK = 8
DEATH_SHOWS = 1.0  # seconds after a failed publish in which a process that died at its other end is known to have

# What `generator.kind` and `trainer.kind` name; anything else is a user's own `runtime.actor.Service`.
SERVICES = {
    "torch": "slipstream.runtime.services:GeneratorService",
    "vllm": "slipstream.runtime.vllm:VllmService",
    "pytorch": "slipstream.runtime.services:TrainerService",
}


class ProcessGenerator:
    """An engine in a process of its own or a server, as a `Generator`. `ranks` of its processes hold weights."""

    def __init__(self, actor: Actor | Server, ranks: int = 1) -> None:
        self.actor = actor
        self.ranks = ranks
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
    """Several generators as one: each request goes to the one with the fewest outstanding of those that live.

    Turns of an episode, and rollouts of one task, begin alike, and a generator that saw the beginning has its keys:
    they stay together as long as that does not pile up more than `SLACK` requests. What a generator was drawing when it
    died, another draws again; the next publish ends the run.
    """

    def __init__(self, generators: Sequence[ProcessGenerator]) -> None:
        self.generators = generators
        self._homes: OrderedDict[tuple[int, ...], ProcessGenerator] = OrderedDict()

    @property
    def version(self) -> int:
        return min(g.version for g in self.generators)

    @property
    def dead(self) -> ActorDied | None:
        """What became of the first generator, if none of them lives."""
        return self.generators[0].actor.dead if all(g.actor.dead for g in self.generators) else None

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        while True:
            try:
                return await self._choose(prompt_ids).generate(prompt_ids, sampling)
            except ActorDied:
                if self.dead:
                    raise

    def _choose(self, prompt_ids: Sequence[int]) -> ProcessGenerator:
        living = [g for g in self.generators if not g.actor.dead] or self.generators
        least, beginning = min(living, key=lambda g: g.outstanding), tuple(prompt_ids[:BEGINNING])
        home = self._homes.pop(beginning, least)
        if home not in living or home.outstanding > least.outstanding + SLACK:
            home = least
        self._homes[beginning] = home
        if len(self._homes) > HOMES:
            self._homes.popitem(last=False)
        return home

    async def stats(self) -> dict[str, float]:
        """Tokens of all generators, and seconds busy of the average one."""
        await asyncio.gather(*(g.stats() for g in self.generators))
        return self.totals

    @property
    def totals(self) -> dict[str, float]:
        """The same as of the last publish or call of `stats`."""
        totals = [g.totals for g in self.generators]
        return {"tokens": sum(t["tokens"] for t in totals), "busy": sum(t["busy"] for t in totals) / len(totals)}

    async def drawn(self) -> int:
        """Tokens that the furthest sequence in flight has drawn."""
        drawn: list[int] = await asyncio.gather(*(g.actor.call("drawn") for g in self.generators))
        return max(drawn)

    async def close(self) -> None:
        await asyncio.gather(*(g.close() for g in self.generators))


class ProcessTrainer:
    """A trainer in a process of its own. Calls reach it in the order in which they are made."""

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


class PublishError(RuntimeError):
    """New weights did not reach a generator as they are."""


class WeightLink:
    """The controller's view of a link: it carries tickets from one end to the other, and commits a version."""

    def __init__(self, trainer: ProcessTrainer, generators: Sequence[ProcessGenerator], sync: SyncConfig) -> None:
        self._trainer, self._generators, self._sync = trainer.actor, generators, sync
        self._released: asyncio.Future[None] | None = None
        self._names: list[str] = []

    async def connect(self, version: int) -> None:
        """Connect both ends and publish for the first time: every generator serves the trainer's weights."""
        if self._sync.link == "single_copy":
            shapes = await self._trainer.call("shapes")
            await self._trainer.call("compute_on", await self._generators[0].actor.call("lend", shapes))
        ranks = [g.ranks for g in self._generators]
        offer = await self._trainer.call("open_link", sum(ranks))
        self._names = list(offer["shapes"])
        firsts = itertools.accumulate(ranks, initial=1)
        calls = [g.actor.call("connect", offer, first) for g, first in zip(self._generators, firsts, strict=False)]
        await asyncio.gather(*calls)
        await self.publish(version, "off" if self._sync.verify == "off" else "full")

    async def publish(self, version: int, verify: str = "") -> PublishStats:
        """Bring every generator to the trainer's weights. Raises if one of them can't be.

        `verify` says which parameters are compared then, in the place of `sync.verify`.
        """
        began = time.perf_counter()
        if self._released:
            await self._released
        ticket = await self._trainer.call("stage", version)
        sent = asyncio.ensure_future(_seconds(self._trainer.call("send", ticket)))
        sent.add_done_callback(lambda done: done.cancelled() or done.exception())  # another failure may be told
        # All have the whole version beside what they serve before the first of them swaps.
        try:
            await _unless(sent, asyncio.gather(*(g.actor.call("prepare", ticket) for g in self._generators)))
            holds = await _unless(sent, asyncio.gather(*(self._swap(g, version) for g in self._generators)))
            sending = await sent
        except ActorError:
            await self._tell_a_death()
            raise
        finally:
            sent.cancel()
        # Not waited for, but on its way: the trainer reads it before any call that is made after this.
        self._released = self._trainer.call("release", ticket)
        self._released.add_done_callback(lambda done: done.cancelled() or done.exception())  # the next publish tells
        await self._compare(chosen(self._names, version, verify or self._sync.verify), version)
        return PublishStats(version, max(holds), sending, time.perf_counter() - began)

    async def _tell_a_death(self) -> None:
        """Raise `ActorDied` if what failed at one end is but the death of another, which may show a little later."""
        ends = (self._trainer, *(g.actor for g in self._generators))
        last = time.perf_counter() + DEATH_SHOWS
        while time.perf_counter() < last:
            if dead := next((end.dead for end in ends if end.dead), None):
                raise dead from None
            await asyncio.sleep(DEATH_SHOWS / 20)

    async def _swap(self, generator: ProcessGenerator, version: int) -> float:
        hold: float
        hold, generator.totals = await generator.actor.call("swap", version)
        generator.version = version
        return hold

    async def _compare(self, names: list[str], version: int) -> None:
        """See that what is served is what the trainer published, parameter by parameter."""
        if not names:
            return
        ends = (self._trainer, *(g.actor for g in self._generators))
        wanted, *served = await asyncio.gather(*(end.call("checksums", names) for end in ends))
        for generator, sums in zip(self._generators, served, strict=True):
            for name in names:
                if sums[name] % 2**64 != wanted[name]:
                    raise PublishError(
                        f"{generator.actor.name} serves {name} with other values than the trainer published as version "
                        f"{version}; nothing was trained on them. Try another sync.link"
                    )


async def _unless(sent: asyncio.Future[float], receiving: asyncio.Future[list[Any]]) -> list[Any]:
    """What the receivers answer. Raises at once if sending fails: they may wait for ever for what it does not send."""
    receiving.add_done_callback(lambda done: done.cancelled() or done.exception())  # this raises another's failure
    try:
        await asyncio.wait((sent, receiving), return_when=asyncio.FIRST_COMPLETED)
        if sent.done() and not receiving.done():
            sent.result()
        return await receiving
    finally:
        receiving.cancel()


async def _seconds(call: asyncio.Future[Any]) -> float:
    """How long a call takes from now on."""
    began = time.perf_counter()
    await call
    return time.perf_counter() - began


class Pools:
    """Every process of a run, started and stopped together."""

    def __init__(self, generator: GeneratorPool, trainer: ProcessTrainer, sync: SyncConfig) -> None:
        self.generator = generator
        self.trainer = trainer
        self.link = WeightLink(trainer, generator.generators, sync)

    @classmethod
    async def start(cls, config: Config, directory: Path) -> Pools:
        """Start all processes at once and load the model in each. Raises `ConfigError` for what they refuse."""
        placement = place(config, gpus_here())
        trainer = Actor("trainer", directory / "logs" / "trainer.log", visible(placement.trainer))
        starting = asyncio.ensure_future(start_generators(config, directory, placement))
        try:
            kind = SERVICES.get(config.trainer.kind, config.trainer.kind)
            await _start([trainer], [trainer.start(kind, config, str(directory))])
            return cls(await starting, ProcessTrainer(trainer), config.sync)
        except BaseException:
            starting.cancel()
            await asyncio.gather(starting, trainer.stop(grace=0.5), return_exceptions=True)
            raise

    async def close(self) -> None:
        await asyncio.gather(self.generator.close(), self.trainer.close())


async def start_generators(config: Config, directory: Path, placement: Placement) -> GeneratorPool:
    """The generators alone, each with the model's own weights. Raises `ConfigError` for what they refuse."""
    if config.generator.servers:
        servers = [Server(url, config) for url in config.generator.servers]
        await _start(servers, [server.start() for server in servers])
        return GeneratorPool([ProcessGenerator(server, server.ranks) for server in servers])
    kind = SERVICES.get(config.generator.kind, config.generator.kind)
    logs = [directory / "logs" / f"generator_{i}.log" for i in range(len(placement.generators))]
    places = zip(logs, placement.generators, strict=True)
    actors = [Actor(f"generator {i}", log, visible(gpus)) for i, (log, gpus) in enumerate(places)]
    starts = [actor.start(kind, config, log, placement.shared) for actor, log in zip(actors, logs, strict=True)]
    await _start(actors, starts)
    return GeneratorPool([ProcessGenerator(actor, config.generator.tensor_parallel) for actor in actors])


async def _start(actors: Sequence[Actor | Server], starts: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Start all of these, or none of them."""
    try:
        await asyncio.gather(*starts)
    except BaseException as error:
        await asyncio.gather(*(actor.stop(grace=0.5) for actor in actors))
        raise _for_a_user(error) from None


def gpus_here() -> int:
    """How many GPUs this host lends to this process."""
    import torch

    return torch.cuda.device_count()


def _for_a_user(failure: BaseException) -> BaseException:
    """What a process refused at start is the user's to mend: one line, no traceback."""
    if isinstance(failure, ActorError) and failure.kind in ("ConfigError", "GenerationError", "ValueError", "OSError"):
        return ConfigError(str(failure))
    return failure
