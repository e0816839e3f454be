"""Expert parallelism: each rank of a group holds a part of the experts; dispatch and combine by all-to-all.

Dispatch sends each token, once for each expert that it chose, to the rank of that expert. The expert's rank multiplies
its output by the router weight. Combine returns the products, and the token's rank sums them (GShard, Lepikhin et al.
2020, arXiv:2006.16668, without a capacity limit: no token is dropped). No rank gathers the experts of other ranks.
"""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.func import functional_call

from slipstream.config.schema import ConfigError
from slipstream.model.experts import DispatchRows, ReorderRows, inverse_permutation
from slipstream.model.inspection import expert_parameters
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


def shard_experts(model: nn.Module, mesh: DeviceMesh, compute: torch.dtype, master: torch.dtype) -> list[Any]:
    """Keep this rank's experts of each layer, and dispatch tokens by all-to-all. Returns `expert_modules`."""
    modules = expert_modules(model, mesh.size())
    for experts in modules:
        own = dict(experts.named_parameters(recurse=False))
        local = LocalExperts(experts, experts.num_experts // mesh.size())
        experts.__dict__["local_experts"] = local  # not a submodule: it has no weights
        experts.group = mesh.get_group()
        for name, p in own.items():
            shared = distribute_tensor(p.detach(), mesh, [Shard(0)], src_data_rank=None)
            setattr(experts, name, nn.Parameter(shared.to(master_dtype(p, compute, master)), p.requires_grad))
        experts.forward = MethodType(_dispatch_and_combine, experts)
    return modules


def local_experts(module: nn.Module) -> list[LocalExperts]:
    """The `LocalExperts` of `module`; empty before `shard_experts`, and without experts."""
    return [m.__dict__["local_experts"] for m in module.modules() if "local_experts" in m.__dict__]


class LocalExperts(nn.Module):
    """The `count` experts of a layer that this rank computes. It holds no weights: `forward` takes them."""

    def __init__(self, experts: Any, count: int) -> None:
        super().__init__()
        on_meta: dict[int, Any] = {id(p): nn.Parameter(p.to("meta"), p.requires_grad) for p in experts.parameters()}
        self.count, self.experts = count, copy.deepcopy(experts, on_meta)
        self.experts.num_experts = count

    def forward(self, weights: dict[str, Tensor], tokens: Tensor, chosen: Tensor, router_weights: Tensor) -> Tensor:
        """Output `[tokens, size]` of each token's `chosen` expert `[tokens]`, times its router weight `[tokens]`."""
        out: Tensor = functional_call(self.experts, weights, (tokens, chosen[:, None], router_weights[:, None]))
        return out


@torch.compiler.disable  # type: ignore[untyped-decorator]  # split sizes are read on the host
def _dispatch_and_combine(experts: Any, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Forward method of a sharded experts module: the weighted sum of each token's expert outputs, `[tokens, size]`.

    `tokens` is `[tokens, size]`; `chosen` experts and router `weights` are `[tokens, experts per token]`.
    """
    local_count, group, choices = experts.local_experts.count, experts.group, chosen.shape[1]
    order = chosen.flatten().argsort(stable=True)  # by expert, and so by rank
    inverse = inverse_permutation(order)
    expert_ids = chosen.flatten()[order]
    send_counts = torch.bincount(expert_ids // local_count, minlength=dist.get_world_size(group))
    receive_counts = torch.empty_like(send_counts)
    dist.all_to_all_single(receive_counts, send_counts, group=group)
    sends, receives = torch.stack([send_counts, receive_counts]).tolist()  # the only synchronisation with the device
    local_ids = expert_ids.new_empty(sum(receives))
    dist.all_to_all_single(local_ids, expert_ids % local_count, receives, sends, group=group)
    dispatched = DispatchRows.apply(tokens, order, inverse, choices)  # type: ignore[no-untyped-call]
    received = all_to_all_single_autograd(dispatched, receives, sends, group)
    # Router weights are applied by the expert's rank: applied here, backward would keep every returned output.
    by_expert = ReorderRows.apply(weights.flatten(), order, inverse)  # type: ignore[no-untyped-call]
    router_weights = all_to_all_single_autograd(by_expert, receives, sends, group)
    inputs: tuple[Tensor, ...] = (received, local_ids, router_weights)
    if not len(local_ids):  # one row of zeros: a rank without tokens takes part in the backward pass, too
        inputs = tuple(torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])]) for rows in inputs)
    local_weights = {name: p.to_local() for name, p in experts.named_parameters(recurse=False)}
    outputs = experts.local_experts(local_weights, *inputs)[: len(local_ids)]
    returned = all_to_all_single_autograd(outputs.contiguous(), sends, receives, group)
    by_token: Tensor = ReorderRows.apply(returned, inverse, order)  # type: ignore[no-untyped-call]
    return by_token.view(*chosen.shape, tokens.shape[-1]).sum(1)
