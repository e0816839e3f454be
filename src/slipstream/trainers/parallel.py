"""The ranks of one trainer: process groups, sharding, and collectives.

Every rank is a process with one device. Each gets every batch, computes its part, and takes the same optimizer step.
"ddp": each rank holds all weights, and gradients are summed once a step. "fsdp" (Zhao et al. 2023, arXiv:2304.11277):
each rank holds a shard of every weight, gathers one layer at a time, and keeps its shard of the summed gradient; with
expert parallelism it doesn't gather experts (`trainers.experts`).
"tensor": all ranks compute the same tokens, each with its part of every layer (`trainers.tensor_parallel`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import FileStore, HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from slipstream.config.schema import ConfigError, TrainerConfig
from slipstream.model.context_parallel import ContextParallelGroup
from slipstream.model.inspection import decoder_layers
from slipstream.runtime.addresses import RENDEZVOUS_FILE
from slipstream.sync.sharded_weights import full_tensor, local_part
from slipstream.trainers.experts import shard_experts
from slipstream.trainers.master_weights import cast_parameters


def rendezvous(ranks: int) -> dict[str, Any]:
    """Arguments of `torch.distributed.init_process_group` for a trainer rank: its store, or {} for `env://`.

    Ranks on one host have a file, ranks on several hosts and those of `torchrun` have an address in the environment.
    One rank uses FSDP, too, if it casts a layer to the compute dtype only while the layer runs.
    """
    if ranks == 1:
        return {"store": HashStore(), "rank": 0, "world_size": 1}
    if file := os.environ.get(RENDEZVOUS_FILE):
        return {"store": FileStore(file, ranks), "rank": int(os.environ["RANK"]), "world_size": ranks}
    return {}


class TrainerRanks:
    """Process groups and meshes of this trainer rank, whose number is in the environment, as with `torchrun`.

    `data_parallel_size` is the number of parts of a batch, `data_parallel_rank` this rank's part. `context` and `mesh`
    are None unless the options use them. `partial_gradients` names replicated parameters of which each rank has only
    a part of the gradient (tensor parallelism). `checkpoint_group` and `control_group` are CPU groups for two threads.
    """

    def __init__(self, options: TrainerConfig, device: torch.device) -> None:
        """Wait for all ranks. Raises `ConfigError` if the number of started ranks is not `trainer.ranks`."""
        self.size, self.rank, self.device = options.ranks, 0, device
        self.data_parallel_size, self.data_parallel_rank = 1, 0
        self.is_tensor_parallel = options.parallel == "tensor" and self.size > 1
        self.partial_gradients: frozenset[str] = frozenset()
        self.checkpoint_group: Any = None
        self.control_group: Any = None
        self.context: ContextParallelGroup | None = None
        self.mesh: DeviceMesh | None = None
        self._experts: DeviceMesh | None = None
        self._expert_parameters: set[nn.Parameter] = set()
        if self.size == 1 and options.keep_compute_copy:
            return
        if (started := int(os.environ.get("WORLD_SIZE", "1"))) != self.size:
            raise ConfigError(f"trainer.ranks = {self.size}, but {started} ranks were started; make them the same")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, **rendezvous(self.size))
        self.rank = dist.get_rank()
        self.checkpoint_group, self.control_group = (dist.new_group(backend="gloo") for _ in range(2))
        if self.is_tensor_parallel:
            self.mesh = init_device_mesh(device.type, (self.size,), mesh_dim_names=("tensor",))
            return
        if (each := options.context_parallel) > 1:
            self.context = ContextParallelGroup(dist.new_subgroups(each)[0])  # type: ignore[no-untyped-call]
        self.data_parallel_size, self.data_parallel_rank = self.size // each, self.rank // each
        if options.parallel == "fsdp":
            shards = options.fsdp_shard_size or self.size
            sizes = {"copies": self.size // shards, "shards": shards}
            names = tuple(name for name, size in sizes.items() if size > 1) or ("shards",)
            self.mesh = init_device_mesh(device.type, tuple(sizes[n] for n in names), mesh_dim_names=names)
        if (each := options.expert_parallel) > 1:
            names = ("copies", "experts")
            self._experts = init_device_mesh(device.type, (self.size // each, each), mesh_dim_names=names)

    @property
    def is_leader(self) -> bool:
        """Whether this is the first of the ranks that share a part of the batch; only it adds its sums to metrics."""
        return self.rank % (self.size // self.data_parallel_size) == 0

    @property
    def is_sharded(self) -> bool:
        """Whether each rank holds a shard of the weights."""
        return self.mesh is not None

    @property
    def is_fsdp(self) -> bool:
        """Whether weights are sharded by FSDP, which gathers a layer when it runs."""
        return self.is_sharded and not self.is_tensor_parallel

    def shard(self, policy: Any, compute: torch.dtype, master: torch.dtype = torch.float32) -> None:
        """Shard `policy` with FSDP: weights are gathered in `compute`, gradients are summed in float32.

        Shards of trained weights are kept in `master`. The weights may be on the CPU in another dtype: layers are moved
        to the device and sharded one at a time.

        Raises `ConfigError` for a model whose layers carry a state, such as Mamba: its sequences can't be packed.
        """
        if not policy.packs:  # ranks would gather a layer once for each of their sequences
            option = 'trainer.parallel = "fsdp"' if self.size > 1 else "trainer.keep_compute_copy = false"
            remedy = 'use "ddp"' if self.size > 1 else "leave it out"
            raise ConfigError(f"{option} can't train a model whose layers carry a state; {remedy}")
        mixed = MixedPrecisionPolicy(
            param_dtype=None if compute == torch.float32 else compute,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,  # the batch's log-probabilities stay float32
        )
        if self._experts:
            self._expert_parameters |= shard_experts(policy.model, self._experts["experts"], compute, master)
        for module in (*decoder_layers(policy.model), policy):
            cast_parameters(module, self.device, compute, master)
            sharded: FSDPModule = fully_shard(
                module, mesh=self.mesh, mp_policy=mixed, ignored_params=self._expert_parameters
            )
            # The loss has one denominator for all ranks, so gradients are summed, not averaged.
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)

    def is_gathered(self, parameter: nn.Parameter) -> bool:
        """Whether FSDP gathers the parameter for its passes, and sums its gradient."""
        return self.is_fsdp and parameter not in self._expert_parameters

    @property
    def parts_of_equal_length(self) -> range:
        """The parts of a batch, this rank's included, whose micro-batches need equal numbers of tokens."""
        experts = self._experts["experts"].size() if self._experts else 1
        return connected_parts(self.rank, self.size // self.data_parallel_size, experts)

    def sum_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Sum gradients over the ranks that hold the same weights. FSDP sums its gradients in the backward pass."""
        if self.size == 1 or (self._experts and self._experts["copies"].size() == 1):
            return
        group = self._experts.get_group("copies") if self._experts else None
        own = {name: p for name, p in parameters.items() if not self.is_gathered(p)}
        summed = [p for name, p in own.items() if name in self.partial_gradients or not self.is_tensor_parallel]
        for parameter in summed:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=torch.float32)  # as gradients of other ranks
        for work in [dist.all_reduce(local_part(cast(Tensor, p.grad)), group=group, async_op=True) for p in summed]:
            work.wait()

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """`values` summed over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def merge(self, entries: dict[int, Any]) -> dict[int, Any]:
        """The entries of all ranks in one dictionary."""
        if self.data_parallel_size == 1:
            return entries
        return {key: value for part in self.all_gather_object(entries) for key, value in part.items()}

    def all_gather_object(self, value: Any) -> list[Any]:
        """`value` of each rank, by rank."""
        values: list[Any] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.control_group)
        return values

    def reshard(self, policy: nn.Module) -> None:
        """Free gathered weights after a forward pass without a backward pass (FSDP)."""
        if self.is_fsdp:
            cast(FSDPModule, policy).reshard()

    def all_reduce_max(self, value: float) -> float:
        """The maximum of `value` over all ranks."""
        if self.size == 1:
            return value
        largest = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.control_group)
        return largest.item()


def connected_parts(rank: int, ranks_of_part: int, ranks_of_experts: int) -> range:
    """The parts of a batch that have ranks which share experts or a part with `rank`, directly or through others."""
    span = math.lcm(ranks_of_part, ranks_of_experts)
    first = rank // span * span // ranks_of_part
    return range(first, first + span // ranks_of_part)


def group_by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters grouped by device mesh: fused operations can't mix meshes."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return list(groups.values())


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Scale gradients so that their norm over all ranks is at most `max_norm`. Returns the norm before."""
    groups = [[p.grad for p in group if p.grad is not None] for group in group_by_mesh(parameters)]
    norms = [full_tensor(nn.utils.get_total_norm(gradients)) for gradients in groups]
    norm: float = torch.linalg.vector_norm(torch.stack(norms)).item()
    local_gradients = [local_part(gradient) for gradients in groups for gradient in gradients]
    if local_gradients and norm > max_norm:
        torch._foreach_mul_(local_gradients, max_norm / (norm + 1e-6))
    return norm
