"""Several policies in one trainer, each with its optimizer and objective: adapters that share a model, or models.

Consumes batches with rollouts of all policies. A step of the run is a step of each policy that has rollouts in it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from slipstream.config.schema import Config
from slipstream.model.device import current_device
from slipstream.model.inspection import policy_parameters
from slipstream.model.loading import load_adapter
from slipstream.rollout import Batch, Completion
from slipstream.step_stats import StepStats, merge
from slipstream.trainers.trainer import Trainer, load_trained_model


class PolicyTrainers:
    """A `Trainer` of each policy, with the methods of one. `parameters` are those of all, named by their policies."""

    def __init__(self, config: Config) -> None:
        torch.manual_seed(config.loop.seed)
        self.device = current_device()
        own, self._trainers = config.each_policy, dict[str, Trainer]()
        for trained in config.each_model:
            model = load_trained_model(trained, self.device)
            frozen = {id(p): p for p in model.parameters() if not p.requires_grad}
            for policy in trained.policies:
                adapted = copy.deepcopy(model, dict(frozen)) if config.lora.rank else model
                if policy.adapter:
                    load_adapter(adapted, policy.adapter)
                self._trainers[policy.name] = Trainer(own[policy.name], adapted)
        self.ranks = next(iter(self._trainers.values())).ranks
        self.parameters = {
            policy_name: parameter
            for name, trainer in self._trainers.items()
            for policy_name, parameter in policy_parameters(trainer.parameters, name).items()
        }
        self._waiting = ThreadPoolExecutor(1, "checkpoint")

    @property
    def micro_batches(self) -> int:
        return sum(trainer.micro_batches for trainer in self._trainers.values())

    @property
    def before_update(self) -> Callable[[], None]:
        return next(iter(self._trainers.values())).before_update

    @before_update.setter
    def before_update(self, call: Callable[[], None]) -> None:
        for trainer in self._trainers.values():
            trainer.before_update = call

    def step(self, batch: Batch) -> StepStats:
        """A step of each policy that has rollouts in the batch."""
        own = {name: batch.of_policy(name) for name in self._trainers}
        stats = {name: self._trainers[name].step(part) for name, part in own.items() if part.groups}
        step = max(trainer.step_count for trainer in self._trainers.values())
        return merge(stats, step=step, skipped_steps=sum(t.skipped_count for t in self._trainers.values()))

    def score(self, completions: Sequence[Completion]) -> list[list[float]]:
        """As `Trainer.score`, each completion by its policy."""
        scored: dict[int, list[float]] = {}
        for name, trainer in self._trainers.items():
            own = [i for i, completion in enumerate(completions) if completion.policy == name]
            scored |= dict(zip(own, trainer.score([completions[i] for i in own]), strict=True))
        return [scored[i] for i in range(len(completions))]

    def save(self, path: Path, last: bool = False) -> Future[Any]:
        """As `Trainer.save`, with a directory for each policy."""
        saving = [trainer.save(path / name, last) for name, trainer in self._trainers.items()]
        return self._waiting.submit(lambda: [each.result() for each in saving])

    def offload(self) -> bool:
        fit = [trainer.offload() for trainer in self._trainers.values()]
        return all(fit)

    def make_room(self) -> None:
        for trainer in self._trainers.values():
            trainer.make_room()

    def onload(self) -> None:
        for trainer in self._trainers.values():
            trainer.onload()

    def restore(self, path: Path) -> None:
        for name, trainer in self._trainers.items():
            trainer.restore(path / name)

    def export(self, path: Path) -> None:
        """Write each policy as `Trainer.export`."""
        for name, trainer in self._trainers.items():
            trainer.export(path / name)
