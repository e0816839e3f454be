"""Expert parallelism: each of some ranks holds its part of the experts, and tokens travel to the experts they chose.

A layer sends every token to the ranks of its experts, once for each, in one exchange; these compute, and send back what
comes out, to be weighed where the token is at home (GShard, Lepikhin et al. 2020, arXiv:2006.16668, without a capacity:
nothing is dropped). Only the exchange grows with the number of ranks; no rank gathers the experts of others.
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

from slipstream.config import ConfigError
from slipstream.models import expert_parameters
from slipstream.trainers.precision import master_dtype


def spread_experts(model: nn.Module, mesh: DeviceMesh, compute: torch.dtype) -> list[Any]:
    """Leave this rank its part of each layer's experts, and let tokens travel. Returns the modules that hold experts.

    Raises `ConfigError` for a model whose experts can't be shared out.
    """
    names = dict.fromkeys(name.rpartition(".")[0] for name in expert_parameters(model))
    found: list[Any] = [model.get_submodule(name) for name in names]
    for experts in found:
        count, size = getattr(experts, "num_experts", 0), mesh.size()
        own = dict(experts.named_parameters(recurse=False))
        if not count or count % size or any(len(p) != count for p in own.values()):
            raise ConfigError(f"trainer.expert_parallel = {size} can't share out {count} experts; give a divisor")
        experts.__dict__["here"] = Here(experts, count // size)  # no child: it has no weights
        experts.group = mesh.get_group()
        for name, p in own.items():
            shared = distribute_tensor(p.detach(), mesh, [Shard(0)], src_data_rank=None)
            setattr(experts, name, nn.Parameter(shared.to(master_dtype(p, compute)), p.requires_grad))
        experts.forward = MethodType(_travel, experts)
    return found


def experts_here(module: nn.Module) -> list[Here]:
    """What computes this rank's part of the experts in a module, once they are spread."""
    return [m.__dict__["here"] for m in module.modules() if "here" in m.__dict__]


class Here(nn.Module):
    """`count` of a layer's experts, which compute with weights that they are handed."""

    def __init__(self, experts: Any, count: int) -> None:
        super().__init__()
        hollow: dict[int, Any] = {id(p): nn.Parameter(p.to("meta"), p.requires_grad) for p in experts.parameters()}
        self.count, self.experts = count, copy.deepcopy(experts, hollow)
        self.experts.num_experts = count

    def forward(self, weights: dict[str, Tensor], tokens: Tensor, asked: Tensor, shares: Tensor) -> Tensor:
        """`tokens` `[tokens, size]`, each through the expert that it asked for, times its share."""
        out: Tensor = functional_call(self.experts, weights, (tokens, asked[:, None], shares[:, None]))
        return out


@torch.compiler.disable  # type: ignore[untyped-decorator]  # how many tokens go where is known on the host
def _travel(experts: Any, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """`tokens` `[tokens, size]`, through their `chosen` experts, times their `weights`, both `[tokens, chosen]`."""
    each, group, choices = experts.here.count, experts.group, chosen.shape[1]
    order = chosen.flatten().argsort(stable=True)  # by expert, so by rank
    number = chosen.flatten()[order]
    counts = torch.bincount(number // each, minlength=dist.get_world_size(group))
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts, group=group)
    leave, arrive = torch.stack([counts, arriving]).tolist()  # the one time that the host waits for the device
    asked = number.new_empty(sum(arrive))
    dist.all_to_all_single(asked, number % each, arrive, leave, group=group)
    # Once for each choice and then in order: the gradients of a token's choices are summed, not added one by one.
    travellers = tokens.repeat_interleave(choices, 0, output_size=len(order)).index_select(0, order)
    visitors = all_to_all_single_autograd(travellers, arrive, leave, group)
    # They are weighed where they go: at home, all that comes back would be kept for the gradient of the weights.
    shares = all_to_all_single_autograd(weights.flatten()[order], arrive, leave, group)
    # One more of zeros: a rank that nobody asks takes part in the backward pass, too.
    visit = (torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])]) for rows in (visitors, asked, shares))
    held = {name: p.to_local() for name, p in experts.named_parameters(recurse=False)}
    done = experts.here(held, *visit)[:-1]
    back = all_to_all_single_autograd(done.contiguous(), leave, arrive, group)
    home = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))
    return back.index_select(0, home).view(*chosen.shape, tokens.shape[-1]).sum(1)
