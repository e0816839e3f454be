"""The `nccl` link: the trainer broadcasts its weights into memory beside every running engine.

Parameters are cast and packed into buckets of one flat layout, and each bucket is one broadcast over a process group of
this link's own. Receivers take it on a stream of their own into a staging buffer of the whole model, while the engine
goes on decoding on the weights it has; the swap is one copy on the device between two forward passes. On CPUs the same
code runs over gloo.
"""

from __future__ import annotations

import contextlib
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from slipstream.config import Config
from slipstream.models import dtype_of
from slipstream.sync.layout import Layout
from slipstream.sync.link import Parameters, Sender, Ticket, refuse_other_parameters, shapes_of

BUCKET = 2**30  # bytes of one broadcast: a launch has to find room beside the passes of the engine, so few of them
TIME_LIMIT = timedelta(seconds=60)


class NcclSender(Sender):
    """The trainer's end, rank 0. Two buckets are filled in turn, so that packing one overlaps sending the other."""

    collective = lets_go = True

    def __init__(self, parameters: Parameters, config: Config, directory: Path, receivers: int) -> None:
        dtype = dtype_of(config)
        self._parameters, self._ranks = parameters, receivers + 1
        self._device = next(iter(parameters.values())).device
        self._layout = Layout(shapes_of(parameters), dtype)
        self._store = loopback_store(TIME_LIMIT)
        self._group: Any = None
        self._buckets = self._layout.buckets(BUCKET)
        size = max(end - start for start, end, _ in self._buckets)
        self._buffers = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(2)]

    def offer(self) -> Ticket:
        return {
            "host": "127.0.0.1",
            "port": self._store.port,
            "ranks": self._ranks,
            "dtype": str(self._layout.dtype).removeprefix("torch."),
            "shapes": self._layout.shapes,
        }

    def stage(self, version: int) -> Ticket:
        return {"version": version}

    @torch.no_grad()
    def send(self, ticket: Ticket) -> None:
        self._group = self._group or join(self._store, 0, self._ranks, self._device)
        sending: list[Any] = [None, None]
        for index, (start, end, names) in enumerate(self._buckets):
            buffer = self._buffers[index % 2]
            if sending[index % 2]:
                sending[index % 2].wait()
            places = self._layout.views(buffer, start, names)
            torch._foreach_copy_(list(places.values()), [self._parameters[name] for name in names])
            sending[index % 2] = broadcast(self._group, buffer[: end - start])
        for work in filter(None, sending):
            work.wait()
        synchronize(self._device)

    def close(self) -> None:
        self._group = None


class NcclReceiver:
    """A generator's end: a staging buffer of the whole model."""

    lasting = False  # the buffer takes the next version, too

    def __init__(self, offer: Ticket, shapes: dict[str, list[int]], rank: int, device: torch.device) -> None:
        refuse_other_parameters(shapes, offer["shapes"])
        self._offer, self._rank, self._device = offer, rank, device
        self._layout = Layout(offer["shapes"], getattr(torch, offer["dtype"]))
        self._staging = torch.empty(self._layout.size, dtype=torch.uint8, device=device)
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._group: Any = None

    def prepare(self, ticket: Ticket) -> dict[str, Tensor]:
        if self._group is None:
            store = TCPStore(self._offer["host"], self._offer["port"], is_master=False, timeout=TIME_LIMIT)
            self._group = join(store, self._rank, self._offer["ranks"], self._device)
        with torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext():
            for start, end, _ in self._layout.buckets(BUCKET):
                broadcast(self._group, self._staging[start:end]).wait()
        if self._stream:
            self._stream.synchronize()
        return self._layout.views(self._staging)

    def close(self) -> None:
        self._group = None


class Nccl:
    """Both ends."""

    Sender, Receiver = NcclSender, NcclReceiver


def loopback_store(timeout: timedelta = timedelta(minutes=5)) -> TCPStore:
    """A store at a free port of the loopback interface; by itself torch listens on all interfaces of the host."""
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    return TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listening.detach()
    )


def join(store: Any, rank: int, ranks: int, device: torch.device) -> Any:
    """A process group of this link alone, whatever groups the process has beside it."""
    if device.type == "cuda":
        from torch.distributed import ProcessGroupNCCL

        torch.cuda.set_device(device)
        options = ProcessGroupNCCL.Options()
        options._timeout = TIME_LIMIT
        return ProcessGroupNCCL(store, rank, ranks, options)
    return ProcessGroupGloo(store, rank, ranks, TIME_LIMIT)


def broadcast(group: Any, tensor: Tensor) -> Any:
    """Start a broadcast from rank 0."""
    options = torch.distributed.BroadcastOptions()
    options.rootRank = 0
    return group.broadcast([tensor], options)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
