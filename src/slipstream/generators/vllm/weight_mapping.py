"""Maps Hugging Face parameters to tensors of a vLLM model: fused projections, shards, padding, experts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from slipstream.errors import InvalidInput
from slipstream.generators.vllm.quantized_weights import quantized_shards, served_tensors
from slipstream.sync.link import ParameterShard

USE_RESTART = 'set sync.link = "checkpoint", sync.restart = true and sync.in_flight = "retry"'
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def map_parameters(
    model: Any, shapes: Mapping[str, Sequence[int]], rank: int, size: int, stages: int = 1
) -> dict[str, ParameterShard]:
    """The shard of each parameter of `shapes`, by Hugging Face name, in tensor-parallel rank `rank` of `size`.

    With several pipeline stages the result has the parameters of this worker's stage. Raises `InvalidInput` with the
    name of the first parameter without a tensor, or of the first tensor in a stage without a parameter.
    """
    if not (hasattr(model, "language_model") and hasattr(model, "hf_to_vllm_mapper")):
        return _map_by_name(model, shapes, rank, size, stages)
    # vLLM has its own names for the parts of a model that reads images.
    names = dict(zip(shapes, model.hf_to_vllm_mapper.apply_list([*shapes]), strict=True))
    shards = _map_by_name(model, {names[name]: shape for name, shape in shapes.items()}, rank, size, stages)
    return {name: shards[own] for name, own in names.items() if own in shards}


def _map_by_name(
    model: Any, shapes: Mapping[str, Sequence[int]], rank: int, size: int, stages: int
) -> dict[str, ParameterShard]:
    """`map_parameters` for shapes by vLLM's names of unfused parameters."""
    served = served_tensors(model)
    decoder = getattr(model, "language_model", model)
    projections: dict[str, list[str]] = getattr(decoder, "packed_modules_mapping", {})  # fused, with members in order
    fused = {member: (whole, members) for whole, members in projections.items() for member in members}
    shards: dict[str, ParameterShard] = {}
    for name, shape in shapes.items():
        if name in shards:
            continue
        module, _, kind = name.rpartition(".")
        parent, _, member = module.rpartition(".")
        expert = next((e for e in _expert_tensors(parent, f"{member}.{kind}") if e in served), "")
        if expert:
            shards[name] = _map_experts(name, served[expert], tuple(shape), size)
        elif name in served and member in projections and size > 1:
            raise InvalidInput(
                f"{name} is fused in the model's files, whose rows on {size} GPUs are not consecutive: it can't be "
                f"updated in place; set generator.tensor_parallel_size = 1, or {USE_RESTART}"
            )
        elif name in served:
            shards[name] = _map_single(name, served[name], tuple(shape), rank, size)
        elif member in fused and f"{parent}.{fused[member][0]}.{kind}" in served:
            whole, members = fused[member]
            names = [f"{parent}.{m}.{kind}" for m in members]
            shards |= _map_fused(names, served[f"{parent}.{whole}.{kind}"], shapes, rank, size)
        elif stages == 1:
            raise unserved_error(name)
    shards = quantized_shards(shards, served)
    if stages > 1:
        _validate_stage(served, shards)
    return shards


def _validate_stage(served: Mapping[str, Tensor], shards: Mapping[str, ParameterShard]) -> None:
    """Raise `InvalidInput` for the first tensor of a pipeline stage that no version would update."""
    updated = {tensor.untyped_storage().data_ptr() for shard in shards.values() for tensor in shard.tensors}
    for name, tensor in served.items():
        if tensor.untyped_storage().data_ptr() not in updated:
            raise InvalidInput(
                f"vLLM serves {name} in a pipeline stage without its parameter: this model can't be updated in place; "
                f"leave out generator.engine_args.pipeline_parallel_size, or {USE_RESTART}"
            )


def unserved_error(name: str) -> InvalidInput:
    """The error for a parameter without a tensor in the engine."""
    return InvalidInput(f"vLLM serves no tensor for {name}: this model can't be updated in place; {USE_RESTART}")


