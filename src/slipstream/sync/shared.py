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
from torch import Tensor, nn

from slipstream.config import Config
from slipstream.models import dtype_of
from slipstream.sync.layout import Layout
from slipstream.sync.link import Parameters, Sender, Ticket, refuse_other_parameters, shapes_of


class SharedSender(Sender):
    """The trainer's end: owns the memory."""

    def __init__(self, parameters: Parameters, config: Config, directory: Path, receivers: int) -> None:
        dtype = dtype_of(config)
        self._parameters, self._dtype = parameters, dtype
        self._handle, self._path = allocate(2 * Layout(shapes_of(parameters), dtype).size)
        self._buffers = map_buffers(self._path, Layout(shapes_of(parameters), dtype))
        # Pinned memory is that of a GPU's weights, which come back; what ranks gather is no parameter of the trainer's.
        on_cpu = all(p.device.type == "cpu" and not p.is_pinned() for p in parameters.values())
        own = all(isinstance(p, nn.Parameter) and p.dtype == dtype for p in parameters.values())
        self._in_place = on_cpu and own
        self._front = self._home = 0  # what generators read, and what the trainer's own parameters are views of
        self._released = True
        self._copy_to(0)
        if self._in_place:
            self._move_to(0)

    def offer(self) -> Ticket:
        dtype = str(self._dtype).removeprefix("torch.")
        return {"path": self._path, "dtype": dtype, "shapes": shapes_of(self._parameters)}

    def before_update(self) -> None:
        """Leave the buffer that generators read. `release` of the last publish says that they left the other."""
        if not self._released:
            raise RuntimeError("weights may not change before every generator serves the version that was staged")
        if self._in_place and self._home == self._front:
            self._copy_to(1 - self._front)
            self._move_to(1 - self._front)

    def stage(self, version: int) -> Ticket:
        back = self._home if self._in_place else 1 - self._front
        if not self._in_place:
            self._copy_to(back)
        self._released = False
        return {"version": version, "buffer": back}

    def release(self, ticket: Ticket) -> None:
        self._front, self._released = ticket["buffer"], True

    def close(self) -> None:
        free(self._handle, self._path)

    @torch.no_grad()
    def _copy_to(self, index: int) -> None:
        for name, parameter in self._parameters.items():
            self._buffers[index][name].copy_(parameter)

    def _move_to(self, index: int) -> None:
        for name, parameter in self._parameters.items():
            parameter.data = self._buffers[index][name]
        self._home = index


class SharedReceiver:
    """A generator's end: both buffers, mapped."""

    lasting = True

    def __init__(self, offer: Ticket, shapes: dict[str, list[int]], rank: int, device: torch.device) -> None:
        refuse_other_parameters(shapes, offer["shapes"])
        self._buffers = map_buffers(offer["path"], Layout(offer["shapes"], getattr(torch, offer["dtype"])))

    def prepare(self, ticket: Ticket) -> dict[str, Tensor]:
        return self._buffers[ticket["buffer"]]

    def close(self) -> None:
        self._buffers.clear()


class Shared:
    """Both ends."""

    Sender, Receiver = SharedSender, SharedReceiver


def map_buffers(path: str, layout: Layout) -> list[dict[str, Tensor]]:
    """Both buffers of the shared file as one tensor a parameter."""
    memory = torch.from_file(path, shared=True, size=2 * layout.size, dtype=torch.uint8)
    return [layout.views(memory[: layout.size]), layout.views(memory[layout.size :])]


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


def free(handle: int, path: str) -> None:
    """Give back what `allocate` gave. Processes that have mapped it keep it as long as they live."""
    os.close(handle)
    with contextlib.suppress(OSError):  # in memory it has no name
        Path(path).unlink()
