"""Assignment of GPUs and CPU threads to the processes of a run, computed before any process starts."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.config.checks import is_changed
from slipstream.config.loading import with_absolute_paths, with_options
from slipstream.config.schema import Config, ConfigError
from slipstream.model.device import dtype_name
from slipstream.model.inspection import model_type

# Model types whose parameters vLLM transposes, permutes, renames or multiplies by constants.
RESTARTED = ("bloom", "falcon_h1", "gpt2", "gpt_neox")
VISIBLE = "CUDA_VISIBLE_DEVICES"
FAST_NETWORK = 1.25e9  # bytes/s, 10 Gbit/s: above, all weights by `nccl` arrive about as soon as changes by `delta`
GPU_OPTIONS = ("trainer.offload_optimizer",)  # have no effect without a GPU


@dataclass(frozen=True)
class Network:
    """The network between hosts: bytes/s between the slowest pair (0: unknown), and whether all have RDMA devices."""

    rate: float = 0.0
    rdma: bool = False


@dataclass(frozen=True)
class Placement:
    """GPU indices of each generator but servers, and one for each trainer rank. Empty for processes on the CPU."""

    generators: tuple[tuple[int, ...], ...]
    trainer: tuple[int, ...]

    @property
    def shared(self) -> bool:
        """Whether a generator uses the same GPU as the trainer or another generator."""
        taken = [gpu for gpus in (*self.generators, self.trainer) for gpu in gpus]
        return len(set(taken)) < len(taken)

    def sharers(self, gpus: Iterable[int]) -> int:
        """Largest number of generators and trainer ranks that share one of these GPUs; 1 without a GPU.

        A generator that is added later has GPUs outside the placement, and shares them with no other.
        """
        users = (*self.generators, self.trainer)
        return max((sum(gpu in used for used in users) or 1 for gpu in gpus), default=1)


def gpus_of_engine(placement: Placement, number: int, gpus: int) -> tuple[int, ...]:
    """GPUs of an engine: those of the placement, else the next free ones of `gpus`. Raises `ConfigError` if too few."""
    planned = placement.generators
    if number < len(planned):
        return planned[number]
    used = {gpu for taken in (*planned, placement.trainer) for gpu in taken}
    free, each = [gpu for gpu in range(gpus) if gpu not in used], len(planned[0])
    start = (number - len(planned)) * each
    if start + each > len(free):
        most = len(planned) + len(free) // each
        raise ConfigError(f"there are GPUs for {most} engines of {each}, not for {number + 1}")
    return tuple(free[start : start + each])


def resolve_auto(config: Config, gpus: int | None = None, hosts: int = 1, network: Network | None = None) -> Config:
    """The configuration with every "auto" resolved and relative paths made absolute, as a run records it.

    `gpus` counts those of all `hosts`, by default of this one; `network` is between them. Raises `ConfigError` if the
    GPUs are too few.
    """
    gpus = gpus_here() if gpus is None else gpus
    place(config, gpus)
    if config.sync.link == "auto":
        link, why = choose_link(config, gpus, hosts, network or Network())
        resolved: dict[str, Any] = {"link": link, "chosen": f"{link}: {why}"}
        if _needs_restarts(config):
            drains = config.sync.in_flight == "drain"
            resolved = {"link": "checkpoint", "restart": True, "in_flight": "drain" if drains else "retry"}
            resolved["chosen"] = "checkpoint: vLLM stores this model in a layout that no link can write"
        config = with_options(config, sync=config.sync.model_dump() | resolved)
    return with_absolute_paths(
        with_options(config, model=config.model.model_dump() | {"dtype": dtype_name(config, gpus)})
    )


def _needs_restarts(config: Config) -> bool:
    """Whether engines must restart to load weights: the run's own vLLM engines store them in a layout of their own."""
    generator = config.generator
    own_vllm = generator.engine == "vllm" and not generator.servers
    return own_vllm and not config.serves_adapters and model_type(config.model.path) in RESTARTED


