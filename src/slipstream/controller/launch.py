"""Start the processes of a run: engines, trainer, and the weight link between them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from slipstream.config.schema import Config, ConfigError
from slipstream.controller.colocation import ColocatedScheduler
from slipstream.controller.engine_restart import RestartPublisher
from slipstream.controller.prestart import PRELOADS, WORKER_CLASSES
from slipstream.controller.staggered_publisher import StaggeredPublisher
from slipstream.controller.weight_publisher import WeightPublisher
from slipstream.environments.episode import first_error
from slipstream.generators.base import EngineWorker
from slipstream.generators.pool import EngineReplica, GeneratorPool, Start
from slipstream.generators.vllm.servers import Server
from slipstream.runtime.addresses import link_environment
from slipstream.runtime.closing import close_at_once, closing
from slipstream.runtime.memory import available_memory
from slipstream.runtime.placement import Placement, gpus_of_engine, place, resolve_auto
from slipstream.runtime.process import stop_prestarted
from slipstream.runtime.rank_group import RankGroup, trainer_process
from slipstream.runtime.runtime import current_runtime
from slipstream.runtime.worker import WorkerError, handle
from slipstream.runtime.worker_process import WorkerProcess
from slipstream.sync.link import find_link
from slipstream.trainers.base import TrainerWorker


class Cluster:
    """Engines, trainer and weight link of a run."""

    def __init__(
        self, generator: GeneratorPool, trainer: WorkerProcess | RankGroup, config: Config, directory: Path,
        placement: Placement,
    ) -> None:  # fmt: skip
        self.generator, self._config, self._directory, self._placement = generator, config, directory, placement
        self._trainer_idle = asyncio.Lock()  # held while the trainer computes, or an engine starts on its GPUs
        self._use(trainer)

    def _use(self, trainer: WorkerProcess | RankGroup) -> None:
        """Make these processes the trainer, and create its weight link."""
        config, generator = self._config, self.generator
        self.trainer_process = trainer
        self.trainer = handle(TrainerWorker, trainer)
        self._colocation = ColocatedScheduler(self.trainer, generator) if config.sync.placement == "colocated" else None
        if config.sync.restart:
            self.link: WeightPublisher | RestartPublisher = RestartPublisher(
                self.trainer, generator, config, self._directory
            )
            return
        arguments = trainer, generator, config.sync, self._colocation, config.longest_timeout
        max_lag = 0 if config.loop.force_max_lag else config.loop.max_lag
        late = find_link(config.sync.link)[0].late_receivers(config) and not self._colocation
        self.link = StaggeredPublisher(*arguments, max_lag=max_lag) if late else WeightPublisher(*arguments)

    @classmethod
    async def start(cls, config: Config, directory: Path) -> Cluster:
        """Start all processes concurrently, and load the model in each; colocated engines wait until the trainer is
        offloaded.

        Raises `ConfigError` for errors in options or model files.
        """
        runtime = current_runtime()
        config = resolve_auto(config, runtime.gpus, runtime.hosts)
        placement = place(config, runtime.gpus)
        runtime.reserve(config, placement)
        trainer, gpus_free = new_trainer(config, directory, placement), asyncio.Event()

        async def start_trainer_first() -> None:
            if config.sync.placement != "colocated":
                gpus_free.set()
            await start_trainer(trainer, config, directory)
            if config.sync.placement == "colocated":
                await handle(TrainerWorker, trainer).offload()
                gpus_free.set()

        engines = asyncio.ensure_future(start_generators(config, directory, placement, gpus_free=gpus_free.wait))
        training = asyncio.ensure_future(start_trainer_first())
        try:
            await asyncio.gather(engines, training)
        except BaseException:
            engines.cancel()
            training.cancel()
            pool, *_ = await asyncio.gather(engines, training, trainer.stop(grace=0.5), return_exceptions=True)
            if isinstance(pool, GeneratorPool):  # started before the cancellation arrived
                await pool.close()
            raise
        finally:
            await asyncio.to_thread(stop_prestarted)  # those that were too many
        return cls(engines.result(), trainer, config, directory, placement)

    @property
    def trainer_ranks(self) -> Sequence[WorkerProcess]:
        trainer = self.trainer_process
        return trainer.processes if isinstance(trainer, RankGroup) else (trainer,)

    @property
    def turn_seconds(self) -> dict[str, float]:
        """Durations of the trainer's last turn and its parts, by name; empty unless engines and trainer take turns."""
        return self._colocation.seconds if self._colocation else {}

    @property
    def engines_can_stay(self) -> bool:
        """Whether the engines can connect to another trainer; otherwise they have to be restarted with it."""
        gpus = bool(self._placement.trainer)
        return bool(self._colocation is None and self.generator.alive and self.link.engines_can_reconnect(gpus))

    async def restart_trainer(self) -> None:
        """End all ranks and start new ones. Then `link` is a new link that is not connected to the engines yet."""
        await self.trainer_process.stop()
        await self.link.close()
        for engine in self.generator.running:
            engine.release()  # of a version whose publish did not end
        self.generator.oldest = 0  # versions are counted from the checkpoint's again
        self._use(new_trainer(self._config, self._directory, self._placement))
        await start_trainer(self.trainer_process, self._config, self._directory)

    @asynccontextmanager
    async def trainer_turn(self, publishes: bool) -> AsyncIterator[None]:
        """Context in which the trainer may compute. Colocated engines sleep as in `ColocatedScheduler.trainer_turn`."""
        async with self._trainer_idle, self._colocation.trainer_turn(publishes) if self._colocation else nullcontext():
            yield

    def validate_engine_count(self, engines: int) -> None:
        """Raise `ConfigError` for a number of engines that the run can't have."""
        generator, pool = self._config.generator, self.generator
        if self._colocation:
            raise ConfigError('the number of engines can\'t be changed with sync.placement = "colocated"')
        if self._placement.shared:
            raise ConfigError("the number of engines can't be changed on a GPU that other workers use")
        if not (pool.supervised and pool.begin):
            raise ConfigError(
                "the number of engines can be changed once a run has begun, and if the run started its engines"
            )
        if engines < generator.min_replicas:
            raise ConfigError(f"engines = {engines} is less than generator.min_replicas = {generator.min_replicas}")
        gpus_of_engine(self._placement, engines - 1, assignable_gpus(self._config, engines))
        if self._config.runtime.kind == "local":
            processes = [e.process for e in pool.generators if isinstance(e.process, WorkerProcess)]
            validate_memory(engines - len(processes), max((p.memory_bytes for p in processes), default=0))

    def engine_start(self) -> AbstractAsyncContextManager[object]:
        """Context in which an engine may start and join. Colocated placement excludes turns of the trainer."""
        return self._trainer_idle if self._colocation else nullcontext()

    async def close(self) -> None:
        async with closing(self.link.close):
            await close_at_once(self.generator.close, self.trainer_process.stop)


