"""Tensor parallelism: every rank computes its part of every layer for all tokens (Shoeybi et al. 2019,
arXiv:1909.08053).

The `base_model_tp_plan` of a Hugging Face model shards query, key, value, gate and up projections by rows, and output
and down projections by columns; embedding and head are sharded by the vocabulary. vLLM shards weights in the same way,
so a trainer rank can compute on the weights of an engine rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from slipstream.config.schema import ConfigError
from slipstream.model.collectives import all_gather
from slipstream.model.context_parallel import gather_at_positions
from slipstream.model.inspection import causal_lm, expert_parameters
from slipstream.model.logprobs import head_logprobs
from slipstream.model.policy import PackedPolicy
from slipstream.model.sampling_mask import SamplingMask

# Styles of a plan, and the sharded dimension of a linear layer's weight.
SHARD_DIMENSIONS: dict[str, int | None] = {"colwise": 0, "rowwise": 1, "replicated_with_grad_allreduce": None}
TENSOR_PARALLEL = 'trainer.parallel = "tensor"'


def shard_model(policy: PackedPolicy, mesh: DeviceMesh) -> tuple[dict[str, nn.Parameter], frozenset[str]]:
    """Add tensor-parallel hooks to `policy`, and shard its weights.

    Returns this rank's shards as DTensor parameters by name, and the names of replicated parameters whose gradients
    must be summed over ranks. Raises `ConfigError` as `plan_shards`.
    """
    model = causal_lm(policy.model)
    group, rank, size = mesh.get_group(), mesh.get_local_rank(), mesh.size()
    styles, placements = plan_shards(model, size)
    embedding = model.get_input_embeddings()
    enter = {child.rpartition(".")[0] for child, style in styles.items() if style == "colwise"}
    for name, module in model.named_modules():
        if styles.get(name) == "rowwise":
            module.register_forward_hook(partial(_sum_output, group))
        if name in enter:
            module.register_forward_pre_hook(partial(_sum_input_gradient, group), with_kwargs=True)
    rows = embedding.weight.shape[0] // size
    if embedding.padding_idx is not None:  # the row without a gradient
        here = embedding.padding_idx // rows == rank
        embedding.padding_idx = embedding.padding_idx % rows if here else None
    embedding.register_forward_pre_hook(partial(_to_local_rows, rank * rows, rows))
    embedding.register_forward_hook(partial(_sum_rows, group))
    policy.predict = partial(_predict, group, rank, size)
    masters = {name: _shard(p.detach(), placements[name], mesh) for name, p in model.named_parameters()}
    summed = (n for n in masters if styles.get(n.rpartition(".")[0]) == "replicated_with_grad_allreduce")
    return masters, frozenset(summed)


def plan_shards(model: Any, size: int) -> tuple[dict[str, str], dict[str, Placement]]:
    """Sharding style of each module, and placement of each parameter. Raises `ConfigError` if `size` can't share it."""
    styles, config = _styles(model), model.config.get_text_config()
    for name in ("num_attention_heads", "num_key_value_heads"):
        if (count := getattr(config, name, size)) % size:
            raise ConfigError(f"{TENSOR_PARALLEL} can't share {name} = {count} between {size} ranks; use fsdp")
    vocabularies = [id(end.weight) for end in (model.get_input_embeddings(), model.get_output_embeddings())]
    placements: dict[str, Placement] = {}
    for name, parameter in model.named_parameters():
        style = styles.get(name.rpartition(".")[0])
        along = 0 if id(parameter) in vocabularies else SHARD_DIMENSIONS[style] if style else None
        placements[name] = Replicate() if along is None else Shard(along)
        if along is not None and (parameter.ndim <= along or parameter.shape[along] % size):
            shape = list(parameter.shape)  # each rank would add the bias of a row-wise layer
            uneven = f": {shape[along]} is not divisible by {size}" if parameter.ndim > along else ""
            raise ConfigError(f"{TENSOR_PARALLEL} can't cut {name}, {shape}, in {size}{uneven}; use fsdp")
    return styles, placements