def choose_link(config: Config, gpus: int, hosts: int, network: Network) -> tuple[str, str]:
    """The weight link that `sync.link = "auto"` means on these GPUs and hosts, and why. Raises as `place`."""
    generator, own = config.generator, ":" in config.generator.engine + config.trainer.kind
    if config.sync.restart:
        return "checkpoint", "engines restart on files"
    if config.serves_adapters:
        return "lora", "vLLM serves adapters"
    if generator.remote:
        return "delta", f"the network to {generator.remote} is unknown"
    placement = place(config, gpus)
    if config.policies:
        return ("checkpoint", "several policies on several hosts") if hosts > 1 else ("shared", "several policies")
    if hosts > 1 and not placement.shared:
        return _choose_between_hosts(network) if _serves_as_trained(config) else ("nccl", "engines quantize weights")
    if own or config.sync.placement == "colocated":
        return "shared", "engine or trainer is your own class" if own else "engines and trainer take turns"
    if not (placement.trainer and all(placement.generators)):
        return "shared", "engines or trainer are on the CPU of one host"
    if generator.servers:  # on a host with one GPU the servers share it with the trainer
        return ("nccl", "servers and trainer have GPUs") if gpus > 1 else ("shared", "one GPU")
    if not placement.shared:
        return "nccl", "engines and trainer have their own GPUs"
    if placement.generators == (placement.trainer,) and _fits_single_copy(config):
        return "single_copy", "engine and trainer are on the same GPUs"
    return "shared", "engines share a GPU"


def _choose_between_hosts(network: Network) -> tuple[str, str]:
    """As `choose_link`, for engines that may be on other hosts than the trainer."""
    if network.rdma:
        return "nccl", "all hosts have InfiniBand or RoCE"
    if not network.rate:
        return "nccl", "several hosts"
    rate, least = (f"{8 * value / 1e9:.3g} Gbit/s" for value in (network.rate, FAST_NETWORK))
    if network.rate < FAST_NETWORK:
        return "delta", f"{rate} between the slowest hosts, less than {least}"
    return "nccl", f"{rate} between the slowest hosts, at least {least}"


def _fits_single_copy(config: Config) -> bool:
    """Whether a trainer can compute on the weights of the vLLM engine on its GPU."""
    possible = (
        config.trainer.keep_compute_copy and config.trainer.ranks == config.sync.every == 1 and not config.lora.rank
    )
    engine = config.generator.engine == "vllm" and _serves_as_trained(config)
    return possible and engine and dtype_name(config) == "bfloat16"


def _serves_as_trained(config: Config) -> bool:
    """Whether vLLM serves the trainer's own values, so that a link can write these in place."""
    return "quantization" not in config.generator.engine_args


def place(config: Config, gpus: int) -> Placement:
    """Assign GPUs, `gpus` in all, to generators and trainer ranks.

    Generators take the first GPUs, `generator.gpus_per_engine` each, and trainer ranks the next ones, or in a
    colocated run the same ones. With one GPU all processes share it. With vLLM servers only, the trainer takes the
    first GPU. `generator.device` and `trainer.device` override the first GPU of all generators and of all ranks.

    Raises `ConfigError` if there are too few GPUs, or if a device or link doesn't suit the assignment.
    """
    generator, colocated = config.generator, config.sync.placement == "colocated"
    ranks, count = config.trainer.ranks, generator.engines
    asked = f"generator.replicas = {count} with {generator.engine_size}"
    wanted = count * generator.gpus_per_engine
    _validate_gpus(config, gpus, asked)
    if config.sync.link == "single_copy":
        return _place_single_copy(config, gpus)
    generators = _place_generators(config, gpus)
    used = sorted({gpu for found in generators for gpu in found})
    left = [gpu for gpu in range(gpus) if gpus == 1 or gpu not in used]
    if colocated:
        left = [*used, *(gpu for gpu in left if gpu not in used)]
    short = (generator.device == "auto" and wanted > gpus) or (config.trainer.device == "auto" and len(left) < ranks)
    if gpus > 1 and short:
        needed = max(wanted, ranks) if colocated else wanted + ranks
        raise ConfigError(
            f"{asked} and trainer.ranks = {ranks} need {needed} GPUs, but there are {gpus}; lower one of them, "
            "or name generator.device and trainer.device to share"
        )
    placement = Placement(
        generators, _gpus_of_device(f"trainer.ranks = {ranks}", config.trainer.device, tuple(left[:ranks]), gpus, ranks)
    )
    _validate_link(config.sync.link, placement, gpus)
    return placement


def _place_generators(config: Config, gpus: int) -> tuple[tuple[int, ...], ...]:
    """GPUs of each generator. Raises `ConfigError` if colocated generators would share a GPU."""
    generator, each = config.generator, config.generator.gpus_per_engine
    spread = [tuple(range(i * each, (i + 1) * each)) if gpus > 1 else (0,) for i in range(generator.engines)]
    generators = tuple(_gpus_of_device(generator.engine_size, generator.device, found, gpus, each) for found in spread)
    assigned = [gpu for found in generators for gpu in found]
    if config.sync.placement == "colocated" and len(set(assigned)) < len(assigned):
        raise ConfigError(
            f'generator.device = "{generator.device}" puts {generator.engines} generators on the same GPU, and each '
            'takes most of its memory where sync.placement = "colocated"; leave it out, or set generator.replicas = 1'
        )
    return generators


