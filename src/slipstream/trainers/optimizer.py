"""The optimizers of `trainer.optimizer`, with float32 or bfloat16 weights, and state on the device or in host memory.

AdamW with float32 weights and state on the device is torch's. `PiecewiseOptimizer` is for all other combinations: it
updates pieces of the local shards, so that offloaded state needs device memory for a few pieces only. It rounds
bfloat16 weights and 8-bit moments stochastically (`trainers.stochastic_rounding`).

8-bit moments share one scale for each `BLOCK` consecutive elements of a row. No block spans two rows, so a checkpoint
holds moments as sharded tensors that any number of ranks can load.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from slipstream.config.schema import TrainerConfig
from slipstream.model.inspection import decoder_layers, expert_parameters
from slipstream.sync.sharded_weights import full_tensor, local_part
from slipstream.trainers.activation_checkpointing import allow_recompilation
from slipstream.trainers.host_state import streamed
from slipstream.trainers.parallel import group_by_mesh
from slipstream.trainers.stochastic_rounding import (
    BLOCK,
    SIGNED,
    UNSIGNED,
    dequantize,
    quantize,
    random_bits,
    round_to_bfloat16,
)

State = dict[str, Tensor]
PIECE, LARGE_PIECE = 2**23, 2**25  # elements, multiples of BLOCK; large ones where no temporary memory is needed
EPS = 1e-8
# Muon (Jordan et al. 2024): momentum, and the coefficients of the Newton-Schulz iteration of torch.optim.Muon. Updates
# are scaled to the root mean square of AdamW's (Liu et al. 2025, arXiv:2502.16982), so learning rates carry over.
MOMENTUM, NEWTON_SCHULZ, ITERATIONS, MUON_RMS = 0.95, (3.4445, -4.7750, 2.0315), 5, 0.2


def new_optimizer(model: Any, parameters: Mapping[str, nn.Parameter], options: TrainerConfig, compiled: bool,
                  seed: int) -> torch.optim.Optimizer:  # fmt: skip
    plain = options.optimizer == "adamw" and options.master_weights == "float32"
    if not plain or options.offload_optimizer:
        matrices = hidden_matrices(model, parameters) if options.optimizer == "muon" else frozenset[str]()
        return PiecewiseOptimizer(parameters, options, matrices, compiled, seed)
    return torch.optim.AdamW(
        [{"params": group} for group in group_by_mesh(parameters.values())],
        lr=options.learning_rate,
        betas=(options.betas[0], options.betas[1]),
        weight_decay=options.weight_decay,
        fused=True,  # else a CPU holds several copies of the largest parameter
    )


def hidden_matrices(model: Any, parameters: Mapping[str, nn.Parameter]) -> frozenset[str]:
    """Names of the parameters that Muon updates: matrices of decoder layers, and stacks of experts' matrices."""
    layers = {id(layer) for layer in decoder_layers(model)}
    prefixes = tuple(f"{name}." for name, module in model.named_modules() if id(module) in layers)
    inside = [name for name in parameters if name.startswith(prefixes)]
    experts = set(expert_parameters(model))
    return frozenset(n for n in inside if parameters[n].ndim == 2 or (n in experts and parameters[n].ndim == 3))


class Piece(NamedTuple):
    """Elements `start` to `stop` of a parameter's local part. `offset` is the index of the first in the full tensor."""

    number: int
    start: int
    stop: int
    offset: int


