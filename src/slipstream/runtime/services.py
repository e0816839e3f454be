"""What runs inside the generators' and the trainer's processes."""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from slipstream.actor import Reply
from slipstream.config import Config
from slipstream.generators.torch import Engine
from slipstream.models import load_model, load_tokenizer, pick_device, trained_parameters
from slipstream.rollout import Batch, Completion
from slipstream.sync.link import Receiver, Sender, Ticket, find_link
from slipstream.trainers.trainer import StepStats, Trainer


class GeneratorService:
    """An embedded engine and its end of the weight link."""

    def __init__(self, config: Config, index: int) -> None:
        torch.set_num_threads(_threads(config.generator.threads, config))
        device = pick_device(config.generator.device, "generator.device")
        dtype: torch.dtype = getattr(torch, config.model.dtype)
        self._config = config
        self._model = load_model(config.model, config.lora, device=device, dtype=dtype)
        self._engine = Engine(
            self._model.get_base_model() if config.lora.rank else self._model,
            slots=config.generator.slots,
            context=config.generator.context,
            tokenizer=load_tokenizer(config.model.path),
        )
        self._receiver: Receiver | None = None
        self._replies: dict[Hashable, Reply] = {}
        self._thread = ThreadPoolExecutor(1)
        self._swap: tuple[Future[None], int, Reply] | None = None

    @property
    def busy(self) -> bool:
        return self._engine.busy or self._swap is not None

    def handle(self, method: str, arguments: tuple[Any, ...], reply: Reply) -> None:
        if method == "generate":
            key, prompt_ids, sampling = arguments
            self._engine.submit(key, prompt_ids, sampling)
            self._replies[key] = reply
        elif method == "abort":
            (key,) = arguments
            self._engine.abort(key)
            self._replies.pop(key, None)
        elif method == "swap":
            ticket, version = arguments
            assert self._receiver is not None
            prepared = self._thread.submit(self._receiver.prepare, ticket)
            wait([prepared], timeout=0.001)  # a link with nothing to prepare need not wait for another step
            self._swap = (prepared, version, reply)
        else:
            reply(getattr(self, method)(*arguments))

    def tick(self) -> None:
        """Swap weights if a version is ready, and the engine drained where that is asked for; then take one step."""
        if self._swap and (self._swap[0].done() or not self._engine.busy):
            prepared, version, reply = self._swap
            failure, how = prepared.exception(), self._config.sync.interruption
            self._engine.draining = how == "drain" and not failure and self._engine.running > 0
            if not self._engine.draining:
                self._swap = None
                assert self._receiver is not None
                reply(failure or (self._engine.swap(version, self._receiver.apply, how), self.stats()))
        for key, completion in self._engine.step():
            self._replies.pop(key)(completion)

    def connect(self, offer: Ticket, version: int) -> None:
        _, receiver = find_link(self._config.sync.link)
        self._receiver = receiver(trained_parameters(self._model), offer)
        self._engine.swap(version, self._receiver.apply)

    def stats(self) -> dict[str, float]:
        """Totals since the start."""
        engine = self._engine
        return {"tokens": engine.tokens_generated, "wasted": engine.tokens_wasted, "busy": engine.busy_seconds}

    def close(self) -> None:
        if self._receiver:
            self._receiver.close()


class TrainerService:
    """A trainer and its end of the weight link. Every call is answered before the next is read."""

    busy = False

    def __init__(self, config: Config, run: str) -> None:
        torch.set_num_threads(_threads(config.trainer.threads, config))
        self._config, self._run = config, Path(run)
        self._trainer = Trainer(config)
        self._sender: Sender | None = None

    def handle(self, method: str, arguments: tuple[Any, ...], reply: Reply) -> None:
        reply(getattr(self, method)(*arguments))

    def tick(self) -> None:
        raise AssertionError("a trainer has no background work")

    def open_link(self) -> Ticket:
        sender, _ = find_link(self._config.sync.link)
        dtype: torch.dtype = getattr(torch, self._config.model.dtype)
        self._sender = sender(self._trainer.parameters, dtype, self._run)
        self._trainer.before_update = self._sender.before_update
        return self._sender.offer()

    def connected(self) -> None:
        self._link.connected()

    def stage(self, version: int) -> Ticket:
        return self._link.stage(version)

    def release(self, ticket: Ticket) -> None:
        self._link.release(ticket)

    def step(self, batch: Batch) -> StepStats:
        return self._trainer.step(batch)

    def score(self, completions: Sequence[Completion]) -> list[list[float]]:
        return self._trainer.score(completions)

    def save(self, path: str) -> None:
        self._trainer.save(Path(path))

    def restore(self, path: str) -> None:
        self._trainer.restore(Path(path))

    def export(self, path: str) -> None:
        self._trainer.export(Path(path))

    def close(self) -> None:
        if self._sender:
            self._sender.close()

    @property
    def _link(self) -> Sender:
        assert self._sender is not None, "open_link comes first"
        return self._sender


def _threads(option: int, config: Config) -> int:
    """CPU threads of one process: as asked, or all cores where sides take turns, else an equal share."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if option:
        return option
    sides = 1 if config.loop.max_lag == 0 else config.generator.count + 1
    return max(1, cores // sides)
