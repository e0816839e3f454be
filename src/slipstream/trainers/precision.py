"""Weights in bfloat16 to compute on, and the float32 masters behind them that the optimizer moves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from slipstream.sync.gathered import part_here

Parameters = Mapping[str, nn.Parameter]


def compute_on(model: nn.Module, masters: Parameters, tensors: Mapping[str, Tensor]) -> None:
    """Give `model` these tensors for its parameters, and their gradients to the masters that they stand for.

    The tensors may be memory that another process serves: nothing here writes to them.
    """
    stand_ins: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        if name in masters:
            stand_in: Any = nn.Parameter(tensors[name])
            stand_ins[id(parameter)] = stand_in
            stand_in.register_post_accumulate_grad_hook(_pass_on(masters[name]))
    for module in model.modules():
        for key, held in module._parameters.items():
            if id(held) in stand_ins:  # tied weights are one parameter in several modules
                module._parameters[key] = stand_ins[id(held)]


def master_dtype(parameter: Tensor, compute: torch.dtype) -> torch.dtype:
    """The format in which a trainer that computes in `compute` keeps a parameter."""
    if not parameter.is_floating_point():  # four bits in a format of their own
        return parameter.dtype
    return torch.float32 if parameter.requires_grad else torch.promote_types(parameter.dtype, compute)


def take_in(module: nn.Module, device: torch.device | str, compute: torch.dtype) -> None:
    """Bring parameters, one by one, to the device in the format in which they are kept, but those that are there."""
    for parameter in module.parameters():
        if not isinstance(parameter, DTensor):
            parameter.data = parameter.data.to(device, master_dtype(parameter, compute))


def lowered(masters: Parameters, dtype: torch.dtype) -> dict[str, Tensor]:
    """Copies of the masters in another format."""
    return {name: part_here(parameter.detach()).to(dtype) for name, parameter in masters.items()}


def _like(part: Tensor, whole: Tensor) -> Tensor:
    """This rank's part of what is spread over ranks as `whole` is."""
    if not isinstance(whole, DTensor):
        return part
    return DTensor.from_local(part, whole.device_mesh, whole.placements, run_check=False)


def _pass_on(master: nn.Parameter) -> Callable[[Tensor], None]:
    """A hook that adds a stand-in's gradient to that of its master, in the master's format."""

    def hook(stand_in: Tensor) -> None:
        assert stand_in.grad is not None
        if master.grad is None:
            master.grad = _like(stand_in.grad.to(master.dtype), master)
        else:
            part_here(master.grad).add_(stand_in.grad)
        stand_in.grad = None

    return hook
