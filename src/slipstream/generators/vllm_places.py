"""Which part of which parameter each tensor of a vLLM model is: fused projections, shards, padding, experts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from slipstream.generators.weights import Place

RESTART = 'set sync.link = "checkpoint", sync.restart = true and sync.interruption = "retry"'
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def places_of(model: Any, shapes: Mapping[str, Sequence[int]], rank: int, size: int) -> dict[str, Place]:
    """A place for every parameter of `shapes`, named as Hugging Face names them, in the shard `rank` of `size`.

    Raises `ValueError` that names the first parameter without one.
    """
    served = dict(model.named_parameters())
    fused = {member: (whole, members) for whole, members in _packed(model).items() for member in members}
    places: dict[str, Place] = {}
    for name, shape in shapes.items():
        if name in places:
            continue
        module, _, kind = name.rpartition(".")
        parent, _, member = module.rpartition(".")
        expert = next((e for e in _expert_tensors(parent, f"{member}.{kind}") if e in served), "")
        if expert:
            places[name] = _experts(name, served[expert].data, tuple(shape), size)
        elif name in served:
            places[name] = _single(name, served[name].data, tuple(shape), rank, size)
        elif member in fused and f"{parent}.{fused[member][0]}.{kind}" in served:
            whole, members = fused[member]
            names = [f"{parent}.{m}.{kind}" for m in members]
            places |= _fused(names, served[f"{parent}.{whole}.{kind}"].data, shapes, rank, size)
        else:
            raise ValueError(f"vLLM serves no tensor for {name}: this model can't be updated in place; {RESTART}")
    return places


def _expert_tensors(parent: str, name: str) -> list[str]:
    """What vLLM may call the parameter `name` of all experts of a layer. Hugging Face's is a stack of them, too."""
    parts = {"experts.gate_up_proj": "w13_weight", "experts.down_proj": "w2_weight"}
    return [f"{parent}.experts.{module}{parts[name]}" for module in ("", "routed_experts.")] if name in parts else []


def _experts(name: str, tensor: Tensor, shape: tuple[int, ...], size: int) -> Place:
    """All experts of a layer: gate rows, then up rows, or down. Spread over ranks, each has some rows of both."""
    if size > 1 or tensor.shape != shape:
        remedy = "set generator.tensor_parallel = 1" if size > 1 else 'use sync.link = "checkpoint" and sync.restart'
        raise ValueError(
            f"{name} is {list(shape)} in the trainer and {list(tensor.shape)} in vLLM, on {size} GPUs: experts can be "
            f"updated in place on one GPU alone, and unpadded; {remedy}"
        )
    return Place(tensor, shape)


def expert_part(name: str, places: Mapping[str, Place]) -> Tensor | None:
    """What serves one expert's projection, by its name in a model's files, where those don't stack them."""
    found = EXPERT.fullmatch(name)
    if not found:
        return None
    experts, number, kind = found.groups()
    place = places.get(f"{experts}.{'down_proj' if kind == 'down' else 'gate_up_proj'}")
    if place is None:
        return None
    part = place.tensor[int(number)]
    if kind == "down":
        return part
    rows = part.shape[0] // 2
    return part[:rows] if kind == "gate" else part[rows:]


def _packed(model: Any) -> dict[str, list[str]]:
    """The model's fused projections, each with its members in order."""
    packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    return packed


def _single(name: str, tensor: Tensor, shape: tuple[int, ...], rank: int, size: int) -> Place:
    """A parameter of its own: whole, or cut along the first dimension (perhaps padded) or the second."""
    if tensor.shape == shape:
        return Place(tensor, shape, (), counted=rank == 0)
    if tensor.shape[1:] == shape[1:] and tensor.shape[0] * size >= shape[0]:
        start = rank * tensor.shape[0]
        end = max(start, min(start + tensor.shape[0], shape[0]))
        return Place(tensor[: end - start], shape, (slice(start, end),))
    if tensor.shape[0] == shape[0] and tensor.shape[1] * size == shape[1]:
        start = rank * tensor.shape[1]
        return Place(tensor, shape, (slice(0, shape[0]), slice(start, start + tensor.shape[1])))
    raise ValueError(
        f"{name} is {list(shape)} in the trainer and {list(tensor.shape)} in vLLM, an unknown layout: this "
        f"model can't be updated in place; {RESTART}"
    )


def _fused(
    names: list[str], tensor: Tensor, shapes: Mapping[str, Sequence[int]], rank: int, size: int
) -> dict[str, Place]:
    """Members of a fused projection: rows of one tensor after the other, each cut into `size` shards.

    Where there are fewer key-value heads than shards, several ranks hold the same ones.
    """
    rows = [shapes[name][0] for name in names]
    here = [r // size for r in rows]
    if sum(here) != tensor.shape[0]:
        here[1:] = [(tensor.shape[0] - here[0]) // (len(rows) - 1)] * (len(rows) - 1)
    if sum(here) != tensor.shape[0] or any(h * size % r for h, r in zip(here, rows, strict=True)):
        raise ValueError(
            f"{', '.join(names)} are {rows} rows, but vLLM's tensor has {tensor.shape[0]} on {size} ranks; {RESTART}"
        )
    places, at = {}, 0
    for name, total, count in zip(names, rows, here, strict=True):
        copies = count * size // total
        start = rank // copies * count
        part = tensor[at : at + count]
        places[name] = Place(part, tuple(shapes[name]), (slice(start, start + count),), counted=rank % copies == 0)
        at += count
    return places