def validate_memory(engines: int, each: int) -> None:
    """Raise `ConfigError` if `engines` more engines with `each` bytes of memory do not fit on this host."""
    needed, left = engines * each, available_memory()
    if 0 <= left < needed:  # the system would kill processes of the run
        found = f"{engines} more engines need {needed / 1e9:,.1f} GB of memory, each as much as those of the run"
        raise ConfigError(f"{found}, and {left / 1e9:,.1f} GB are left")


def new_trainer(config: Config, directory: Path, placement: Placement) -> WorkerProcess | RankGroup:
    """The trainer's processes, not started."""
    return trainer_process(directory, placement, config.trainer.ranks, config.runtime, link_environment(config))


async def start_trainer(trainer: WorkerProcess | RankGroup, config: Config, directory: Path) -> None:
    """Start all ranks. Raises `ConfigError` as `Cluster.start`."""
    kind = WORKER_CLASSES.get(config.trainer.kind, config.trainer.kind)
    start = trainer.start(TrainerWorker, kind, config, str(directory))
    await _start([(trainer, start)], f'trainer.kind = "{config.trainer.kind}"')


async def start_generators(
    config: Config, directory: Path, placement: Placement, service: str = "",
    gpus_free: Callable[[], Awaitable[object]] | None = None,
) -> GeneratorPool:  # fmt: skip
    """Start the engines, without a trainer, on the weights of the model's files, or connect to `generator.servers`.

    `service` overrides the worker class of `generator.engine`. Engines wait for `gpus_free`, if given, before they use
    a GPU. Raises `ConfigError` as `Cluster.start`.
    """
    if config.generator.servers:
        return await _connect_servers(config)
    kind = service or WORKER_CLASSES.get(config.generator.engine, config.generator.engine)

    new_process = partial(_engine_process, kind, directory, placement, gpus_free)
    ranks = config.generator.gpus_per_engine
    slots: int = config.generator.engine_args.get("max_num_seqs", config.generator.max_num_seqs)

    def begin(number: int, config: Config) -> tuple[EngineReplica, Start]:
        process, start = new_process(number, config)
        return EngineReplica(process, ranks, partial(new_process, number), slots, started=False), start

    first = [begin(number, config) for number in range(len(placement.generators))]
    await _start([(engine.process, start()) for engine, start in first], f'generator.engine = "{kind}"')
    for engine, _ in first:
        engine.started = True
        engine.serving.set()
    return GeneratorPool([engine for engine, _ in first], begin)


