"""Which GPUs, and how many threads, each process of a run uses: arithmetic, before anything is started."""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.config import Config, ConfigError, with_absolute_paths, with_options
from slipstream.models import dtype_name, model_type

RESTARTED = ("falcon_h1", "gpt2")  # model types that vLLM stores transposed, or multiplied by constants
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Placement:
    """GPUs by number for each generator, and for the trainer's ranks one each; none on a host without, or for a side on
    the CPU. Servers are no generators here."""

    generators: tuple[tuple[int, ...], ...]
    trainer: tuple[int, ...]

    @property
    def shared(self) -> bool:
        """Whether a generator uses the same GPU as the trainer or another generator."""
        taken = [gpu for gpus in (*self.generators, self.trainer) for gpu in gpus]
        return len(set(taken)) < len(taken)

    def sharers(self, gpus: Iterable[int]) -> int:
        """Number of generators and trainer ranks that use the same one of these GPUs, at most; 1 without a GPU."""
        return max((sum(gpu in used for used in (*self.generators, self.trainer)) for gpu in gpus), default=1)


class GpuLocks:
    """Lets processes that share a GPU start one after the other.

    vLLM sizes its cache by how much free memory shrinks while it starts, so it counts what another process allocates
    meanwhile as its own.
    """

    def __init__(self) -> None:
        self._locks: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)

    @asynccontextmanager
    async def hold(self, gpus: Iterable[int]) -> AsyncIterator[None]:
        """Wait until no other process starts on these GPUs, and keep others from it."""
        async with AsyncExitStack() as held:
            for gpu in sorted(set(gpus)):  # in one order for all, so that no two wait for each other
                await held.enter_async_context(self._locks[gpu])
            yield


def settled(config: Config) -> Config:
    """The configuration with every "auto" resolved for this host and relative paths made absolute, as a run records it.

    Raises `ConfigError` where the host has too few GPUs.
    """
    gpus, ranks = gpus_here(), ranks_here(config.trainer.ranks)
    place(config, gpus, ranks)
    if config.sync.link == "auto":
        chosen: dict[str, Any] = {"link": choose_link(config, gpus, ranks)}
        if _needs_restarts(config):
            drains = config.sync.interruption == "drain"
            chosen = {"link": "checkpoint", "restart": True, "interruption": "drain" if drains else "retry"}
        config = with_options(config, sync=config.sync.model_dump() | chosen)
    return with_absolute_paths(with_options(config, model=config.model.model_dump() | {"dtype": dtype_name(config)}))


def _needs_restarts(config: Config) -> bool:
    """Whether vLLM engines of the run store the model's parameters in a layout that no link can write."""
    generator = config.generator
    written = generator.kind != "vllm" or bool(generator.servers) or config.serves_adapters
    return not written and model_type(config.model.path) in RESTARTED


def choose_link(config: Config, gpus: int, ranks: int = 0) -> str:
    """The weight link that `sync.link = "auto"` names on a host with this many GPUs and trainer ranks.

    The choice depends on the engine, on adapters, and on which GPUs the trainer and the generators use.
    Raises `ConfigError` where there are too few GPUs.
    """
    generator, own = config.generator, ":" in config.generator.kind + config.trainer.kind
    if config.sync.restart or generator.remote:
        return "checkpoint"
    if config.serves_adapters:
        return "lora"
    placement = place(config, gpus, ranks)
    if own or config.sync.placement == "colocated" or not (placement.trainer and all(placement.generators)):
        return "shared"
    if generator.servers:  # on a host with one GPU they share it with the trainer
        return "nccl" if gpus > 1 else "shared"
    if not placement.shared:
        return "nccl"
    return "single_copy" if placement.generators == (placement.trainer,) and _fits_single_copy(config) else "shared"


def _fits_single_copy(config: Config) -> bool:
    """Whether a trainer can compute on the weights of the vLLM engine on its GPU."""
    possible = config.trainer.compute_copy and config.trainer.ranks == config.sync.every == 1 and not config.lora.rank
    return possible and config.generator.kind == "vllm" and dtype_name(config) == "bfloat16"


