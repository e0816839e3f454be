"""Processes of engines and trainer that import their classes while the controller imports and validates, too."""

from __future__ import annotations

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
    """Context in which the run finds processes for its engines and trainer that have begun to import.

    Those that it does not use are killed at the end. Ray starts processes only where it has reserved resources.
    """
    engines, trainers = (WORKER_CLASSES.get(name, "") for name in (config.generator.engine, config.trainer.kind))
    kinds = [engines] * config.generator.engines + [trainers] * config.trainer.ranks
    try:
        for kind in kinds if config.runtime.kind == "local" else ():
            if kind:
                prestart(PRELOADS.get(kind, kind))
        yield
    finally:
        stop_prestarted()
