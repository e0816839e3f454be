"""The ranks of one trainer, and how weights and gradients are spread over them.

Every rank is a process with one device that gets every batch, works on its own share of it, and takes the same steps.
Either each holds all weights ("ddp") and gradients are summed once a step, or each holds a part of every weight
("fsdp", Zhao et al. 2023, arXiv:2304.11277), gathers a layer when it is computed, and keeps its part of the summed
gradient. Or all of them work on all of it, each with its part of every layer ("tensor", see `trainers.tensor`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from slipstream.config import ConfigError, TrainerConfig
from slipstream.trainers.memory import layers

DONE = -1  # said by rank 0 instead of the number of a parameter


class Ranks:
    """The ranks that this process is one of, as `torchrun` names them in the environment.

    `files` and `calls` are groups on the CPU, for two threads that must not mix what they say.
    """

    def __init__(self, options: TrainerConfig, device: torch.device) -> None:
        """Wait for all ranks. Raises `ConfigError` if this process was started as one of another number."""
        self.size, self.rank, self.device = options.ranks, 0, device
        self.shares, self.share = 1, 0  # in how many parts a batch is worked on, and which is this rank's
        self.tensor = options.parallel == "tensor" and self.size > 1
        self.alike: frozenset[str] = frozenset()  # parameters that all ranks hold, and have parts of the gradient of
        self.files: Any = None
        self.calls: Any = None
        self.mesh: DeviceMesh | None = None
        if self.size == 1:
            return
        if (started := int(os.environ.get("WORLD_SIZE", "1"))) != self.size:
            raise ConfigError(f"trainer.ranks = {self.size}, but {started} ranks were started; make them the same")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if not dist.is_initialized():
            dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        self.rank = dist.get_rank()
        self.files, self.calls = (dist.new_group(backend="gloo") for _ in range(2))
        if self.tensor:
            self.mesh = init_device_mesh(device.type, (self.size,), mesh_dim_names=("tensor",))
            return
        self.shares, self.share = self.size, self.rank
        if options.parallel == "fsdp":
            shards = options.shards or self.size
            sizes = {"copies": self.size // shards, "shards": shards}
            names = tuple(name for name, size in sizes.items() if size > 1) or ("shards",)
            self.mesh = init_device_mesh(device.type, tuple(sizes[n] for n in names), mesh_dim_names=names)

    @property
    def sharded(self) -> bool:
        """Whether each rank holds only a part of the weights."""
        return self.mesh is not None

    @property
    def gathers(self) -> bool:
        """Whether each rank gathers a layer's weights when it is computed."""
        return self.sharded and not self.tensor

    def shard(self, policy: Any, compute: torch.dtype) -> None:
        """Leave each rank its part of every weight, to be gathered in `compute`; gradients are summed in float32.

        The weights may lie on the CPU: a layer goes to the device to be cut up, one at a time.
        """
        if not policy.packs:  # each rank would gather a layer as often as it has sequences
            raise ConfigError('trainer.parallel = "fsdp" can\'t train a model whose layers carry a state; use "ddp"')
        mixed = MixedPrecisionPolicy(
            param_dtype=None if compute == torch.float32 else compute,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,  # a batch keeps its log-probabilities as they are
        )
        for module in (*list(layers(policy.model)), policy):
            sharded: FSDPModule = fully_shard(module, mesh=self.mesh, mp_policy=mixed)
            # The loss has one denominator, so gradients are added up, not averaged.
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)

    def sum_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Add up the gradients of all ranks, where that is not done as they come."""
        if self.size == 1 or self.gathers:
            return
        summed = [p for name, p in parameters.items() if name in self.alike or not self.tensor]
        for parameter in summed:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for work in [dist.all_reduce(part_here(cast(Tensor, p.grad)), async_op=True) for p in summed]:
            work.wait()

    def sum(self, values: Mapping[str, Tensor]) -> dict[str, float]:
        """Each value added up over all ranks, which have the same names in the same order."""
        if not values:
            return {}
        total = torch.stack(list(values.values()))
        if self.shares > 1:
            dist.all_reduce(total)
        return dict(zip(values, total.tolist(), strict=True))

    def joined(self, columns: Sequence[Tensor]) -> Sequence[Tensor]:
        """Columns of all ranks, each `[entries of all ranks]` as floating point, from those of this one."""
        if self.shares == 1:
            return columns
        table = torch.stack([column.to(self.device, torch.float32) for column in columns])
        rows = [torch.zeros(1, dtype=torch.long, device=self.device) for _ in range(self.size)]
        dist.all_gather(rows, torch.full_like(rows[0], table.shape[1]))
        counts = [int(count) for count in rows]
        padded = nn.functional.pad(table, (0, max(counts) - table.shape[1]))
        tables = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(tables, padded)
        return torch.cat([table[:, :count] for table, count in zip(tables, counts, strict=True)], 1).unbind()

    def union(self, entries: dict[int, Any]) -> dict[int, Any]:
        """The entries of all ranks."""
        if self.shares == 1:
            return entries
        return {key: value for part in self.each(entries) for key, value in part.items()}

    def each(self, value: Any) -> list[Any]:
        """What each rank says, as plain data."""
        said: list[Any] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(said, value, group=self.calls)
        return said

    def forget_gathered(self, policy: nn.Module) -> None:
        """Leave only parts in memory after passes that no backward pass has followed."""
        if self.gathers:
            cast(FSDPModule, policy).reshard()

    def most(self, value: float) -> float:
        """The largest of all ranks' values."""
        if self.size == 1:
            return value
        largest = torch.tensor(value)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.calls)
        return largest.item()


class Whole(Mapping[str, Tensor]):
    """Sharded parameters as rank 0 reads them: whole, in the format `dtype`, each gathered when it is asked for.

    The others take part in every gather: they `follow` until rank 0 is `done`.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], dtype: torch.dtype, ranks: Ranks) -> None:
        self._parameters, self._dtype, self._ranks = parameters, dtype, ranks
        self._names = list(parameters)

    def __getitem__(self, name: str) -> Tensor:
        self._say(self._names.index(name))
        return self._gather(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def follow(self) -> None:
        """Gather what rank 0 asks for until it is done."""
        while (number := self._say(DONE)) != DONE:
            self._gather(self._names[number])

    def done(self) -> None:
        """Let the others go."""
        self._say(DONE)

    def _say(self, number: int) -> int:
        """What rank 0 says here."""
        said = torch.tensor(number)
        dist.broadcast(said, 0, group=self._ranks.calls)
        return int(said)

    def _gather(self, name: str) -> Tensor:
        return whole(self._parameters[name].detach().to(self._dtype))


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor of which each rank may hold a part; every rank has to ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part_here(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part_of(tensor: Tensor, like: Tensor) -> Tensor:
    """Of a tensor that every rank holds whole, what it holds of `like`."""
    return distribute_tensor(tensor, like.device_mesh, like.placements) if isinstance(like, DTensor) else tensor


def clip_gradients(parameters: Sequence[nn.Parameter], most: float) -> float:
    """Scale gradients so that their norm over all ranks is at most `most`. Returns what it was."""
    return whole(nn.utils.clip_grad_norm_(parameters, most)).item()
