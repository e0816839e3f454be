"""The `single_copy` link: on the same GPUs, trainer and engine compute on the same weights.

The engine exports its tensors by CUDA IPC, and the trainer's model uses them as parameters: forward and backward passes
read the served weights. The optimizer keeps master weights. To publish, the engine casts the masters into its tensors
between two forward passes; there is no other copy and no staging. With tensor parallelism, each trainer rank has the
shard of the engine rank on its GPU.
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

from slipstream.config.schema import Config
from slipstream.sync.link import (
    ConnectionInfo,
    OwnPart,
    Parameters,
    PublishHandle,
    Receiver,
    Sender,
    Shapes,
    shapes_of,
)

DEVICE_ARGUMENT = 6  # index of the device argument of `rebuild_cuda_tensor`


class SingleCopySender(Sender):
    """The trainer's end: exports its master weights to the engine by CUDA IPC."""

    on_every_rank = one_trainer = True

    def __init__(self, parameters: Parameters, config: Config, directory: Path, receivers: int) -> None:
        self._parameters = parameters

    def connection_info(self) -> ConnectionInfo:
        return {"shapes": shapes_of(self._parameters), "masters": export_ipc_handles(self._parameters)}

    def stage(self, version: int) -> PublishHandle:
        torch.cuda.synchronize()  # the engine's stream does not wait for this process
        return {"version": version}


class SingleCopyReceiver(Receiver):
    """The engine's end: maps the masters of the trainer rank on its GPU."""

    def __init__(self, connection_info: ConnectionInfo, shapes: Shapes, rank: int, device: torch.device) -> None:
        masters = import_ipc_handles(connection_info["parts"][rank - 1]["masters"], device)
        self._masters = {name: OwnPart(tensor) for name, tensor in masters.items()}

    def prepare(self, handle: PublishHandle) -> dict[str, OwnPart]:
        return self._masters

    def close(self) -> None:
        self._masters.clear()


class SingleCopy:
    Sender, Receiver = SingleCopySender, SingleCopyReceiver


def export_ipc_handles(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """CUDA IPC handles of these tensors, or of their local parts, for another process on this host."""
    from slipstream.sync.sharded_weights import local_part  # which takes a second, and the controller imports this file

    reduce: Any = reductions.reduce_tensor
    handles = {name: reduce(local_part(tensor.detach()))[1] for name, tensor in tensors.items()}
    return {name: base64.b64encode(pickle.dumps(handle)).decode() for name, handle in handles.items()}


def import_ipc_handles(handles: Mapping[str, str], device: torch.device) -> dict[str, Tensor]:
    """The tensors of `export_ipc_handles`, mapped in this process. `device` is their GPU, as this process numbers it.

    Unpickles the handles: they must come from a process of this run.
    """
    rebuild: Any = reductions.rebuild_cuda_tensor
    tensors = {}
    for name, handle in handles.items():
        arguments = list(pickle.loads(base64.b64decode(handle)))
        arguments[DEVICE_ARGUMENT] = device.index or 0
        tensors[name] = rebuild(*arguments)
    return tensors