def place(config: Config, gpus: int, ranks: int = 0) -> Placement:
    """Generators on the first GPUs, `tensor_parallel` each, the trainer's ranks on the next; on one GPU all share it,
    and in a colocated run the trainer has one of theirs. Beside servers the trainer has the first.

    `generator.device` and `trainer.device` have the last word: the first GPU of each generator, and of the ranks. Of
    these `ranks` are on this host, by default all.
    Raises `ConfigError` where there are too few.
    """
    generator, colocated = config.generator, config.sync.placement == "colocated"
    each, ranks = generator.tensor_parallel, ranks or config.trainer.ranks
    count = generator.engines
    asked = f"generator.count = {count} with generator.tensor_parallel = {each}"
    wanted = count * each
    told = "trainer.ranks =" if ranks == config.trainer.ranks else "of trainer.ranks, here"
    if gpus and colocated and wanted > gpus:
        raise ConfigError(f"{asked} need {wanted} GPUs, but there are {gpus}; lower one of them")
    if 0 < gpus < ranks and config.trainer.device != "cpu":
        raise ConfigError(f"{told} {ranks}, but there are {gpus} GPUs here, and each rank needs its own")
    if each > max(1, gpus):
        raise ConfigError(f"generator.tensor_parallel = {each}, but there are {gpus} GPUs here")
    if config.sync.link == "single_copy":
        return _on_the_same(config, gpus)
    spread = [tuple(range(i * each, (i + 1) * each)) if gpus > 1 else (0,) for i in range(count)]
    generators = tuple(_chosen("generator", generator.device, found, gpus, each) for found in spread)
    used = sorted({gpu for found in generators for gpu in found})
    if colocated and len(used) < sum(map(len, generators)):
        raise ConfigError(
            f'generator.device = "{generator.device}" puts {count} generators on the same GPU, and each takes most of '
            'its memory where sync.placement = "colocated"; leave it out, or set generator.count = 1'
        )
    left = [gpu for gpu in range(gpus) if gpus == 1 or gpu not in used]
    if colocated:
        left = used or left
    short = (generator.device == "auto" and wanted > gpus) or (config.trainer.device == "auto" and len(left) < ranks)
    if gpus > 1 and short:
        raise ConfigError(
            f"{asked} and {told} {ranks} need {wanted + ranks} GPUs, but there are {gpus}; lower one of them, "
            "or name generator.device and trainer.device to share"
        )
    placement = Placement(generators, _chosen("trainer", config.trainer.device, tuple(left[:ranks]), gpus, ranks))
    if config.sync.link == "nccl_direct" and not gpus:
        raise ConfigError('sync.link = "nccl_direct" needs GPUs, and there are none here; use "shared"')
    if placement.shared and config.sync.link.startswith("nccl"):
        raise ConfigError(
            f'sync.link = "{config.sync.link}" can\'t connect a GPU with itself, and generators and trainer share one '
            'here; use "single_copy" or "shared"'
        )
    return placement


def _on_the_same(config: Config, gpus: int) -> Placement:
    """The one generator and the trainer on the same GPUs. Raises `ConfigError` where their devices are others."""
    devices, each = (config.generator.device, config.trainer.device), config.generator.tensor_parallel
    named = [device for device in devices if device != "auto"] or ["auto"]
    both = _chosen("generator", named[0], tuple(range(each)), gpus, each)
    if not both:
        raise ConfigError('sync.link = "single_copy" needs a GPU, and there is none for it here; use "shared"')
    if both != _chosen("trainer", named[-1], both, gpus, each):
        raise ConfigError(
            'sync.link = "single_copy" needs generator and trainer on the same GPUs, and generator.device = '
            f'"{devices[0]}" and trainer.device = "{devices[1]}" are others; leave one of them out'
        )
    return Placement((both,), both)


def gpus_here() -> int:
    """How many GPUs this host lends to this process."""
    return torch.cuda.device_count()


def under_torchrun() -> bool:
    """Whether `torchrun` started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def ranks_here(ranks: int) -> int:
    """How many of the trainer's ranks are on this host."""
    return int(os.environ["LOCAL_WORLD_SIZE"]) if under_torchrun() else ranks


def visible(gpus: tuple[int, ...]) -> dict[str, str]:
    """The environment of a process that shall see these GPUs alone, of those that this process may see."""
    mine = os.environ.get(VISIBLE)
    names = mine.split(",") if mine else None
    return {VISIBLE: ",".join(names[gpu] if names else str(gpu) for gpu in gpus)}


def _chosen(side: str, device: str, found: tuple[int, ...], gpus: int, count: int) -> tuple[int, ...]:
    """So many GPUs from the one that a side's device names, or those found for it. Raises `ConfigError`."""
    if device == "auto" and gpus:
        return found
    if not device.startswith("cuda"):
        return ()
    first = int(device.partition(":")[2] or 0)
    if first + count > gpus:
        each = {"generator": "tensor_parallel", "trainer": "ranks"}[side]
        raise ConfigError(
            f'{side}.device = "{device}" with {side}.{each} = {count} needs {first + count} GPUs, but there are {gpus} '
            "here; name an earlier one, or leave it out"
        )
    return tuple(range(first, first + count))


def threads(option: int, config: Config) -> int:
    """CPU threads of one process: as asked, or all cores where sides take turns, else an equal share. Servers have
    their own."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if option:
        return option
    turns = config.loop.max_lag == 0 or config.sync.placement == "colocated"
    torchrun = os.environ if "TORCHELASTIC_RUN_ID" in os.environ else {}
    engines = 0 if torchrun.get("GROUP_RANK", "0") != "0" else config.generator.engines  # which are on its first host
    ranks = int(torchrun.get("LOCAL_WORLD_SIZE", config.trainer.ranks))
    return max(1, cores // (max(engines, ranks) if turns else engines + ranks))
