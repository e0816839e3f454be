"""The `checkpoint` link with `sync.restart`: every version is a model's directory, and engines are started anew on it.

For engines that can load files and nothing else. It holds generation for as long as they take to start, and no checksum
can be asked of them: what they serve is what they load. One that has died meanwhile starts again like the others.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from pathlib import Path

from slipstream.actor import Actor, ActorDied, ActorError
from slipstream.config import Config, ConfigError
from slipstream.models import load_tokenizer
from slipstream.runtime.pool import GeneratorPool, ProcessGenerator, Start
from slipstream.runtime.ranks import Ranks
from slipstream.sync.checkpoint import newest_first, remove, version_of
from slipstream.sync.link import PublishStats

BEGIN = 60.0  # seconds that an engine which has started may take to say so
POLL = 0.02  # seconds between two looks whether all has been drawn


class RestartLink:
    """A `runtime.publish.WeightLink` that restarts engines."""

    def __init__(self, trainer: Actor | Ranks, pool: GeneratorPool, config: Config, directory: Path) -> None:
        self._trainer, self._pool, self._config = trainer, pool, config
        self._directory = directory / "weights"
        self._keep = max(1, config.sync.keep)

    async def connect(self, version: int) -> None:
        """Publish for the first time: a run that is resumed has other weights than the model's files.

        What an earlier sitting has left and is older stays, as `sync.keep` says. Newer is what a kill took back.
        """
        for path in self._directory.glob("*"):
            if not 0 <= version_of(path) < version:
                remove(path)
        await self.publish(version)

    async def publish(self, version: int, verify: str = "", free: asyncio.Event | None = None) -> PublishStats:
        """Bring every generator to the trainer's weights. Raises if none of them can be. `free` is left alone."""
        began = time.perf_counter()
        path = await self._write(version)
        sending = time.perf_counter() - began
        self._pool.hold()
        while self._config.sync.interruption == "drain" and any(g.outstanding for g in self._pool.living):
            await asyncio.sleep(POLL)
        stopped = time.perf_counter()
        config = self._config.model_copy(
            update={"model": self._config.model.model_copy(update={"path": str(path.resolve())})}
        )
        generators = self._pool.generators
        starts = await asyncio.gather(*(g.replace(config) for g in generators))
        renewed = (self._renew(g, start, version) for g, start in zip(generators, starts, strict=True))
        failed = [error for error in await asyncio.gather(*renewed) if error]
        if len(failed) == len(generators):
            raise failed[0]
        self._pool.resume()
        for old in newest_first(self._directory.iterdir())[self._keep :]:
            remove(old)
        ended = time.perf_counter()
        return PublishStats(
            version, ended - stopped, sending, ended - began, ended - began, tuple(str(e) for e in failed)
        )

    async def close(self) -> None:
        """Remove what shall not outlive the run."""
        if not self._config.sync.keep:
            shutil.rmtree(self._directory, ignore_errors=True)

    async def _write(self, version: int) -> Path:
        path = self._directory / f"version_{version}"
        partial = path.with_suffix(".partial")
        await self._trainer.call("export", partial)
        await asyncio.to_thread(lambda: load_tokenizer(self._config.model.path).save_pretrained(partial))
        return partial.rename(path)

    async def _renew(self, generator: ProcessGenerator, start: Start, version: int) -> Exception | None:
        try:
            await start()
            await generator.answer(generator.actor.call("begin", version), "begin", BEGIN)
        except (ActorDied, ActorError, ConfigError) as error:
            generator.actor.give_up(f"{generator.actor.name} did not start again: {error}")
            return error
        generator.version = version
        return None
