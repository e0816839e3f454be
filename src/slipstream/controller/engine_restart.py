"""The `checkpoint` link with `sync.restart`: write each version as a model directory, and restart all engines on it.

For engines that can only load files. Generation pauses meanwhile, and checksums are not compared.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from slipstream.config.schema import Config, ConfigError
from slipstream.generators.pool import EngineReplica, GeneratorPool, Start
from slipstream.model.tokenizer import save_tokenizer
from slipstream.runtime.worker import WorkerDied, WorkerError
from slipstream.sync.checkpoint import newest_first, remove, version_of
from slipstream.sync.link import PublishStats
from slipstream.trainers.base import TrainerWorker

SET_VERSION_TIMEOUT_S = 60.0  # of the first call to a restarted engine
DRAIN_POLL_S = 0.02


class RestartPublisher:
    """Replaces `WeightPublisher`: publishes by restarting engines."""

    def __init__(self, trainer: TrainerWorker, pool: GeneratorPool, config: Config, directory: Path) -> None:
        self._trainer, self._pool, self._config = trainer, pool, config
        self._directory = directory / "weights"
        self._keep = max(1, config.sync.keep_versions)
        self._served = (config.model.path, 0)  # model files of the last version, and its number

    async def connect(self, version: int) -> PublishStats:
        """Publish for the first time: a resumed run has other weights than the model's files.

        Older versions of an earlier process stay, as `sync.keep_versions` demands. Newer ones are removed: the
        checkpoint precedes them.
        """
        for path in self._directory.glob("*"):
            if not 0 <= version_of(path) < version:
                remove(path)
        return await self.publish(version)

    async def publish(self, version: int, verify: str = "", free: asyncio.Event | None = None) -> PublishStats:
        """Restart every engine on the trainer's weights. Raises an error if all fail; ignores `verify` and `free`."""
        began = self._pool.now()
        path = await self._write(version)
        self._served = (str(path.resolve()), version)
        sending = self._pool.now() - began
        self._pool.pause()
        while self._config.sync.in_flight == "drain" and any(g.pending_requests for g in self._pool.alive):
            await asyncio.sleep(DRAIN_POLL_S)
        stopped = self._pool.now()
        config = self.start_config(self._config)
        generators = self._pool.generators
        starts = await asyncio.gather(*(g.replace(config) for g in generators))
        restarted = (self._restart(g, start, version) for g, start in zip(generators, starts, strict=True))
        failed = [error for error in await asyncio.gather(*restarted) if error]
        if len(failed) == len(generators):
            raise failed[0]
        self._pool.resume()
        for old in newest_first(self._directory.iterdir())[self._keep :]:
            remove(old)
        ended = self._pool.now()
        lost, pauses = tuple(str(e) for e in failed), tuple((g.track, stopped, ended) for g in generators)
        return PublishStats(
            version, ended - stopped, sending, ended - began, ended - began, lost, began=began, pauses=pauses
        )

    def engines_can_reconnect(self, on_gpus: bool) -> bool:
        """False: engines may be in the middle of their own restart."""
        return False

    def start_config(self, config: Config) -> Config:
        """The configuration on which an engine starts: with the files of the last version."""
        model = config.model.model_copy(update={"path": self._served[0]})
        return config.model_copy(update={"model": model})

    async def join(self, generator: EngineReplica) -> None:
        """Send requests to an engine that has started on the files of the last version."""
        await generator.wait_for(generator.worker.set_version(self._served[1]), "begin", SET_VERSION_TIMEOUT_S)
        generator.version = self._served[1]
        self._pool.serve(generator)

    async def leave(self, generator: EngineReplica) -> None:
        """Do nothing: a publish restarts the engines that are in the pool."""

    async def publish_again(self, version: int) -> PublishStats | None:
        """None: engines that join serve the last version."""
        return None

    async def close(self) -> None:
        """Remove the versions, unless `sync.keep_versions` is set."""
        if not self._config.sync.keep_versions:
            shutil.rmtree(self._directory, ignore_errors=True)

    async def _write(self, version: int) -> Path:
        path = self._directory / f"version_{version}"
        partial = path.with_suffix(".partial")
        await self._trainer.export(partial)
        await asyncio.to_thread(save_tokenizer, self._config.model.path, partial)
        return partial.rename(path)

    async def _restart(self, generator: EngineReplica, start: Start, version: int) -> Exception | None:
        try:
            await start()
            await generator.wait_for(generator.worker.set_version(version), "begin", SET_VERSION_TIMEOUT_S)
        except (WorkerDied, WorkerError, ConfigError) as error:
            generator.process.terminate(f"{generator.process.name} did not start again: {error}")
            return error
        generator.version = version
        self._pool.serve(generator)
        return None
