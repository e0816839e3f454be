"""The ranks of one trainer, and how weights and gradients are spread over them.

Every rank is a process with one device that gets every batch, works on its own share of it, and takes the same steps.
Either each holds all weights ("ddp") and gradients are summed once a step, or each holds a part of every weight
("fsdp", Zhao et al. 2023, arXiv:2304.11277), gathers a layer when it is computed, and keeps its part of the summed
gradient. Or all of them work on all of it, each with its part of every layer ("tensor", see `trainers.tensor`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from slipstream.config import ConfigError, TrainerConfig
from slipstream.models import layers_of
from slipstream.packed.context import Context
from slipstream.sync.gathered import part_here, whole
from slipstream.trainers.experts import spread_experts
from slipstream.trainers.precision import take_in


class Ranks:
    """The ranks that this process is one of, as `torchrun` names them in the environment.

    `files` and `calls` are groups on the CPU, for two threads that must not mix what they say.
    """

    def __init__(self, options: TrainerConfig, device: torch.device) -> None:
        """Wait for all ranks. Raises `ConfigError` if this process was started as one of another number."""
        self.size, self.rank, self.device = options.ranks, 0, device
        self.shares, self.share = 1, 0  # in how many parts a batch is worked on, and which is this rank's
        self.tensor = options.parallel == "tensor" and self.size > 1
        self.alike: frozenset[str] = frozenset()  # parameters that all ranks hold, and have parts of the gradient of
        self.files: Any = None
        self.calls: Any = None
        self.context: Context | None = None
        self.mesh: DeviceMesh | None = None
        self._experts: DeviceMesh | None = None
        if self.size == 1 and options.compute_copy:
            return
        if (started := int(os.environ.get("WORLD_SIZE", "1"))) != self.size:
            raise ConfigError(f"trainer.ranks = {self.size}, but {started} ranks were started; make them the same")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if not dist.is_initialized():
            # One rank is sharded, too, to have a layer's weights in the lower format only while it is computed.
            alone: dict[str, Any] = {"store": HashStore(), "rank": 0, "world_size": 1} if self.size == 1 else {}
            dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", **alone)
        self.rank = dist.get_rank()
        self.files, self.calls = (dist.new_group(backend="gloo") for _ in range(2))
        if self.tensor:
            self.mesh = init_device_mesh(device.type, (self.size,), mesh_dim_names=("tensor",))
            return
        if (each := options.context_parallel) > 1:
            self.context = Context(dist.new_subgroups(each)[0])  # type: ignore[no-untyped-call]
        self.shares, self.share = self.size // each, self.rank // each
        if options.parallel == "fsdp":
            shards = options.shards or self.size
            sizes = {"copies": self.size // shards, "shards": shards}
            names = tuple(name for name, size in sizes.items() if size > 1) or ("shards",)
            self.mesh = init_device_mesh(device.type, tuple(sizes[n] for n in names), mesh_dim_names=names)
        if (each := options.expert_parallel) > 1:
            names = ("copies", "experts")
            self._experts = init_device_mesh(device.type, (self.size // each, each), mesh_dim_names=names)

    @property
    def counts(self) -> bool:
        """Whether this rank counts what its share of a batch is, for all that work on that."""
        return self.rank % (self.size // self.shares) == 0

    @property
    def sharded(self) -> bool:
        """Whether each rank holds only a part of the weights."""
        return self.mesh is not None

    @property
    def gathers(self) -> bool:
        """Whether each rank gathers a layer's weights when it is computed."""
        return self.sharded and not self.tensor

    def shard(self, policy: Any, compute: torch.dtype) -> None:
        """Leave each rank its part of every weight, to be gathered in `compute`; gradients are summed in float32.

        The weights may lie on the CPU in another format: a layer goes to the device to be cut up, one at a time.
        """
        if not policy.packs:  # each rank would gather a layer as often as it has sequences
            what, remedy = (
                ('trainer.parallel = "fsdp"', 'use "ddp"')
                if self.size > 1
                else ("trainer.compute_copy = false", "leave it out")
            )
            raise ConfigError(f"{what} can't train a model whose layers carry a state; {remedy}")
        mixed = MixedPrecisionPolicy(
            param_dtype=None if compute == torch.float32 else compute,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,  # a batch keeps its log-probabilities as they are
        )
        experts = spread_experts(policy.model, self._experts["experts"], compute) if self._experts else []
        parts = [(module, self._experts["copies"]) for module in experts] if self._experts else []
        for module, mesh in (*parts, *((m, self.mesh) for m in (*layers_of(policy.model), policy))):
            take_in(module, self.device, compute)
            sharded: FSDPModule = fully_shard(module, mesh=mesh, mp_policy=mixed)
            # The loss has one denominator, so gradients are added up, not averaged.
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)

    def sum_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Add up the gradients of all ranks, where that is not done as they come."""
        if self.size == 1 or self.gathers:
            return
        summed = [p for name, p in parameters.items() if name in self.alike or not self.tensor]
        for parameter in summed:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for work in [dist.all_reduce(part_here(cast(Tensor, p.grad)), async_op=True) for p in summed]:
            work.wait()

    def add(self, values: Tensor) -> Tensor:
        """Values of all ranks, added up in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def union(self, entries: dict[int, Any]) -> dict[int, Any]:
        """The entries of all ranks."""
        if self.shares == 1:
            return entries
        return {key: value for part in self.each(entries) for key, value in part.items()}

    def each(self, value: Any) -> list[Any]:
        """What each rank says, as plain data."""
        said: list[Any] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(said, value, group=self.calls)
        return said

    def forget_gathered(self, policy: nn.Module) -> None:
        """Leave only parts in memory after passes that no backward pass has followed."""
        if self.gathers:
            cast(FSDPModule, policy).reshard()

    def most(self, value: float) -> float:
        """The largest of all ranks' values."""
        if self.size == 1:
            return value
        largest = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.calls)
        return largest.item()


def by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters that are spread over the same ranks together: what is done to many at once can't mix them."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return list(groups.values())


def clip_gradients(parameters: Iterable[nn.Parameter], most: float) -> float:
    """Scale gradients so that their norm over all ranks is at most `most`. Returns what it was."""
    groups = [[p.grad for p in group if p.grad is not None] for group in by_mesh(parameters)]
    norms = [whole(nn.utils.get_total_norm(gradients)) for gradients in groups]
    norm: float = torch.linalg.vector_norm(torch.stack(norms)).item()
    held = [part_here(gradient) for gradients in groups for gradient in gradients]
    if held and norm > most:
        torch._foreach_mul_(held, most / (norm + 1e-6))
    return norm
