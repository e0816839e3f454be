"""The worker of an engine: decodes, receives weights, and swaps them between two steps of the engine."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from slipstream.config.schema import Config
from slipstream.generators.base import finish_request
from slipstream.generators.served_weights import ServedWeights, local_shards
from slipstream.model.device import current_device, dtype_of
from slipstream.model.inspection import policy_parameters, trained_parameters
from slipstream.model.loading import load_model
from slipstream.model.tokenizer import load_tokenizer
from slipstream.rollout import Completion, Sampling
from slipstream.runtime.placement import threads
from slipstream.runtime.worker import Worker
from slipstream.sync.frames import Superseded
from slipstream.sync.link import ConnectionInfo, PublishHandle
from slipstream.sync.update import RolledBack

if TYPE_CHECKING:
    from slipstream.generators.torch.engine import Engine as TorchEngine
    from slipstream.generators.torch.policy_engines import PolicyEngines
    from slipstream.generators.vllm.engine import VllmEngine
    from slipstream.generators.vllm.weights import VllmWeights

Engine: TypeAlias = "TorchEngine | PolicyEngines | VllmEngine"
Weights: TypeAlias = "ServedWeights | VllmWeights"
OpenWeights = Callable[[str, ConnectionInfo, int], Weights]
POLL_INTERVAL_S = 0.001  # while the engine has nothing to step
# Iterations of the event loop between two steps. The first creates a task for a call that arrived in the step. The
# second starts the task.
LOOP_PASSES = 2


class GeneratorWorker(Worker):
    """An engine and its end of the weight link, as an `EngineWorker`."""

    def __init__(self, config: Config, log: Path | None = None, sharers: int = 1) -> None:
        torch.set_num_threads(threads(config.generator.threads, config))
        self._config, self._log, self._sharers = config, log, sharers
        self._engine, self._open_weights = self._load()
        self._weights: Weights | None = None
        self._keys = itertools.count()
        self._requests: dict[Hashable, asyncio.Future[Completion]] = {}
        self._changed = asyncio.Event()  # set by a request, a swap or `wake`; `run` waits for it
        self._steps = 0
        self._failed_swap = False  # weights may be mixed: no step runs any more

    def _load(self) -> tuple[Engine, OpenWeights]:
        """The engine, and a function that opens its end of a link (name, connection information, rank)."""
        from slipstream.generators.torch.policy_engines import PolicyEngines

        loaded = [self._load_model(own) for own in self._config.each_model]
        shards = local_shards({name: p for _, parameters in loaded for name, p in parameters.items()})
        engines = [engine for engine, _ in loaded]
        return engines[0] if len(engines) == 1 else PolicyEngines(engines), (
            lambda link, connection_info, rank: ServedWeights(link, connection_info, shards, rank, rebind=True)
        )

    def _load_model(self, config: Config) -> tuple[TorchEngine, dict[str, torch.nn.Parameter]]:
        """The engine of one model, and the parameters that are published to it."""
        from slipstream.generators.torch.engine import Engine

        model = load_model(
            config.model, config.lora, device=current_device(), dtype=dtype_of(config), policies=config.policies
        )
        parameters = trained_parameters(model)
        for parameter in parameters.values():  # to the published dtype; peft makes adapters float32
            parameter.data = parameter.data.to(dtype_of(config))
        engine = Engine(
            model.get_base_model() if config.lora.rank else model,
            slots=config.generator.max_num_seqs,
            context=config.generator.max_model_len,
            tokenizer=load_tokenizer(config.model.path),
            policies=[policy.name for policy in config.policies],
        )
        whole = config.policies and not config.lora.rank
        return engine, policy_parameters(parameters, config.policies[0].name) if whole else parameters

    @property
    def progress(self) -> int:
        """Number of engine steps with sequences in flight."""
        return self._steps

    async def run(self) -> None:
        """Step the engine while it has work. Calls run between two steps."""
        while True:
            while not self._may_step:
                self._changed.clear()
                await self._changed.wait()
            decoding = self._engine.running > 0
            for key, result in self._engine.step():
                finish_request(self._requests[key], result)
            self._steps += decoding
            for _ in range(LOOP_PASSES):
                await asyncio.sleep(0)

    @property
    def _may_step(self) -> bool:
        engine = self._engine
        return engine.busy and not self._failed_swap and not (engine.asleep and engine.versions_known)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        key = next(self._keys)
        self._engine.submit(key, prompt_ids, sampling)
        self._requests[key] = asyncio.get_running_loop().create_future()
        self._changed.set()
        try:
            return await self._requests[key]
        except asyncio.CancelledError:
            self._engine.abort(key)
            raise
        finally:
            del self._requests[key]

    async def connect(self, connection_info: ConnectionInfo, rank: int) -> None:
        await self._until(lambda: self._engine.versions_known)  # a swap continues after the cancellation of its call
        if self._weights:
            self._weights.close()
        link = connection_info.get("link", self._config.sync.link)
        self._weights = self._open_weights(link, connection_info, rank)

    async def prepare(self, handle: PublishHandle) -> str:
        self._served.prepare(handle)
        try:
            await self._until(self._served.prepared)
        except Superseded as error:
            return str(error)
        return ""

    async def checksums(self, names: Sequence[str]) -> dict[str, int]:
        self._served.start_checksums(names)
        while (sums := self._served.checksums()) is None:
            await self._next_step()
        return sums

    async def swap(self, version: int) -> tuple[float, dict[str, float]] | None:
        """As `EngineWorker.swap`. Returns once the version of each sampled token is known."""
        apply: Any = self._served.apply  # of the weights that the same `_load` opened
        try:
            async with self._drained():
                try:
                    pause = self._engine.swap(version, apply, self._config.sync.in_flight)
                except RolledBack:
                    return None
            self._changed.set()
            await self._until(lambda: self._engine.versions_known)
            if self._engine.version != version:  # a worker process of the engine could not write it
                return None
            return max(pause, self._served.pause_s()), await self.stats()
        except Exception:
            self._failed_swap = True
            raise

    async def sleep(self, level: int) -> None:
        async with self._drained():
            self._engine.sleep(level)

    async def wake(self, tags: Sequence[str]) -> None:
        self._engine.wake(tags)
        self._changed.set()

    async def export_ipc_handles(self, shapes: dict[str, list[int]]) -> list[dict[str, str]]:
        return self._engine.export_ipc_handles(shapes)

    async def set_version(self, version: int) -> None:
        self._engine.version = version

    async def longest_in_flight(self) -> int:
        return self._engine.longest_in_flight()

    async def stats(self) -> dict[str, float]:
        engine = self._engine
        return {
            "tokens": engine.tokens_generated,
            "tokens_discarded": engine.tokens_discarded,
            "busy_s": engine.busy_seconds,
        }

    def close(self) -> None:
        weights, self._weights = self._weights, None  # first: a call that still waits for checksums asks no workers
        if weights:
            weights.close()

    @asynccontextmanager
    async def _drained(self) -> AsyncIterator[None]:
        """Context without sequences in flight if `sync.in_flight` is "drain"; new requests queue meanwhile."""
        drain = self._config.sync.in_flight == "drain"
        self._engine.draining = drain and self._engine.running > 0
        try:
            if self._engine.draining:
                await self._until(lambda: self._engine.running == 0)
            yield
        finally:
            self._engine.draining = False
            self._changed.set()

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds, checked between steps of the engine. Raises its error."""
        while not condition():
            await self._next_step()

    async def _next_step(self) -> None:
        await asyncio.sleep(0 if self._may_step else POLL_INTERVAL_S)

    @property
    def _served(self) -> Weights:
        assert self._weights is not None, "connect comes first"
        return self._weights