def _engine_process(
    kind: str, directory: Path, placement: Placement, gpus_free: Callable[[], Awaitable[object]] | None,
    number: int, config: Config,
) -> tuple[WorkerProcess, Start]:  # fmt: skip
    """The process of an engine, and what starts it."""
    role, log = f"generator {number}", directory / "logs" / f"generator_{number}.log"
    gpus = gpus_of_engine(placement, number, assignable_gpus(config, number))
    launcher = current_runtime().launcher(role, gpus)
    process = WorkerProcess(role, log, launcher, link_environment(config), config.runtime)

    async def start() -> None:
        if gpus_free:
            await process.launch(PRELOADS.get(kind, kind))  # so that it imports vLLM meanwhile
            await gpus_free()
        await process.start(EngineWorker, kind, config, log, placement.sharers(gpus))

    return process, start


async def _connect_servers(config: Config) -> GeneratorPool:
    run = uuid4().hex
    servers = [Server(url, config, run) for url in config.generator.servers]
    await _start([(server, server.start()) for server in servers])
    return GeneratorPool([EngineReplica(s, s.ranks, max_num_seqs=s.max_num_seqs) for s in servers])


def assignable_gpus(config: Config, engines: int) -> int:
    """Number of GPUs that engines can be assigned to, used ones included.

    On Ray it includes GPUs for `engines` more engines. They wait until the cluster has got nodes for them.
    """
    later = engines * config.generator.gpus_per_engine if config.runtime.kind == "ray" else 0
    return current_runtime().gpus + later


async def _start(
    workers: Sequence[tuple[WorkerProcess | RankGroup | Server, Coroutine[Any, Any, object]]], option: str = ""
) -> None:
    """Start all workers by their coroutines, or stop all if one fails. `option` names their class in error messages."""
    try:
        async with asyncio.TaskGroup() as starting:  # after a failure, it cancels starts that wait for a GPU
            for _, start in workers:
                starting.create_task(start)
    except BaseException as error:
        await asyncio.gather(*(worker.stop(grace=0.5) for worker, _ in workers))
        raise _as_config_error(first_error(error), option) from None


def _as_config_error(failure: BaseException, option: str) -> BaseException:
    """The `ConfigError` for a failure that the user can correct, else the failure itself."""
    match failure.kind if isinstance(failure, WorkerError) else None:
        case "LoadError":
            return ConfigError(f"{option} can't be loaded: {failure}")
        case "ConfigError" | "GenerationError" | "InvalidInput" | "ValueError" | "OSError":
            return ConfigError(str(failure))
    return failure
