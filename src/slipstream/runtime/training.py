"""What runs inside the trainer's process, or in each of its ranks."""

from __future__ import annotations

import resource
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import torch

from slipstream.actor import Reply
from slipstream.config import Config, ConfigError
from slipstream.models import dtype_of
from slipstream.runtime.placement import threads
from slipstream.sync.checksum import checksum
from slipstream.sync.gathered import Gathered
from slipstream.sync.link import Sender, Ticket, find_link, shapes_of
from slipstream.sync.single_copy import borrow
from slipstream.trainers.guards import naming_remedies
from slipstream.trainers.trainer import Trainer

Result = TypeVar("Result")


class TrainerService:
    """A trainer, or one rank of it, and on rank 0 its end of the weight link. Calls are answered in order, but saving
    is over when what was copied is on the disk."""

    def __init__(self, config: Config, run: str) -> None:
        torch.set_num_threads(threads(config.trainer.threads, config))
        self._config, self._run = config, Path(run)
        if not self._run.is_dir():
            raise ConfigError(
                f"run.dir = {run} is not there on {socket.gethostname()}; where a trainer has ranks on several hosts "
                "it has to be on a file system of all of them"
            )
        with naming_remedies(config, "start"):
            self._trainer = Trainer(config)
        ranks = self._trainer.ranks
        parameters = self._trainer.parameters
        self._weights = Gathered(parameters, dtype_of(config), ranks.calls) if ranks.sharded else parameters
        self._sender: Sender | None = None
        self._everywhere = False
        self._saving: list[tuple[Future[Any], Reply]] = []

    @property
    def busy(self) -> bool:
        return bool(self._saving)

    @property
    def progress(self) -> int:
        """Micro-batches, and MiB that were read from and written to disks."""
        moved = resource.getrusage(resource.RUSAGE_SELF)
        return self._trainer.micro_batches + (moved.ru_inblock + moved.ru_oublock) // 2048  # blocks have 512 bytes

    def handle(self, method: str, arguments: tuple[Any, ...], reply: Reply) -> None:
        """Answer what this service, its trainer or its end of the link does."""
        with naming_remedies(self._config, method.replace("_", " ")):
            if method == "save":
                self._saving.append((self._trainer.save(*arguments), reply))
            elif owner := next((o for o in (self, self._trainer) if hasattr(o, method)), None):
                reply(getattr(owner, method)(*arguments))
            else:
                reply(self._at_link(lambda: getattr(self._sender, method)(*arguments)))

    def tick(self) -> None:
        """Say what has been saved."""
        if not self._saving[0][0].done():
            time.sleep(0.001)
            return
        written, reply = self._saving.pop(0)
        reply(written.exception())

    def shapes(self) -> dict[str, list[int]]:
        """Of what is trained."""
        return shapes_of(self._trainer.parameters)

    def compute_on(self, handles: Sequence[dict[str, str]]) -> None:
        """Use weights that the same rank of an engine has lent from now on (`sync.single_copy`)."""
        self._trainer.compute_on(borrow(handles[self._trainer.ranks.rank], self._trainer.device))

    def open_link(self, receivers: int) -> Ticket | None:
        """This end of the link, for so many processes that hold weights."""
        kind, _ = find_link(self._config.sync.link)
        self._everywhere = kind.everywhere
        offer = self._at_link(lambda: self._open_link(kind, receivers))
        return {**(offer or {}), "parts": self._trainer.ranks.each(offer)} if self._everywhere else offer

    def checksums(self, names: Sequence[str]) -> dict[str, int] | None:
        """Of the weights as they are published."""
        dtype = dtype_of(self._config)
        return self._on_rank_0(lambda: {name: checksum(self._weights[name].to(dtype)) for name in names})

    def close(self) -> None:
        if self._sender:
            self._sender.close()

    def _open_link(self, kind: type[Sender], receivers: int) -> Ticket:
        if self._sender:
            self._sender.close()
        weights = self._trainer.parameters if self._everywhere else self._weights
        self._sender = kind(weights, self._config, self._run, receivers)
        self._trainer.before_update = self._sender.before_update
        return self._sender.offer()

    def _at_link(self, work: Callable[[], Result]) -> Result | None:
        """Do this wherever the trainer has an end of the link."""
        return work() if self._everywhere else self._on_rank_0(work)

    def _on_rank_0(self, work: Callable[[], Result]) -> Result | None:
        """Do this on rank 0, while the others help it to gather the weights that it reads."""
        spread = self._weights if isinstance(self._weights, Gathered) else None
        if self._trainer.ranks.rank:
            if spread:
                spread.follow()
            return None
        try:
            return work()
        finally:
            if spread:
                spread.done()
