"""Mixed precision: compute weights in bfloat16, and the master weights that the optimizer updates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from slipstream.config.schema import ConfigError, TrainerConfig
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


def trained_dtype(options: TrainerConfig, compute: torch.dtype) -> torch.dtype:
    """The dtype of trained weights. Raises `ConfigError` if it is below that of the computation."""
    dtype: torch.dtype = getattr(torch, options.master_weights)
    if dtype != torch.float32 and compute == torch.float32:
        raise ConfigError(
            'trainer.master_weights = "bfloat16" needs model.dtype = "bfloat16"; "auto" is float32 on a CPU'
        )
    return dtype


def keep_float32_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Sum the gradients of bfloat16 weights in float32, over all micro-batches."""
    each: Any
    for each in parameters:
        if each.dtype == torch.bfloat16:
            each.grad_dtype = None  # a gradient may have another dtype than its weight
            each.register_post_accumulate_grad_hook(_widen_gradient)


def _widen_gradient(parameter: Tensor) -> None:
    if parameter.grad is not None and parameter.grad.dtype != torch.float32:
        parameter.grad = parameter.grad.float()


def master_dtype(parameter: Tensor, compute: torch.dtype, master: torch.dtype) -> torch.dtype:
    """The dtype in which a trainer that computes in `compute` keeps a parameter: `master` if it is trained."""
    if not parameter.is_floating_point():  # 4-bit weights are stored as integers
        return parameter.dtype
    return master if parameter.requires_grad else torch.promote_types(parameter.dtype, compute)


def cast_parameters(
    module: nn.Module, device: torch.device | str, compute: torch.dtype, master: torch.dtype = torch.float32
) -> None:
    """Move parameters to `device` in their `master_dtype`, one at a time; skips parameters that are sharded already."""
    for parameter in module.parameters():
        if not isinstance(parameter, DTensor):
            parameter.data = parameter.data.to(device, master_dtype(parameter, compute, master))


def _accumulate_into(master: nn.Parameter) -> Callable[[Tensor], None]:
    """A hook that adds a compute weight's gradient to that of its master, in float32."""

    def hook(compute_weight: Tensor) -> None:
        assert compute_weight.grad is not None
        if master.grad is None:
            grad = compute_weight.grad.float()
            if isinstance(master, DTensor):
                grad = DTensor.from_local(grad, master.device_mesh, master.placements, run_check=False)
            master.grad = grad
        else:
            local_part(master.grad).add_(compute_weight.grad)
        compute_weight.grad = None

    return hook
