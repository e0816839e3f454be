"""Which GPUs, and how many threads, each process of a run uses: arithmetic, before anything is started."""

from __future__ import annotations

import os
from dataclasses import dataclass

from slipstream.config import Config, ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Placement:
    """GPUs by number for each generator, and for the trainer's ranks one each; none on a host without, or for a side on
    the CPU."""

    generators: tuple[tuple[int, ...], ...]
    trainer: tuple[int, ...]

    @property
    def shared(self) -> bool:
        """Whether a generator and the trainer use the same GPU."""
        return any(gpu in self.trainer for gpus in self.generators for gpu in gpus)


def place(config: Config, gpus: int) -> Placement:
    """Generators on the first GPUs, `tensor_parallel` each, the trainer's ranks on the next; on one GPU all share it,
    and in a colocated run the trainer has one of theirs.

    `generator.device` and `trainer.device` have the last word. Raises `ConfigError` where there are too few.
    """
    generator, colocated = config.generator, config.sync.placement == "colocated"
    wanted = generator.count * generator.tensor_parallel
    if gpus and colocated and wanted > gpus:
        raise ConfigError(
            f"generator.count = {generator.count} with generator.tensor_parallel = {generator.tensor_parallel} need "
            f"{wanted} GPUs, but there are {gpus}; lower one of them"
        )
    ranks = config.trainer.ranks
    together = colocated or config.sync.link == "single_copy"
    needed = wanted + (0 if config.trainer.device != "auto" or together else ranks)
    if gpus > 1 and generator.device == "auto" and needed > gpus:
        raise ConfigError(
            f"generator.count = {generator.count} with generator.tensor_parallel = {generator.tensor_parallel} and "
            f"trainer.ranks = {ranks} need {wanted + ranks} GPUs, but there are {gpus}; lower one of them, or name "
            "generator.device and trainer.device to share"
        )
    if 0 < gpus < ranks and config.trainer.device != "cpu":
        raise ConfigError(f"trainer.ranks = {ranks}, but there are {gpus} GPUs here, and each rank needs its own")
    if generator.tensor_parallel > max(1, gpus):
        raise ConfigError(f"generator.tensor_parallel = {generator.tensor_parallel}, but there are {gpus} GPUs here")
    each = generator.tensor_parallel
    if config.sync.link == "single_copy":
        if not gpus:
            raise ConfigError('sync.link = "single_copy" needs a GPU, and there is none here; use "shared"')
        both = tuple(range(each))
        return Placement((both,), both)
    spread = [tuple(range(i * each, (i + 1) * each)) if gpus > 1 else (0,) for i in range(generator.count)]
    first = wanted if gpus > 1 and not colocated else 0
    placement = Placement(
        tuple(_chosen(generator.device, found, gpus, each) for found in spread),
        _chosen(config.trainer.device, tuple(range(first, first + ranks)), gpus, ranks),
    )
    if placement.shared and config.sync.link.startswith("nccl"):
        raise ConfigError(
            f'sync.link = "{config.sync.link}" can\'t connect a GPU with itself, and generator and trainer share one '
            'here; use "single_copy" or "shared"'
        )
    return placement


def visible(gpus: tuple[int, ...]) -> dict[str, str]:
    """The environment of a process that shall see these GPUs alone, of those that this process may see."""
    mine = os.environ.get(VISIBLE)
    names = mine.split(",") if mine else None
    return {VISIBLE: ",".join(names[gpu] if names else str(gpu) for gpu in gpus)}


def _chosen(device: str, found: tuple[int, ...], gpus: int, count: int) -> tuple[int, ...]:
    if not gpus or device == "cpu":
        return ()
    if device.startswith("cuda:"):
        first = int(device.removeprefix("cuda:"))
        return tuple(range(first, first + count))
    return found if device == "auto" else tuple(range(count))


def threads(option: int, config: Config) -> int:
    """CPU threads of one process: as asked, or all cores where sides take turns, else an equal share."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if option:
        return option
    turns = config.loop.max_lag == 0 or config.sync.placement == "colocated"
    ranks = config.trainer.ranks
    sides = max(config.generator.count, ranks) if turns else config.generator.count + ranks
    return max(1, cores // sides)
