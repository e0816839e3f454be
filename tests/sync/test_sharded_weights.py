"""Sharded parameters are gathered whole, in any layout and with any number of rows."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from slipstream.sync.link import shapes_of
from slipstream.sync.sharded_weights import GatheredParameters, gather_into

RANKS = 3
LAYOUTS = [
    ((7, 5), Shard(0)), ((2, 3), Shard(0)), ((9,), Shard(0)), ((1, 4), Shard(0)), ((8, 6), Shard(1)),
    ((4, 6), Replicate()), ((4, 2), None),
]  # fmt: skip


def gather_on_rank(rank: int, folder: str) -> None:
    """Raises unless this rank gets the full tensors, cast to bfloat16."""
    dist.init_process_group("gloo", store=FileStore(f"{folder}/store", RANKS), rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    torch.manual_seed(0)
    full = [torch.randn(shape) for shape, _ in LAYOUTS]
    layouts = [layout for _, layout in LAYOUTS]
    tensors = [distribute_tensor(f, mesh, [by]) if by else f for f, by in zip(full, layouts, strict=True)]
    outputs = [torch.empty_like(tensor, dtype=torch.bfloat16) for tensor in full]
    gather_into(outputs, tensors)
    for output, tensor in zip(outputs, full, strict=True):
        torch.testing.assert_close(output, tensor.bfloat16(), rtol=0, atol=0)


def test_shards_are_gathered_by_every_rank(tmp_path: Path) -> None:
    mp.spawn(gather_on_rank, (str(tmp_path),), RANKS)  # type: ignore[no-untyped-call]


def test_shapes_are_known_without_a_gather() -> None:
    parameters = {"embed": nn.Parameter(torch.zeros(4, 2)), "norm": nn.Parameter(torch.zeros(2))}
    gathered = GatheredParameters(parameters, torch.bfloat16, group=None)  # a gather would need a group
    assert shapes_of(gathered) == {"embed": [4, 2], "norm": [2]}
