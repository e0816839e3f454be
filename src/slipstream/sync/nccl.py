"""The `nccl` link: the trainer broadcasts its weights into a staging buffer of every engine.

The sender casts parameters and packs them into buckets of one flat layout. It broadcasts each bucket in the link's own
process group, whose members meet through a `rendezvous`. Receivers use a separate CUDA stream and a staging buffer of
the whole model, while the engine decodes on the old weights. The swap is one copy on the device between two forward
passes. On CPUs the group uses gloo.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from slipstream.config.schema import Config
from slipstream.model.device import dtype_of
from slipstream.runtime.addresses import LOOPBACK, address_towards, own_address, private_store
from slipstream.sync.link import ConnectionInfo, Layout, Parameters, PublishHandle, Receiver, Sender, Shapes, shapes_of
from slipstream.sync.rendezvous import Gate, Relay, open_tunnel

BUCKET = 2**30  # bytes of one broadcast; few launches, since each waits for free SMs while the engine decodes
TIME_LIMIT = timedelta(seconds=60)


class NcclSender(Sender):
    """The trainer's end, rank 0 of the group. Two buffers: packing one bucket overlaps the broadcast of the other."""

    collective = trainer_free_after_send = True

    def __init__(self, parameters: Parameters, config: Config, directory: Path, receivers: int) -> None:
        self._parameters, self._ranks = parameters, receivers + 1
        self._device = next(iter(parameters.values())).device
        self._layout = Layout(shapes_of(parameters), dtype_of(config))
        self._store = private_store(LOOPBACK, TIME_LIMIT)
        self._gate = Gate(own_address(), self._store.port)
        self._group: Any = None
        self._buckets = self._layout.buckets(BUCKET)
        size = max(end - start for start, end, _ in self._buckets)
        self._buffers = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(2)]

    def connection_info(self) -> ConnectionInfo:
        dtype = str(self._layout.dtype).removeprefix("torch.")
        return {"gate": self._gate.info, "ranks": self._ranks, "dtype": dtype, "shapes": self._layout.shapes}

    def stage(self, version: int) -> PublishHandle:
        return {"version": version}

    @torch.no_grad()
    def send(self, handle: PublishHandle) -> None:
        self._group = self._group or join(self._store, 0, self._ranks, self._device, address=own_address())
        sending: list[Any] = [None, None]
        for index, (start, end, names) in enumerate(self._buckets):
            buffer = self._buffers[index % 2]
            if sending[index % 2]:
                sending[index % 2].wait()
            views = self._layout.views(buffer, start, names)
            torch._foreach_copy_(list(views.values()), [self._parameters[name] for name in names])
            sending[index % 2] = self._group.broadcast(buffer[: end - start], root=0)
        for work in filter(None, sending):
            work.wait()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        self._group = None
        self._gate.close()


class NcclReceiver(Receiver):
    """The engine's end: a staging buffer of the whole model."""

    rebindable = False  # the next version overwrites the buffer

    def __init__(self, connection_info: ConnectionInfo, shapes: Shapes, rank: int, device: torch.device) -> None:
        self._connection_info, self._rank, self._device = connection_info, rank, device
        self._layout = Layout(connection_info["shapes"], getattr(torch, connection_info["dtype"]))
        self._staging = torch.empty(self._layout.size, dtype=torch.uint8, device=device)
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._tunnel: Relay | None = None
        self._group: Any = None

    def prepare(self, handle: PublishHandle) -> dict[str, Tensor]:
        if self._group is None:
            gate, ranks = self._connection_info["gate"], self._connection_info["ranks"]
            self._tunnel = self._tunnel or open_tunnel(gate)
            store = TCPStore(LOOPBACK, self._tunnel.port, is_master=False, timeout=TIME_LIMIT)
            self._group = join(store, self._rank, ranks, self._device, address=address_towards(gate["host"]))
        with torch.cuda.stream(self._stream):
            for start, end, _ in self._layout.buckets(BUCKET):
                self._group.broadcast(self._staging[start:end], root=0).wait()
        if self._stream:
            self._stream.synchronize()
        return self._layout.views(self._staging)

    def close(self) -> None:
        """Abort a transfer that still runs.

        gloo can't abort. Its thread ends when the trainer closes its end or after the time limit, and frees the group
        then: freeing it here would wait for that thread.
        """
        if self._device.type == "cuda":
            self._group = None
        if self._tunnel:
            self._tunnel.close()


class Nccl:
    Sender, Receiver = NcclSender, NcclReceiver


def join(
    store: Any, rank: int, ranks: int, device: torch.device, limit: timedelta = TIME_LIMIT, address: str = ""
) -> Any:
    """A process group for this link, independent of the process's default group; gloo listens at `address`, if given.

    NCCL chooses its interface itself, or by NCCL_SOCKET_IFNAME.
    """
    if device.type == "cuda":
        from torch.distributed import ProcessGroupNCCL

        torch.cuda.set_device(device)
        options = ProcessGroupNCCL.Options()
        options._timeout = limit
        return ProcessGroupNCCL(store, rank, ranks, options)
    if not address:
        return ProcessGroupGloo(store, rank, ranks, limit)
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._devices, options._timeout = [gloo.create_device(hostname=address)], limit
    return gloo(store, rank, ranks, options)
