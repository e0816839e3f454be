"""The `shared` link: on one host, trainer and engines share two buffers of weights in memory.

Engines' parameters are views of the front buffer. Before an update the trainer copies its weights to the back buffer
and updates them there in place. A publish makes the back buffer the front: engines rebind their parameters between two
forward passes, without a copy. The host has two copies of the weights for any number of engines.

A process that can't compute on the buffers (on a GPU, or with bfloat16 weights and float32 masters) copies instead.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.config.schema import Config
from slipstream.model.device import dtype_of
from slipstream.sync.link import ConnectionInfo, Layout, Parameters, PublishHandle, Receiver, Sender, Shapes, shapes_of

PORTABLE = 1  # `cudaHostRegisterPortable`: for all devices of the process


class SharedSender(Sender):
    """The trainer's end: owns the shared file of both buffers."""

    def __init__(self, parameters: Parameters, config: Config, directory: Path, receivers: int) -> None:
        self._parameters, self._dtype = parameters, dtype_of(config)
        layout = Layout(shapes_of(parameters), self._dtype)
        self._handle, self._path = allocate_shared_file(2 * layout.size)
        self._device = next(iter(parameters.values())).device
        self._files = SharedFiles(self._device)
        self._buffers = views_of_buffers(self._files, self._path, layout)
        on_cpu = all(p.device.type == "cpu" for p in parameters.values())
        # Gathered tensors are not the trainer's parameters.
        own = all(isinstance(p, nn.Parameter) and p.dtype == self._dtype for p in parameters.values())
        self._in_place = on_cpu and own
        self._front = self._home = 0  # indices of the buffers that engines read, and of the trainer's parameters
        self._released = True
        self._copy_to(0)
        if self._in_place:
            self._move_to(0)

    def connection_info(self) -> ConnectionInfo:
        dtype = str(self._dtype).removeprefix("torch.")
        return {"path": self._path, "dtype": dtype, "shapes": shapes_of(self._parameters)}

    def before_update(self) -> None:
        """Move the trainer's parameters out of the buffer that engines read. Raises `RuntimeError` before `release`."""
        if not self._released:
            raise RuntimeError("weights may not change before every generator serves the version that was staged")
        if self._in_place and self._home == self._front:
            self._copy_to(1 - self._front)
            self._move_to(1 - self._front)

    def stage(self, version: int) -> PublishHandle:
        back = self._home if self._in_place else 1 - self._front
        if not self._in_place:
            self._copy_to(back)
        self._released = False
        return {"version": version, "buffer": back}

    def release(self, handle: PublishHandle) -> None:
        self._front, self._released = handle["buffer"], True

    def close(self) -> None:
        self._files.close()
        free_shared_file(self._handle, self._path)

    @torch.no_grad()
    def _copy_to(self, index: int) -> None:
        """Copy the weights to a buffer, without blocking, so that a GPU casts them: else the host does."""
        for name, parameter in self._parameters.items():
            self._buffers[index][name].copy_(parameter, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _move_to(self, index: int) -> None:
        for name, parameter in self._parameters.items():
            parameter.data = self._buffers[index][name]
        self._home = index


class SharedReceiver(Receiver):
    """The engine's end: maps both buffers."""

    rebindable = True

    def __init__(self, connection_info: ConnectionInfo, shapes: Shapes, rank: int, device: torch.device) -> None:
        layout = Layout(connection_info["shapes"], getattr(torch, connection_info["dtype"]))
        self._files = SharedFiles(device)
        self._buffers = views_of_buffers(self._files, connection_info["path"], layout)

    def prepare(self, handle: PublishHandle) -> dict[str, Tensor]:
        return self._buffers[handle["buffer"]]

    def close(self) -> None:
        self._buffers.clear()
        self._files.close()


class Shared:
    Sender, Receiver = SharedSender, SharedReceiver


def views_of_buffers(files: SharedFiles, path: str, layout: Layout) -> list[dict[str, Tensor]]:
    """Views of both buffers of the shared file: tensors by name."""
    memory = files.map(Path(path))
    return [layout.views(memory[: layout.size]), layout.views(memory[layout.size :])]


def allocate_shared_file(size: int) -> tuple[int, str]:
    """Create a file of `size` bytes in memory. Returns its descriptor, and a path for other processes of this user.

    On Linux it is a memfd, which the system frees when the last process that uses it ends.
    """
    if hasattr(os, "memfd_create"):
        handle = os.memfd_create("slipstream-weights")
        path = f"/proc/{os.getpid()}/fd/{handle}"
    else:
        handle, path = tempfile.mkstemp(prefix="slipstream-weights-")
    os.truncate(handle, size)
    return handle, path


def free_shared_file(handle: int, path: str) -> None:
    """Close and remove a file of `allocate_shared_file`. Processes that have mapped it keep their mapping."""
    os.close(handle)
    with contextlib.suppress(OSError):  # a memfd has no name
        Path(path).unlink()


class SharedFiles:
    """Shared files that this process has mapped, each once, and page-locked if they are for a GPU.

    A GPU copies memory that is not page-locked at a fraction of its rate. If CUDA refuses to lock it, a warning says
    so.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._mapped: dict[tuple[str, int], Tensor] = {}  # by path and inode: a path may come to name another file
        self._locked: set[tuple[str, int]] = set()

    def map(self, path: Path) -> Tensor:
        """The bytes of a file. Files that are gone are unmapped."""
        key = str(path), path.stat().st_ino
        if key not in self._mapped:
            for gone in [each for each in self._mapped if not Path(each[0]).exists()]:
                self._unmap(gone)
            memory = torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)
            self._mapped[key] = memory
            if self._device.type == "cuda":
                self._lock(key, memory)
        return self._mapped[key]

    def close(self) -> None:
        """Unmap all files, which stay, and unlock their memory."""
        for key in list(self._mapped):
            self._unmap(key)

    def _unmap(self, key: tuple[str, int]) -> None:
        memory = self._mapped.pop(key)
        if key in self._locked:
            self._locked.remove(key)
            with torch.cuda.device(self._device):
                _cuda_runtime().cudaHostUnregister(memory.data_ptr())  # fails after any other error of the device

    def _lock(self, key: tuple[str, int], memory: Tensor) -> None:
        with torch.cuda.device(self._device):
            if error := int(_cuda_runtime().cudaHostRegister(memory.data_ptr(), memory.nbytes, PORTABLE)):
                size = f"{memory.nbytes / 1e9:.1f} GB"
                print(f"warning: CUDA can't page-lock {size} (error {error}), so copies are slow", file=sys.stderr)
            else:
                self._locked.add(key)


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