def _styles(model: Any) -> dict[str, str]:
    """Sharding style of each module that the model's plan names. Raises `ConfigError` without a usable plan."""
    backbone = getattr(model, model.base_model_prefix)
    declared: Mapping[str, str] = getattr(model.config.get_text_config(), "base_model_tp_plan", None) or {}
    kind = model.config.model_type
    # `shard_model` shards these by the vocabulary, whatever the plan says.
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    taken = {name for name, module in backbone.named_modules() if any(module is end for end in ends)}
    plan = {name: style for name, style in declared.items() if name not in taken}
    if not plan:
        raise ConfigError(f"{TENSOR_PARALLEL} needs a plan, and a {kind} brings none along; use fsdp")
    if expert_parameters(model):
        raise ConfigError(f"{TENSOR_PARALLEL} is for dense models, and a {kind} has experts; use fsdp")
    if unknown := [f"{name} ({style})" for name, style in plan.items() if style not in SHARD_DIMENSIONS]:
        raise ConfigError(f"{TENSOR_PARALLEL} can't cut the {unknown[0]} of a {kind}; use fsdp")
    patterns = {re.compile(re.escape(name).replace(r"\*", r"\d+")): style for name, style in plan.items()}
    return {
        f"{model.base_model_prefix}.{name}": style
        for name, _ in backbone.named_modules()
        for pattern, style in patterns.items()
        if pattern.fullmatch(name)
    }


def _shard(tensor: Tensor, place: Placement, mesh: DeviceMesh) -> nn.Parameter:
    """This rank's shard, copied; every rank has loaded the full tensor."""
    part = tensor.chunk(mesh.size(), place.dim)[mesh.get_local_rank()] if isinstance(place, Shard) else tensor
    return nn.Parameter(DTensor.from_local(part.clone(), mesh, [place], run_check=False))


def _sum_input_gradient(group: Any, module: nn.Module, arguments: Any, options: dict[str, Any]) -> Any:
    """Pre-hook of column-wise layers: sums the gradient of the input, which is replicated, over ranks."""
    if arguments:
        return (_SumGradients.apply(arguments[0], group), *arguments[1:]), options  # type: ignore[no-untyped-call]
    replicated = _SumGradients.apply(options["hidden_states"], group)  # type: ignore[no-untyped-call]
    return (), options | {"hidden_states": replicated}


def _sum_output(group: Any, module: nn.Module, arguments: Any, output: Tensor) -> Any:
    """Hook of row-wise layers: sums the output over ranks."""
    return _SumOutputs.apply(output, group)  # type: ignore[no-untyped-call]


def _to_local_rows(first: int, rows: int, module: Any, arguments: tuple[Tensor]) -> tuple[Tensor]:
    """Pre-hook of the embedding: token ids to local rows. Stores the ids of other ranks' rows for `_sum_rows`."""
    ids = arguments[0] - first
    module.on_other_rank = (ids < 0) | (ids >= rows)
    return (ids.clamp(0, rows - 1),)


def _sum_rows(group: Any, module: Any, arguments: Any, output: Tensor) -> Any:
    """Hook of the embedding: sums the rows of all ranks, which are 0 except on the rank that holds the row."""
    return _SumOutputs.apply(output.masked_fill(module.on_other_rank[..., None], 0), group)  # type: ignore[no-untyped-call]


def _predict(
    group: Any, rank: int, size: int, hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor,
    mask: SamplingMask | None, compiled: bool = False, *, bias: Tensor | None = None, softcap: float = 0.0,
    keep: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`head_logprobs` with a sharded head: gathers the head, and computes this rank's share of the tokens."""
    count = len(hidden)
    own = slice(count * rank // size, count * (rank + 1) // size)
    replicated = _SumGradients.apply(hidden, group)[own]  # type: ignore[no-untyped-call]
    whole = all_gather(weight, group)
    own_mask = mask.at(range(count)[own]) if mask else None
    if bias is not None:  # replicated
        bias = _SumGradients.apply(bias, group)  # type: ignore[no-untyped-call]
    sampled = (targets[own], temperatures[own], own_mask)
    found = head_logprobs(replicated, whole, *sampled, compiled, bias=bias, softcap=softcap, keep=keep)
    positions = torch.arange(count, device=hidden.device)[own]
    logprobs, entropy = (gather_at_positions(values, positions, count, group) for values in found)
    return logprobs, entropy.detach()


class _SumGradients(torch.autograd.Function):
    """Forward the identity; backward the sum of the gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _SumOutputs(torch.autograd.Function):
    """Forward the sum of the tensors of all ranks; backward the identity."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
