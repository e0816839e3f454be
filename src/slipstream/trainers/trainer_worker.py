"""The trainer's worker: one process, or one for each rank."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from slipstream.config.schema import Config
from slipstream.model.device import dtype_of
from slipstream.rollout import Batch, Completion
from slipstream.runtime.placement import threads
from slipstream.runtime.worker import Worker
from slipstream.step_stats import StepStats
from slipstream.sync.checksum import checksum
from slipstream.sync.link import (
    ConnectionInfo,
    Parameters,
    PublishHandle,
    Sender,
    call_link,
    find_link,
    link_name,
    shapes_of,
)
from slipstream.sync.sharded_weights import GatheredParameters
from slipstream.sync.single_copy import import_ipc_handles
from slipstream.trainers.failures import explain_out_of_memory
from slipstream.trainers.policies import PolicyTrainers
from slipstream.trainers.trainer import Trainer

Result = TypeVar("Result")


class PytorchTrainerWorker(Worker):
    """A `TrainerWorker`: a trainer or one rank of it, and the sender of the weight link on ranks that have one."""

    def __init__(self, config: Config, run: str) -> None:
        torch.set_num_threads(threads(config.trainer.threads, config))
        self._config, self._run_dir = config, Path(run)
        with explain_out_of_memory(config, "start"):
            self._trainer = PolicyTrainers(config) if config.policies else Trainer(config)
        ranks = self._trainer.ranks
        self._weights: Parameters = self._trainer.parameters
        if ranks.is_sharded:
            self._weights = GatheredParameters(self._trainer.parameters, dtype_of(config), ranks.control_group)
        self._sender: Sender | None = None
        self._on_every_rank = False

    @property
    def progress(self) -> int:
        """Micro-batches, plus MiB read from and written to disk; the supervisor compares values to detect a hang."""
        moved = resource.getrusage(resource.RUSAGE_SELF)
        return self._trainer.micro_batches + (moved.ru_inblock + moved.ru_oublock) // 2048  # blocks have 512 bytes

    async def step(self, batch: Batch) -> StepStats:
        with explain_out_of_memory(self._config, "step"):
            return self._trainer.step(batch)

    async def score(self, completions: Sequence[Completion]) -> list[list[float]]:
        with explain_out_of_memory(self._config, "score"):
            return self._trainer.score(completions)

    async def save(self, path: Path, last: bool) -> None:
        """As `TrainerWorker.save`: copies the state, then writes it in a thread."""
        with explain_out_of_memory(self._config, "save"):
            written = self._trainer.save(path, last)
        await asyncio.shield(asyncio.wrap_future(written))

    async def restore(self, path: Path) -> None:
        with explain_out_of_memory(self._config, "restore"):
            self._trainer.restore(path)

    async def export(self, path: Path) -> None:
        with explain_out_of_memory(self._config, "export"):
            self._trainer.export(path)

    async def offload(self) -> bool:
        with explain_out_of_memory(self._config, "offload"):
            return self._trainer.offload()

    async def onload(self) -> None:
        with explain_out_of_memory(self._config, "load"):
            self._trainer.onload()

    async def shapes(self) -> dict[str, list[int]]:
        return shapes_of(self._trainer.parameters)

    async def compute_on(self, handles: Sequence[dict[str, str]]) -> None:
        assert isinstance(self._trainer, Trainer)
        self._trainer.compute_on(import_ipc_handles(handles[self._trainer.ranks.rank], self._trainer.device))

    async def open_link(self, receivers: int) -> ConnectionInfo | None:
        """As `TrainerWorker.open_link`; None on ranks without a sender."""
        kind, _ = find_link(link_name(self._config.sync))
        self._on_every_rank = kind.on_every_rank
        with explain_out_of_memory(self._config, "open link"):
            info = self._on_link_ranks(lambda: self._open_link(kind, receivers))
        return {**(info or {}), "parts": self._trainer.ranks.all_gather_object(info)} if self._on_every_rank else info

    async def check_connection(self) -> None:
        self._on_link_ranks(lambda: self._open_sender.check_connection())  # noqa: PLW0108 (other ranks have no sender)

    async def stage(self, version: int) -> PublishHandle | None:
        """As `TrainerWorker.stage`; None on ranks without a sender."""
        with explain_out_of_memory(self._config, "stage"):
            self._trainer.make_room()
            return self._on_link_ranks(lambda: self._open_sender.stage(version))

    async def send(self, handle: PublishHandle) -> PublishHandle | None:
        with explain_out_of_memory(self._config, "send"):
            return self._on_link_ranks(lambda: self._open_sender.send(handle))

    async def release(self, handle: PublishHandle) -> None:
        self._on_link_ranks(lambda: self._open_sender.release(handle))

    async def checksums(self, names: Sequence[str]) -> dict[str, int] | None:
        """As `TrainerWorker.checksums`; None on ranks other than 0. Collective: every rank must call it."""
        dtype = dtype_of(self._config)
        return self._on_rank_0(lambda: {name: checksum(self._weights[name].to(dtype)) for name in names})

    def close(self) -> None:
        if self._sender:
            self._sender.close()

    @property
    def _open_sender(self) -> Sender:
        assert self._sender is not None, "open_link must be called first"
        return self._sender

    def _open_link(self, kind: type[Sender], receivers: int) -> ConnectionInfo:
        if self._sender:
            self._sender.close()
        weights: Parameters = self._trainer.parameters if self._on_every_rank else self._weights
        link = link_name(self._config.sync)
        self._sender = call_link(link, kind, weights, self._config, self._run_dir, receivers)
        self._trainer.before_update = self._sender.before_update
        return call_link(link, self._sender.connection_info)

    def _on_link_ranks(self, work: Callable[[], Result]) -> Result | None:
        """Run `work` on every rank that has a sender."""
        return work() if self._on_every_rank else self._on_rank_0(work)

    def _on_rank_0(self, work: Callable[[], Result]) -> Result | None:
        """Run `work` on rank 0, while the other ranks join the gathers of the weights that it reads."""
        gathered = self._weights if isinstance(self._weights, GatheredParameters) else None
        if self._trainer.ranks.rank:
            if gathered:
                gathered.serve_gathers()
            return None
        try:
            return work()
        finally:
            if gathered:
                gathered.end_gathers()
