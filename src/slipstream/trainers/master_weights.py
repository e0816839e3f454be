"""Mixed precision: compute weights in bfloat16, and the float32 master weights that the optimizer updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from slipstream.sync.sharded_weights import local_part

Parameters = Mapping[str, nn.Parameter]


def compute_on(model: nn.Module, masters: Parameters, tensors: Mapping[str, Tensor]) -> None:
    """Use `tensors` as the parameters of `model`, and accumulate their gradients into `masters`, by name.

    The tensors may be memory that an engine serves: this process only reads them.
    """
    compute_weights: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        if name in masters:
            compute_weight: Any = nn.Parameter(tensors[name])
            compute_weights[id(parameter)] = compute_weight
            compute_weight.register_post_accumulate_grad_hook(_accumulate_into(masters[name]))
    for module in model.modules():
        for key, held in module._parameters.items():
            if id(held) in compute_weights:  # tied weights are one parameter in several modules
                module._parameters[key] = compute_weights[id(held)]


def master_dtype(parameter: Tensor, compute: torch.dtype) -> torch.dtype:
    """The dtype in which a trainer that computes in `compute` keeps a parameter: float32 if it is trained."""
    if not parameter.is_floating_point():  # 4-bit weights are stored as integers
        return parameter.dtype
    return torch.float32 if parameter.requires_grad else torch.promote_types(parameter.dtype, compute)


def cast_parameters(module: nn.Module, device: torch.device | str, compute: torch.dtype) -> None:
    """Move parameters to `device` in their `master_dtype`, one at a time; skips parameters that are sharded already."""
    for parameter in module.parameters():
        if not isinstance(parameter, DTensor):
            parameter.data = parameter.data.to(device, master_dtype(parameter, compute))


def _accumulate_into(master: nn.Parameter) -> Callable[[Tensor], None]:
    """A hook that adds a compute weight's gradient to that of its master, in the master's format."""

    def hook(compute_weight: Tensor) -> None:
        assert compute_weight.grad is not None
        if master.grad is None:
            grad = compute_weight.grad.to(master.dtype)
            if isinstance(master, DTensor):
                grad = DTensor.from_local(grad, master.device_mesh, master.placements, run_check=False)
            master.grad = grad
        else:
            local_part(master.grad).add_(compute_weight.grad)
        compute_weight.grad = None

    return hook