def _validate_gpus(config: Config, gpus: int, asked: str) -> None:
    """Raise `ConfigError` if one role alone needs more GPUs than there are; `asked` names the generators' options."""
    generator, ranks = config.generator, config.trainer.ranks
    wanted = generator.engines * generator.gpus_per_engine
    if gpus and config.sync.placement == "colocated" and wanted > gpus:
        raise ConfigError(f"{asked} need {wanted} GPUs, but there are {gpus}; lower one of them")
    if 0 < gpus < ranks and config.trainer.device != "cpu":
        raise ConfigError(f"trainer.ranks = {ranks}, but there are {gpus} GPUs here, and each rank needs its own")
    if generator.tensor_parallel_size > max(1, gpus) or generator.gpus_per_engine > gpus > 0:
        raise ConfigError(f"{generator.engine_size}, but there are {gpus} GPUs here")


def _validate_link(link: str, placement: Placement, gpus: int) -> None:
    """Raise `ConfigError` if NCCL can't connect the processes of this placement."""
    if link == "nccl_direct" and not gpus:
        raise ConfigError('sync.link = "nccl_direct" needs GPUs, and there are none here; use "shared"')
    if placement.shared and link.startswith("nccl"):
        raise ConfigError(
            f'sync.link = "{link}" can\'t connect a GPU with itself, and two processes share one here; use '
            '"single_copy" or "shared"'
        )


def _place_single_copy(config: Config, gpus: int) -> Placement:
    """Engines and trainer ranks, in processes of their own, on the same GPUs.

    An engine with tensor parallelism uses all of them; otherwise each has an engine. Raises `ConfigError` for too few
    GPUs, or if options of both name different devices.
    """
    devices, ranks = (config.generator.device, config.trainer.device), config.trainer.ranks
    engines = f"generator.replicas = {config.generator.replicas} with {config.generator.engine_size}"
    sides = [s for s in zip((engines, f"trainer.ranks = {ranks}"), devices, strict=True) if s[1] != "auto"]
    both, *others = [_gpus_of_device(*side, tuple(range(ranks)), gpus, ranks) for side in sides or [(engines, "auto")]]
    if not both:
        raise ConfigError('sync.link = "single_copy" needs a GPU, and there is none for it here; use "shared"')
    if others not in ([], [both]):
        raise ConfigError(
            'sync.link = "single_copy" needs generator and trainer on the same GPUs, and generator.device = '
            f'"{devices[0]}" and trainer.device = "{devices[1]}" are others; leave one of them out'
        )
    if config.generator.tensor_parallel_size > 1:
        return Placement((both,), both)
    return Placement(tuple((gpu,) for gpu in both), both)


def idle_options(config: Config, gpus: int) -> list[str]:
    """Changed options that do nothing on this number of GPUs."""
    return [name for name in GPU_OPTIONS if is_changed(config, name)] if not gpus else []


def gpus_here() -> int:
    """Number of GPUs that this process can use."""
    return torch.cuda.device_count()


def visible(gpus: tuple[int, ...]) -> dict[str, str]:
    """Environment variables that restrict a child process to `gpus`, indices into the GPUs visible to this process."""
    mine = os.environ.get(VISIBLE)
    names = mine.split(",") if mine else None
    return {VISIBLE: ",".join(names[gpu] if names else str(gpu) for gpu in gpus)}


def _gpus_of_device(asked: str, device: str, found: tuple[int, ...], gpus: int, count: int) -> tuple[int, ...]:
    """`count` GPUs from the index in `device`, `found` if it is "auto", or none on the CPU.

    `asked` is the option that sets the count, with its value: errors name it and its side.
    """
    if device == "auto" and gpus:
        return found
    if not device.startswith("cuda"):
        return ()
    first = int(device.partition(":")[2] or 0)
    if first + count > gpus:
        side = asked.partition(".")[0]
        raise ConfigError(
            f'{side}.device = "{device}" with {asked} needs {first + count} GPUs, but there are {gpus} '
            "here; name an earlier one, or leave it out"
        )
    return tuple(range(first, first + count))


def threads(option: int, config: Config) -> int:
    """CPU threads of one process: `option` if positive, else an equal share of the cores.

    With lag 0 or colocated placement engines and trainer compute alternately, so the cores are divided by the larger of
    both numbers of processes.
    """
    if option:
        return option
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    turns = config.loop.max_lag == 0 or config.sync.placement == "colocated"
    engines, ranks = config.generator.engines, config.trainer.ranks
    return max(1, cores // (max(engines, ranks) if turns else engines + ranks))
