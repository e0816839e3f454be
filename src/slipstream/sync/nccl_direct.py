"""The `nccl_direct` link: vLLM's own weight transfer engine, which holds an engine while weights arrive.

It needs no staging memory, but generation stands still for the whole transfer: use it where `nccl` has no room. A model
must lie in vLLM as for any other link, since what is served is compared with what was sent.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.config import Config
from slipstream.models import dtype_of
from slipstream.sync.link import Parameters, Sender, Ticket, shapes_of
from slipstream.vllm_releases import told_packed, transfer

HOST = "127.0.0.1"


class NativeSender(Sender):
    """The trainer's end, rank 0 of vLLM's communicator."""

    collective = at_swap = True

    def __init__(self, parameters: Parameters, config: Config, directory: Path, receivers: int) -> None:
        self._open, self._send = transfer()
        self._parameters, self._dtype = parameters, dtype_of(config)
        self._ranks = receivers + 1
        # Nobody else gets a port that is bound here, but vLLM, which binds by the same option, listens at it.
        self._held = socket.socket()
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.bind((HOST, 0))
        self._port = self._held.getsockname()[1]
        self._thread = ThreadPoolExecutor(1)

    def offer(self) -> Ticket:
        address = {"master_address": HOST, "master_port": self._port, "world_size": self._ranks}
        # Both ends wait for each other in there.
        self._group = self._thread.submit(self._open, address)
        return {**address, "shapes": shapes_of(self._parameters), "dtype": str(self._dtype).removeprefix("torch.")}

    def connecting(self) -> None:
        if self._group.done() and (error := self._group.exception()):
            where = f'its end of sync.link = "nccl_direct" at {HOST}:{self._port}'
            raise RuntimeError(f"the trainer can't open {where}: {error}") from error

    def stage(self, version: int) -> Ticket:
        return {"version": version}

    def send(self, ticket: Ticket) -> None:
        self._send(self._group.result(), self._tensors())
        torch.cuda.synchronize()

    def close(self) -> None:
        self._held.close()
        self._thread.shutdown(wait=False)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, p.detach().to(self._dtype)) for name, p in self._parameters.items())


class NativeReceiver:
    """vLLM's end. It is the worker that receives and loads, so there is nothing to prepare."""

    lasting = False

    def __init__(self, offer: Ticket, worker: Any, rank: int) -> None:
        self._worker = worker
        address = {name: offer[name] for name in ("master_address", "master_port", "world_size")}
        shapes = offer["shapes"]
        update = {
            "names": list(shapes), "shapes": list(shapes.values()), "dtype_names": [offer["dtype"]] * len(shapes),
        }  # fmt: skip
        address, self._update = told_packed(worker.weight_transfer_engine, address | {"rank_offset": rank}, update)
        worker.init_weight_transfer_engine(address)

    def receive(self) -> None:
        """Take the version that is being sent, into place. The engine is held for as long as that takes."""
        self._worker.start_weight_update()
        self._worker.update_weights(self._update)
        self._worker.finish_weight_update()


class Native:
    """Both ends."""

    Sender, Receiver = NativeSender, NativeReceiver
