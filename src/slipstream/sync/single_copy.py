"""The `single_copy` link: on the same GPUs, trainer and engine compute on the same weights.

The engine's tensors are exported by CUDA IPC, and the trainer's model takes them for its parameters: forward and
backward passes read what is being served. The optimizer keeps float32 masters. Publishing is their cast into the
engine's tensors, done by the engine itself between two forward passes, so that no pass sees two versions. Nothing else
is copied, and nothing is staged. Where several GPUs share an engine's tensors, each rank of the trainer has the part
that the engine's rank on its GPU has.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from slipstream.config import Config
from slipstream.sync.gathered import part_here
from slipstream.sync.link import Parameters, Sender, Ticket, refuse_other_parameters, shapes_of

DEVICE = 6  # the argument of `rebuild_cuda_tensor` that numbers the GPU


class SingleCopySender(Sender):
    """The trainer's end: lends its masters to the engine."""

    everywhere = True

    def __init__(self, parameters: Parameters, config: Config, directory: Path, receivers: int) -> None:
        self._parameters = parameters

    def offer(self) -> Ticket:
        return {"shapes": shapes_of(self._parameters), "masters": lend(self._parameters)}

    def stage(self, version: int) -> Ticket:
        torch.cuda.synchronize()  # the engine reads the masters in a stream that knows nothing of this process
        return {"version": version}


class SingleCopyReceiver:
    """The engine's end: the masters, mapped."""

    lasting = False

    def __init__(self, offer: Ticket, shapes: dict[str, list[int]], rank: int, device: torch.device) -> None:
        refuse_other_parameters(shapes, offer["shapes"])
        masters = borrow(offer["parts"][rank - 1]["masters"], device)
        self._masters = {name: _Own(tensor) for name, tensor in masters.items()}

    def prepare(self, ticket: Ticket) -> dict[str, _Own]:
        return self._masters

    def close(self) -> None:
        self._masters.clear()


class _Own:
    """A rank's part of a parameter, whatever index of the whole is asked for: the engine's rank has no other."""

    def __init__(self, part: Tensor) -> None:
        self._part = part

    def __getitem__(self, index: Any) -> Tensor:
        return self._part


class SingleCopy:
    """Both ends."""

    Sender, Receiver = SingleCopySender, SingleCopyReceiver


def lend(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Handles by which another process of this host maps these tensors of a GPU, or what this rank has of them."""
    reduce: Any = reductions.reduce_tensor
    handles = {name: reduce(part_here(tensor.detach()))[1] for name, tensor in tensors.items()}
    return {name: base64.b64encode(pickle.dumps(handle)).decode() for name, handle in handles.items()}


def borrow(handles: Mapping[str, str], device: torch.device) -> dict[str, Tensor]:
    """The tensors that another process has lent, on the GPU that is `device` here, whatever its number is there.

    Handles come from a process that this run has started, by a pipe.
    """
    rebuild: Any = reductions.rebuild_cuda_tensor
    tensors = {}
    for name, handle in handles.items():
        arguments = list(pickle.loads(base64.b64decode(handle)))
        arguments[DEVICE] = device.index or 0
        tensors[name] = rebuild(*arguments)
    return tensors
