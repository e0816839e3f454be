"""Tensor parallelism: every rank computes its part of every layer, for all tokens (Shoeybi et al. 2019,
arXiv:1909.08053).

Query, key, value, gate and up projections are cut by rows, output and down projections by columns, by the plan that a
Hugging Face model brings along; embedding and head are cut by the vocabulary. This is how vLLM cuts them, too, so that
a rank can compute on the weights of an engine's rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from slipstream.config import ConfigError
from slipstream.models import causal_lm
from slipstream.packed.context import joined
from slipstream.packed.kept import Kept
from slipstream.packed.logprobs import head_logprobs
from slipstream.packed.policy import Policy

# Styles of a plan, and the dimension along which the weight of a linear layer is cut.
CUTS: dict[str, int | None] = {"colwise": 0, "rowwise": 1, "replicated_with_grad_allreduce": None}
TENSOR_PARALLEL = 'trainer.parallel = "tensor"'


def cut(policy: Policy, mesh: DeviceMesh) -> tuple[dict[str, nn.Parameter], frozenset[str]]:
    """Leave this rank its part of each weight, and let the policy compute with all ranks.

    Returns the parts as parameters that know of the whole, by name, and the names of those that every rank holds while
    its gradient is the sum of all ranks'. Raises `ConfigError` for a model that can't be cut.
    """
    model = causal_lm(policy.model)
    group, rank, size = mesh.get_group(), mesh.get_local_rank(), mesh.size()
    styles = _styles(model)
    _refuse_parts_of_heads(model, size)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    vocabularies = (id(embedding.weight), id(head.weight))
    places: dict[str, Placement] = {}
    for name, parameter in model.named_parameters():
        style = styles.get(name.rpartition(".")[0])
        along = 0 if id(parameter) in vocabularies else CUTS[style] if style else None
        places[name] = Replicate() if along is None else Shard(along)
        if along is not None and (parameter.ndim <= along or parameter.shape[along] % size):
            shape = list(parameter.shape)  # a bias behind a sum over ranks would be added by each of them
            raise ConfigError(f"{TENSOR_PARALLEL} can't cut {name}, {shape}, in {size}; use fsdp")
    enter = {child.rpartition(".")[0] for child, style in styles.items() if style == "colwise"}
    for name, module in model.named_modules():
        if styles.get(name) == "rowwise":
            module.register_forward_hook(partial(_summed, group))
        if name in enter:
            module.register_forward_pre_hook(partial(_entered, group), with_kwargs=True)
    rows = embedding.weight.shape[0] // size
    if embedding.padding_idx is not None:  # a row that gets no gradient
        here = embedding.padding_idx // rows == rank
        embedding.padding_idx = embedding.padding_idx % rows if here else None
    embedding.register_forward_pre_hook(partial(_own_tokens, rank * rows, rows))
    embedding.register_forward_hook(partial(_embedded, group))
    policy.predict = partial(_predict, group, rank, size)
    masters = {name: _part(p.detach(), places[name], mesh) for name, p in model.named_parameters()}
    alike = frozenset(n for n in masters if styles.get(n.rpartition(".")[0]) == "replicated_with_grad_allreduce")
    return masters, alike


def _styles(model: Any) -> dict[str, str]:
    """How each module of the model is cut, by its plan."""
    backbone = getattr(model, model.base_model_prefix)
    told: Mapping[str, str] = getattr(model.config.get_text_config(), "base_model_tp_plan", None) or {}
    kind = model.config.model_type
    ends = (model.get_input_embeddings(), model.get_output_embeddings())  # cut in a way of our own, whatever is told
    taken = {name for name, module in backbone.named_modules() if any(module is end for end in ends)}
    plan = {name: style for name, style in told.items() if name not in taken}
    if not plan:
        raise ConfigError(f"{TENSOR_PARALLEL} needs a plan, and a {kind} brings none along; use fsdp")
    if unknown := [f"{name} ({style})" for name, style in plan.items() if style not in CUTS]:
        raise ConfigError(f"{TENSOR_PARALLEL} can't cut the {unknown[0]} of a {kind}; use fsdp")
    prefix = f"{model.base_model_prefix}."
    patterns = {re.compile(re.escape(name).replace(r"\*", r"\d+")): style for name, style in plan.items()}
    return {
        prefix + name: style
        for name, _ in backbone.named_modules()
        for pattern, style in patterns.items()
        if pattern.fullmatch(name)
    }


def _refuse_parts_of_heads(model: Any, size: int) -> None:
    config = model.config.get_text_config()
    for name in ("num_attention_heads", "num_key_value_heads"):
        if (count := getattr(config, name, size)) % size:
            raise ConfigError(f"{TENSOR_PARALLEL} can't share {name} = {count} between {size} ranks; use fsdp")


def _part(tensor: Tensor, place: Placement, mesh: DeviceMesh) -> nn.Parameter:
    """This rank's part as a parameter in memory of its own; every rank has loaded the same whole."""
    part = tensor
    if isinstance(place, Shard):
        part = tensor.chunk(mesh.size(), place.dim)[mesh.get_local_rank()]
    return nn.Parameter(DTensor.from_local(part.clone(), mesh, [place], run_check=False))


def _entered(group: Any, module: nn.Module, arguments: Any, options: dict[str, Any]) -> Any:
    """The hidden states that all ranks take in, first argument or by name; each has a part of their gradient."""
    if arguments:
        return (_Enter.apply(arguments[0], group), *arguments[1:]), options  # type: ignore[no-untyped-call]
    entered = _Enter.apply(options["hidden_states"], group)  # type: ignore[no-untyped-call]
    return (), options | {"hidden_states": entered}


def _summed(group: Any, module: nn.Module, arguments: Any, output: Tensor) -> Any:
    return _Sum.apply(output, group)  # type: ignore[no-untyped-call]


def _own_tokens(first: int, rows: int, module: Any, arguments: tuple[Tensor]) -> tuple[Tensor]:
    """Token ids as rows of this rank's part; which of them are not in it is remembered for `_embedded`."""
    ids = arguments[0] - first
    module.elsewhere = (ids < 0) | (ids >= rows)
    return (ids.clamp(0, rows - 1),)


def _embedded(group: Any, module: Any, arguments: Any, output: Tensor) -> Any:
    return _Sum.apply(output.masked_fill(module.elsewhere[..., None], 0), group)  # type: ignore[no-untyped-call]


def _predict(
    group: Any, rank: int, size: int, hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor,
    kept: Kept | None, fuse: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`head_logprobs` with a part of the head each: it is gathered, and each rank takes a share of the tokens."""
    count = len(hidden)
    own = slice(count * rank // size, count * (rank + 1) // size)
    entered = _Enter.apply(hidden, group)[own]  # type: ignore[no-untyped-call]
    whole = all_gather_tensor_autograd(weight, 0, group)
    left = kept.at(range(count)[own]) if kept else None
    found = head_logprobs(entered, whole, targets[own], temperatures[own], left, fuse)
    places = torch.arange(count, device=hidden.device)[own]
    logprobs, entropy = (joined(values, places, count, group) for values in found)
    return logprobs, entropy.detach()


class _Enter(torch.autograd.Function):
    """Forward nothing; backward the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Sum(torch.autograd.Function):
    """Forward the sum of all ranks' tensors; backward nothing."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
