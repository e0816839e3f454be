"""The `shared` link: on one host, trainer and generators use the same memory for the weights.

Two flat buffers lie in shared memory. One is the front: generators' parameters are views into it. When the trainer is
about to change the weights it moves into the back buffer and updates there, in place; publishing then tells the
generators to look there instead, between two forward passes. Nothing is copied while a generator is held, and there
are two copies of the weights on the host however many generators there are.

Where a side can't compute on the buffers themselves (a GPU, or bfloat16 beside float32 master weights) it copies.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from slipstream.sync.link import Parameters, Ticket

ALIGNMENT = 64


def layout(parameters: Parameters, dtype: torch.dtype) -> tuple[dict[str, int], int]:
    """Byte offset of each parameter in a flat buffer, and the buffer's size. Pure: both ends compute the same."""
    offsets, end = {}, 0
    for name, parameter in parameters.items():
        offsets[name] = end
        end += -(-parameter.numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    return offsets, end


def map_buffers(path: str, parameters: Parameters, dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """Both buffers of the shared file as one tensor a parameter."""
    offsets, size = layout(parameters, dtype)
    memory = torch.from_file(path, shared=True, size=2 * size, dtype=torch.uint8)
    return [
        {
            name: memory[at + offset : at + offset + p.numel() * dtype.itemsize].view(dtype).view(p.shape)
            for (name, p), offset in zip(parameters.items(), offsets.values(), strict=True)
        }
        for at in (0, size)
    ]


class SharedSender:
    """The trainer's end: owns the memory."""

    def __init__(self, parameters: Parameters, dtype: torch.dtype, directory: Path) -> None:
        self._parameters, self._dtype = parameters, dtype
        self._handle, self._path = allocate(2 * layout(parameters, dtype)[1])
        self._buffers = map_buffers(self._path, parameters, dtype)
        self._in_place = all(p.dtype == dtype and p.device.type == "cpu" for p in parameters.values())
        self._front = 0
        self._copy_to(self._buffers[0])
        self._home = 0  # the buffer that the trainer's own parameters are views of, where they can be
        if self._in_place:
            self._move_to(0)

    def offer(self) -> Ticket:
        shapes = {name: list(p.shape) for name, p in self._parameters.items()}
        return {"path": self._path, "dtype": str(self._dtype).removeprefix("torch."), "shapes": shapes}

    def before_update(self) -> None:
        """Leave the buffer that generators read. `release` of the last publish says that they left the other."""
        if self._in_place and self._home == self._front:
            back = 1 - self._front
            self._copy_to(self._buffers[back])
            self._move_to(back)

    def stage(self, version: int) -> Ticket:
        back = self._home if self._in_place else 1 - self._front
        if not self._in_place:
            self._copy_to(self._buffers[back])
        return {"version": version, "buffer": back}

    def release(self, ticket: Ticket) -> None:
        self._front = ticket["buffer"]

    def close(self) -> None:
        os.close(self._handle)
        with contextlib.suppress(OSError):  # in memory it has no name
            Path(self._path).unlink()

    @torch.no_grad()
    def _copy_to(self, buffer: dict[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            buffer[name].copy_(parameter)

    def _move_to(self, index: int) -> None:
        for name, parameter in self._parameters.items():
            parameter.data = self._buffers[index][name]
        self._home = index


class SharedReceiver:
    """A generator's end: its parameters are views of the front buffer, or are copied from it on another device."""

    def __init__(self, parameters: Parameters, offer: Ticket) -> None:
        refuse_other_parameters(parameters, offer["shapes"])
        dtype: torch.dtype = getattr(torch, offer["dtype"])
        self._parameters = parameters
        self._buffers = map_buffers(offer["path"], parameters, dtype)
        self._in_place = all(p.dtype == dtype and p.device.type == "cpu" for p in parameters.values())
        self._next = 0

    def prepare(self, ticket: Ticket) -> None:
        self._next = ticket["buffer"]

    @torch.no_grad()
    def apply(self) -> None:
        for name, parameter in self._parameters.items():
            if self._in_place:
                parameter.data = self._buffers[self._next][name]
            else:
                parameter.copy_(self._buffers[self._next][name])

    def close(self) -> None:
        self._buffers.clear()


def refuse_other_parameters(parameters: Parameters, shapes: dict[str, list[int]]) -> None:
    """Raise `ValueError`, naming the first difference, unless names and shapes are those of the sender."""
    ours = {name: list(p.shape) for name, p in parameters.items()}
    for name in (*shapes, *ours):
        if ours.get(name) != shapes.get(name):
            raise ValueError(f"{name} is {shapes.get(name)} in the trainer and {ours.get(name)} in the generator")


def allocate(size: int) -> tuple[int, str]:
    """A file of `size` bytes in memory: its handle, and the path by which this user's other processes open it.

    On Linux it has no name, so it can't outlive the processes that use it, whatever becomes of them.
    """
    if hasattr(os, "memfd_create"):
        handle = os.memfd_create("slipstream-weights")
        path = f"/proc/{os.getpid()}/fd/{handle}"
    else:
        handle, path = tempfile.mkstemp(prefix="slipstream-weights-")
    os.truncate(handle, size)
    return handle, path
