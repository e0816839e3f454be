"""Expert parallelism: each rank of a group holds a part of the experts, and computes them for the whole group's tokens.

The ranks of a group gather each other's tokens (all-gather). Each sums the outputs of its own experts, and
reduce-scatter adds up the sums for the rank of each token. Micro-batches of a group have equal numbers of tokens, so
that the host need not know how many chose an expert: layers are compiled as a whole. No rank gathers the experts of
other ranks. Each group holds all experts once; their gradients are summed over the groups once a step.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from slipstream.config.schema import ConfigError
from slipstream.model.collectives import all_gather, reduce_scatter
from slipstream.model.experts import experts_per_token
from slipstream.model.inspection import expert_parameters
from slipstream.sync.sharded_weights import local_part
from slipstream.trainers.master_weights import master_dtype


def expert_modules(model: nn.Module, size: int) -> list[Any]:
    """The modules that hold experts. Raises `ConfigError` unless `size` ranks can share out the experts of each."""
    names = dict.fromkeys(name.rpartition(".")[0] for name in expert_parameters(model))
    if not names:
        raise ConfigError(f"trainer.expert_parallel = {size}, but the model has no experts; set it to 1")
    modules: list[Any] = [model.get_submodule(name) for name in names]
    for experts in modules:
        count = getattr(experts, "num_experts", 0)
        if not count or count % size or any(len(p) != count for p in experts.parameters(recurse=False)):
            raise ConfigError(f"trainer.expert_parallel = {size} can't share out {count} experts; give a divisor")
    return modules


def shard_experts(model: nn.Module, mesh: DeviceMesh, compute: torch.dtype, master: torch.dtype) -> set[nn.Parameter]:
    """Keep this rank's experts of each layer, and exchange tokens with the ranks of the group, `mesh`.

    Returns the parameters of the experts: sharded tensors if they are trained, else local tensors.
    """
    sharded: set[nn.Parameter] = set()
    for experts in expert_modules(model, mesh.size()):
        experts.num_experts //= mesh.size()
        experts.first_expert = mesh.get_local_rank() * experts.num_experts
        experts.group = mesh.get_group()
        experts._is_expert_parallel = True  # as in transformers: `num_experts` is a sentinel index
        for name, p in [*experts.named_parameters(recurse=False)]:
            part: Tensor = distribute_tensor(p.detach(), mesh, [Shard(0)], src_data_rank=None)
            part = (part if p.requires_grad else local_part(part)).to(master_dtype(p, compute, master))
            setattr(experts, name, parameter := nn.Parameter(part, p.requires_grad))
            sharded.add(parameter)
        experts.forward = MethodType(_exchange_tokens, experts)
    return sharded


def _exchange_tokens(experts: Any, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Forward method of a sharded experts module: the weighted sum of each token's expert outputs, `[tokens, size]`.

    `tokens` is `[tokens, size]`; `chosen` experts and router `weights` are `[tokens, experts per token]`.
    """
    choices, group = experts_per_token(chosen), experts.group
    exact = torch.promote_types(weights.dtype, torch.float32)  # indices travel with weights, and are exact in float32
    routes = all_gather(torch.cat([chosen.to(exact), weights.to(exact)], 1), group)
    gathered = all_gather(tokens, group)
    local = routes[:, :choices].detach().long() - experts.first_expert
    is_local = (local >= 0) & (local < experts.num_experts)
    local = torch.where(is_local, local, experts.num_experts)
    sums = type(experts).forward(experts, gathered, local, routes[:, choices:].to(weights.dtype))
    return reduce_scatter(sums, group)