class PiecewiseOptimizer(torch.optim.Optimizer):
    """Updates the local part of each parameter that has a gradient, piece by piece."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], options: TrainerConfig, matrices: frozenset[str],
                 compiled: bool, seed: int) -> None:  # fmt: skip
        self._parameters = list(parameters.values())
        betas = options.betas[0], options.betas[1]
        defaults = {"lr": options.learning_rate, "betas": betas, "weight_decay": options.weight_decay}
        super().__init__(self._parameters, defaults)
        self._seed, self._offloads = seed, options.offload_optimizer
        self._device = self._parameters[0].device
        self._piece = LARGE_PIECE if compiled and not self._offloads else PIECE
        if compiled:  # one program each for pieces at the start of a tensor and others, with scales and without
            allow_recompilation()
        self._update: Callable[..., None] = torch.compile(adamw_update, dynamic=True) if compiled else adamw_update
        self._matrices = {number for number, name in enumerate(parameters) if name in matrices}
        for number, parameter in enumerate(self._parameters):
            eight_bit = options.optimizer == "adamw_8bit"
            self.state[parameter] = self._new_state(parameter, number in self._matrices, eight_bit)
        self._pieces = [piece for number in range(len(self._parameters)) for piece in self._cut(number)]

    def _new_state(self, parameter: nn.Parameter, is_matrix: bool, eight_bit: bool) -> State:
        """Zeros, in host memory if the state is offloaded."""
        local = local_part(parameter.detach())
        shape = local.shape
        device = torch.device("cpu") if self._offloads else self._device
        pinned = device.type == "cpu" and self._device.type == "cuda"

        def zeros(shape: torch.Size, dtype: torch.dtype, divisor: int = 1) -> Tensor:
            made = torch.zeros(shape, dtype=dtype, device=device, pin_memory=pinned)
            return _with_layout(made, parameter, divisor)

        step = {"step": torch.zeros(())}
        if is_matrix:
            return step | {"momentum": zeros(shape, torch.float32)}
        if not eight_bit or local.ndim < 2 or shape[-1] % BLOCK:  # few elements: biases, norms, thin adapters
            return step | {name: zeros(shape, torch.float32) for name in ("exp_avg", "exp_avg_sq")}
        scale = torch.Size((*shape[:-1], shape[-1] // BLOCK))
        moments = {"exp_avg": torch.int8, "exp_avg_sq": torch.uint8}
        codes = {name: zeros(shape, dtype) for name, dtype in moments.items()}
        return step | codes | {f"{name}_scale": zeros(scale, torch.float32, BLOCK) for name in moments}

    def _cut(self, number: int) -> Iterator[Piece]:
        """The pieces in which each step updates a parameter; a single one for a matrix that Muon updates."""
        parameter = self._parameters[number]
        count, offset = local_part(parameter.detach()).numel(), _flat_offset(parameter)
        size = max(1, count) if number in self._matrices else self._piece
        for start in range(0, count, size):
            yield Piece(number, start, min(count, start + size), offset + start)
        if not count and number in self._matrices:  # other ranks gather it
            yield Piece(number, 0, 0, 0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of all parameters."""
        pieces = [piece for piece in self._pieces if self._parameters[piece.number].grad is not None]
        counts = [int(self.state[parameter]["step"]) + 1 for parameter in self._parameters]
        seeds = [[_int32(hash((self._seed, counts[p.number], p.number))), _int32(p.offset)] for p in pieces]
        noise = torch.tensor(seeds, dtype=torch.int32).to(self._device)
        numbers = {count: self._coefficients(count) for count in set(counts)}
        states = [self._state_of(piece) for piece in pieces]
        moved = streamed(states, self._device) if self._offloads else iter(states)
        for piece, row, state in zip(pieces, map(torch.clone, noise), moved, strict=True):
            parameter, count = self._parameters[piece.number], counts[piece.number]
            if piece.number in self._matrices:
                self._muon(parameter, state["momentum"], row)
            else:
                self._adamw(piece, state, row, numbers[count], count)
        for parameter, count in zip(self._parameters, counts, strict=True):
            if parameter.grad is not None:  # also where this rank's shard is empty: a checkpoint has one rank's step
                self.state[parameter]["step"].fill_(count)

    def _coefficients(self, count: int) -> Tensor:
        """The AdamW coefficients of step `count` as a tensor: beta1, beta2, step size, denominator scale, decay factor.

        The step size is lr / (1 - beta1^count), the denominator scale sqrt(1 - beta2^count), the decay factor
        1 - lr * weight_decay. `torch.compile` would recompile for each value of a Python number.
        """
        group = self.param_groups[0]
        beta1, beta2 = group["betas"]
        rate, decay = group["lr"], group["lr"] * group["weight_decay"]
        numbers = [beta1, beta2, rate / (1 - beta1**count), (1 - beta2**count) ** 0.5, 1 - decay]
        return torch.tensor(numbers, dtype=torch.float32).to(self._device)

    def _state_of(self, piece: Piece) -> State:
        """The state of a piece as flat views, without its step."""
        found, state = {}, self.state[self._parameters[piece.number]]
        for name, tensor in state.items():
            each = BLOCK if name.endswith("_scale") else 1
            if name != "step":
                flat = local_part(tensor).view(-1)
                found[name] = flat[piece.start // each : piece.stop // each]
        return found

    def _adamw(self, piece: Piece, state: State, noise: Tensor, numbers: Tensor, count: int) -> None:
        parameter, group = self._parameters[piece.number], self.param_groups[0]
        assert parameter.grad is not None
        weight, gradient = (
            local_part(tensor).view(-1)[piece.start : piece.stop] for tensor in (parameter.detach(), parameter.grad)
        )
        moments = state["exp_avg"], state["exp_avg_sq"]
        if "exp_avg_scale" in state:
            blocks = [tensor.view(-1, BLOCK) for tensor in (weight, gradient, *moments)]
            self._update(*blocks, noise, numbers, state["exp_avg_scale"][:, None], state["exp_avg_sq_scale"][:, None])
        elif weight.dtype == torch.bfloat16:
            self._update(weight, gradient, *moments, noise, numbers)
        else:  # as torch.optim.AdamW
            steps = torch.full((), float(count), device=weight.device)
            beta1, beta2 = group["betas"]
            torch._fused_adamw_(
                [weight], [gradient], [moments[0]], [moments[1]], [], [steps], lr=group["lr"], beta1=beta1,
                beta2=beta2, weight_decay=group["weight_decay"], eps=EPS, amsgrad=False, maximize=False,
            )  # fmt: skip

    def _muon(self, parameter: nn.Parameter, momentum: Tensor, noise: Tensor) -> None:
        """Nesterov momentum, orthogonalised: all singular values of the update become nearly equal."""
        group = self.param_groups[0]
        assert parameter.grad is not None
        gradient, weight = local_part(parameter.grad), local_part(parameter.detach())
        momentum = momentum.view(gradient.shape).lerp_(gradient, 1 - MOMENTUM)
        update = orthogonalized(gradient.lerp(momentum, MOMENTUM), parameter)
        rate = group["lr"] * MUON_RMS * max(parameter.shape[-2:]) ** 0.5
        found = weight.float().mul_(1 - group["lr"] * group["weight_decay"]).sub_(update.float(), alpha=rate)
        if weight.dtype == torch.bfloat16:
            found = round_to_bfloat16(found, random_bits(_indices(found, noise[1]), noise[0]))
        weight.copy_(found)


def adamw_update(weight: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, noise: Tensor, numbers: Tensor,
                 scale: Tensor | None = None, scale_sq: Tensor | None = None) -> None:  # fmt: skip
    """AdamW in float32, in place. `noise` is a seed and the index of the first element; `numbers` are `_coefficients`.

    With scales, tensors are `[blocks, BLOCK]`, and moments are 8-bit codes. The weight is float32 or bfloat16.
    """
    beta1, beta2, rate, root, decay = numbers.unbind()
    bits = random_bits(_indices(weight, noise[1]), noise[0])
    first = exp_avg if scale is None else dequantize(exp_avg, scale, SIGNED)
    second = exp_avg_sq if scale_sq is None else dequantize(exp_avg_sq, scale_sq, UNSIGNED)
    first = beta1 * first + (1 - beta1) * gradient.float()
    second = beta2 * second + (1 - beta2) * gradient.float().square()
    updated = weight.float() * decay - rate * first / (second.sqrt() / root + EPS)
    weight.copy_(round_to_bfloat16(updated, bits) if weight.dtype == torch.bfloat16 else updated)
    if scale is not None and scale_sq is not None:
        more = random_bits(bits, noise[0] ^ 0x5BD1E995)
        positive = (second > 0).float()
        first, new_scale = quantize(first, bits >> 16, SIGNED)
        second, new_scale_sq = quantize(second, more, UNSIGNED)
        second = second.maximum(positive)  # a moment rounded to 0 would make the next update very large
        scale.copy_(new_scale)
        scale_sq.copy_(new_scale_sq)
    exp_avg.copy_(first)
    exp_avg_sq.copy_(second)


def orthogonalized(update: Tensor, like: Tensor) -> Tensor:
    """Orthogonalize a matrix, or each matrix of a stack. Returns the local part in bfloat16.

    `update` is the local part, sharded as `like`. The ranks gather a sharded matrix, and each orthogonalizes the whole.
    A stack that is sharded by its first dimension only is not gathered.
    """
    update = update.bfloat16()
    if not isinstance(like, DTensor):
        return newton_schulz(update)
    if like.ndim == 3 and not any(place.is_shard(1) or place.is_shard(2) for place in like.placements):
        return newton_schulz(update)
    whole = newton_schulz(full_tensor(_with_layout(update, like)))
    shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    for dim, (size, start) in enumerate(zip(shape, offset, strict=True)):
        whole = whole.narrow(dim, start if size else 0, size)
    return whole


def newton_schulz(matrices: Tensor) -> Tensor:
    """The nearest matrix with orthogonal rows or columns, roughly: singular values come between 0.5 and 1.5."""
    a, b, c = NEWTON_SCHULZ
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    found: Tensor = x.mT if tall else x
    return found


def _indices(tensor: Tensor, offset: Tensor) -> Tensor:
    return torch.arange(tensor.numel(), dtype=torch.int32, device=tensor.device).view(tensor.shape) + offset


def _int32(number: int) -> int:
    return (number + 2**31) % 2**32 - 2**31


def _with_layout(local: Tensor, like: Tensor, divisor: int = 1) -> Tensor:
    """A tensor with the sharding of `like` around `local`. Its last dimension is that of `like` divided by `divisor`.

    It calls the constructor of DTensor, because `DTensor.from_local` would move host memory to the device.
    """
    if not isinstance(like, DTensor):
        return local
    shape = torch.Size((*like.shape[:-1], like.shape[-1] // divisor)) if like.ndim else like.shape
    meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), local.dtype)
    make: Any = DTensor
    made: Tensor = make(local, dataclasses.replace(like._spec, tensor_meta=meta), requires_grad=False)
    return made


def _flat_offset(parameter: nn.Parameter) -> int:
    """Index of the local part's first element in the full tensor, if that is sharded by its first dimension."""
    if not isinstance(parameter, DTensor):
        return 0
    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return sum(
        start * step for start, step in zip(offset, torch.empty(parameter.shape, device="meta").stride(), strict=True)
    )