def _expert_tensors(parent: str, name: str) -> list[str]:
    """vLLM's possible names for the stacked parameter `name` of all experts of a layer."""
    parts = {"experts.gate_up_proj": "w13_weight", "experts.down_proj": "w2_weight"}
    return [f"{parent}.experts.{module}{parts[name]}" for module in ("", "routed_experts.")] if name in parts else []


def _map_experts(name: str, tensor: Tensor, shape: tuple[int, ...], size: int) -> ParameterShard:
    """All experts of a layer, as one tensor: gate rows then up rows, or down rows. Raises `InvalidInput` if sharded."""
    if size > 1 or tensor.shape != shape:
        one_gpu = "set generator.tensor_parallel_size = 1"
        remedy = one_gpu if size > 1 else 'use sync.link = "checkpoint" and sync.restart'
        raise InvalidInput(
            f"{name} is {list(shape)} in the trainer and {list(tensor.shape)} in vLLM, on {size} GPUs: experts can be "
            f"updated in place on one GPU alone, and unpadded; {remedy}"
        )
    return ParameterShard(tensor, shape)


def expert_shard(name: str, shards: Mapping[str, ParameterShard]) -> ParameterShard | None:
    """The shard of one expert's projection, by its name in model files that don't stack experts."""
    found = EXPERT.fullmatch(name)
    if not found:
        return None
    experts, number, kind = found.groups()
    shard = shards.get(f"{experts}.{'down_proj' if kind == 'down' else 'gate_up_proj'}")
    if shard is None:
        return None
    rows = shard.tensor.shape[1] // 2
    parts = {"gate": slice(rows), "up": slice(rows, None), "down": slice(None)}
    return shard.select(int(number), parts[kind])


def _map_single(name: str, tensor: Tensor, shape: tuple[int, ...], rank: int, size: int) -> ParameterShard:
    """A parameter in its own tensor: whole, or sharded along the first dimension (maybe padded) or the second."""
    if tensor.shape == shape:
        return ParameterShard(tensor, shape, (), counted=rank == 0)
    if tensor.shape[1:] == shape[1:] and tensor.shape[0] * size >= shape[0]:
        start = rank * tensor.shape[0]
        end = max(start, min(start + tensor.shape[0], shape[0]))
        return ParameterShard(tensor[: end - start], shape, (slice(start, end),))
    if tensor.shape[0] == shape[0] and tensor.shape[1] * size == shape[1]:
        start = rank * tensor.shape[1]
        return ParameterShard(tensor, shape, (slice(0, shape[0]), slice(start, start + tensor.shape[1])))
    raise InvalidInput(
        f"{name} is {list(shape)} in the trainer and {list(tensor.shape)} in vLLM, an unknown layout: this "
        f"model can't be updated in place; {USE_RESTART}"
    )


def _map_fused(
    names: list[str], tensor: Tensor, shapes: Mapping[str, Sequence[int]], rank: int, size: int
) -> dict[str, ParameterShard]:
    """Members of a fused projection: consecutive rows of one tensor, each sharded over `size` ranks.

    With fewer key-value heads than ranks, several ranks hold the same heads.
    """
    rows = [shapes[name][0] for name in names]
    counts = [r // size for r in rows]
    if sum(counts) != tensor.shape[0]:
        counts[1:] = [(tensor.shape[0] - counts[0]) // (len(rows) - 1)] * (len(rows) - 1)
    if sum(counts) != tensor.shape[0] or any(h * size % r for h, r in zip(counts, rows, strict=True)):
        raise InvalidInput(
            f"{', '.join(names)} are {rows} rows, but vLLM's tensor has {tensor.shape[0]} on {size} ranks; "
            f"{USE_RESTART}"
        )
    shards, start_row = {}, 0
    for name, total, count in zip(names, rows, counts, strict=True):
        copies = count * size // total
        start = rank // copies * count
        part = tensor[start_row : start_row + count]
        index = (slice(start, start + count),)
        shards[name] = ParameterShard(part, tuple(shapes[name]), index, counted=rank % copies == 0)
        start_row += count
    return shards
