"""Matrix products of linear layers in FP8: inputs, weights and gradients are quantized, each with one scale.

Inputs and weights become e4m3, and gradients e5m2, which has a larger range (Micikevicius et al. 2022,
arXiv:2209.05433). A scale maps a tensor's largest element to the format's largest. Weights, gradients and the outputs
of products keep their dtypes. torchao does the same; compiled, its casts take as long as FP8 saves
(docs/measurements.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from slipstream.config.schema import ConfigError
from slipstream.model.inspection import decoder_layers

MULTIPLE = 16  # divides the sizes of each product: numbers of tokens, inputs and outputs
LEAST_CAPABILITY = (8, 9)  # of a GPU: Ada and newer
ROUTERS = {"router", "gate"}  # names of modules that choose experts, or hold what does
WEIGHT_DTYPE, GRADIENT_DTYPE = torch.float8_e4m3fn, torch.float8_e5m2
LEAST_MAXIMUM = 1e-12  # the scale of a tensor of smaller elements is that of this one


class Fp8Linear(nn.Linear):
    """A linear layer whose three products, that of the forward pass and those of gradients, are in FP8."""

    def forward(self, input: Tensor) -> Tensor:
        rows = input.reshape(-1, input.shape[-1])
        out: Tensor = _Fp8Product.apply(rows, self.weight)  # type: ignore[no-untyped-call]
        out = out.view(*input.shape[:-1], -1)
        return out if self.bias is None else out + self.bias


def use_fp8_products(model: nn.Module, device: torch.device, compute: torch.dtype) -> None:
    """Make the linear layers of the decoder layers `Fp8Linear`, in place. Adapters and routers keep their products.

    A CPU emulates FP8 products. Raises `ConfigError` for a GPU that has none, if passes on a GPU `compute` in float32,
    and if no layer fits.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        raise ConfigError(f"trainer.fp8: a {torch.cuda.get_device_name(device)} has no FP8 products; leave it out")
    if device.type == "cuda" and compute == torch.float32:
        raise ConfigError('trainer.fp8 with model.dtype = "float32": set model.dtype = "bfloat16", or leave fp8 out')
    linear = [pair for layer in decoder_layers(model) for pair in layer.named_modules() if _fits(*pair)]
    if not linear:
        raise ConfigError(f"trainer.fp8: this model has no linear layer whose sizes {MULTIPLE} divides; leave it out")
    for _, module in linear:
        module.__class__ = Fp8Linear


def _fits(name: str, module: nn.Module) -> bool:
    other = "lora_" in name or ROUTERS & set(name.split("."))
    return type(module) is nn.Linear and not other and not any(n % MULTIPLE for n in module.weight.shape)


class _Fp8Product(torch.autograd.Function):
    """rows weight^T. What the backward pass needs is kept in FP8, transposed: also weights that FSDP gathered."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        by_rows, by_columns, scale = quantize(rows, WEIGHT_DTYPE)
        weight_rows, weight_columns, weight_scale = quantize(weight, WEIGHT_DTYPE)
        ctx.save_for_backward(weight_columns, weight_scale, *((by_columns, scale) if ctx.needs_input_grad[1] else ()))
        return _product(by_rows, weight_rows, scale, weight_scale, rows.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        weight_columns, weight_scale, *of_rows = ctx.saved_tensors
        out_rows, out_columns, out_scale = quantize(grads[0], GRADIENT_DTYPE)
        grad_rows = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_rows = _product(out_rows, weight_columns, out_scale, weight_scale, grads[0].dtype)
        if ctx.needs_input_grad[1]:
            columns, scale = of_rows
            grad_weight = _product(out_columns, columns, out_scale, scale, grads[0].dtype)
        return grad_rows, grad_weight


def _product(
    left: Tensor, right: Tensor, scale: Tensor, other: Tensor, dtype: torch.dtype, fast: bool = False
) -> Tensor:
    """left right^T of FP8 matrices in `dtype`, times both scales. `fast` accumulates with fewer bits."""
    if left.is_cuda:
        return torch._scaled_mm(left, right.T, scale, other, out_dtype=dtype, use_fast_accum=fast)
    return (functional.linear(left.float(), right.float()) * (scale * other)).to(dtype)


@torch.library.custom_op("slipstream::quantize", mutates_args=())
def quantize(matrix: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """A matrix in FP8, the same transposed, and the scale by which to multiply both.

    One operation for the compiler, which would fuse casts with slow reductions.
    """
    if matrix.is_cuda:
        from slipstream.trainers import fp8_kernels

        return fp8_kernels.quantize(matrix.contiguous(), dtype, LEAST_MAXIMUM)
    largest, limit = torch.linalg.vector_norm(matrix, torch.inf, dtype=torch.float32), torch.finfo(dtype).max
    scale = largest.clamp(min=LEAST_MAXIMUM) / limit
    rows = (matrix.float() / scale).clamp(-limit, limit).to(dtype)
    return rows, rows.T.contiguous(), scale


@quantize.register_fake
def _(matrix: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = matrix.shape
    return (
        matrix.new_empty(rows, columns, dtype=dtype),
        matrix.new_empty(columns, rows, dtype=dtype),
        matrix.new_empty((), dtype=torch.float32),
    )
