"""Processes of engines and trainer that import their classes while the controller imports and validates, too."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from slipstream.config.schema import Config
from slipstream.runtime.process import prestart, stop_prestarted

# Worker classes of `generator.engine` and `trainer.kind`; other names are `module:Class` of the user.
WORKER_CLASSES = {
    "torch": "slipstream.generators.generator_worker:GeneratorWorker",
    "vllm": "slipstream.generators.vllm.engine:VllmWorker",
    "pytorch": "slipstream.trainers.trainer_worker:PytorchTrainerWorker",
}
# What a process runs before its worker class is built, if that is not only the import of the class.
PRELOADS = {"slipstream.generators.vllm.engine:VllmWorker": "slipstream.generators.vllm.preload:preload"}


@contextmanager
def prestarted(config: Config) -> Iterator[None]:
    """Context in which the run finds processes for its trainer and engines that have begun to import.

    There is at most one for each processor. Those that the run does not use are killed. Ray starts processes only where
    it has reserved resources.
    """
    engines, trainers = (WORKER_CLASSES.get(name, "") for name in (config.generator.engine, config.trainer.kind))
    kinds = [trainers] * config.trainer.ranks + [engines] * config.generator.engines
    try:
        for kind in filter(None, kinds[: os.cpu_count()] if config.runtime.kind == "local" else ()):
            prestart(PRELOADS.get(kind, kind))
        yield
    finally:
        stop_prestarted()
