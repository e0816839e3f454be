"""The `nccl_direct` link: vLLM's weight transfer engine, which pauses an engine during the whole transfer.

It needs no staging memory: use it if GPU memory is too small for `nccl`. The trainer needs vLLM. Ranks meet through a
`rendezvous`. Each connect maps the trainer's to vLLM's parameters (`map_parameters`), although only checksums use the
result: a model that can't be mapped is rejected, even if no checksums are compared. FP8 engines are rejected, too.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.config.schema import Config, ConfigError
from slipstream.errors import InvalidInput, UserError
from slipstream.model.device import dtype_of
from slipstream.runtime.addresses import LOOPBACK, own_address
from slipstream.sync.link import ConnectionInfo, Parameters, PublishHandle, Sender, shapes_of
from slipstream.sync.rendezvous import Gate, open_tunnel


class NcclDirectSender(Sender):
    """The trainer's end, rank 0 of vLLM's communicator."""

    collective = receives_in_place = True

    def __init__(self, parameters: Parameters, config: Config, directory: Path, receivers: int) -> None:
        self._open, self._send = import_transfer()
        self._parameters, self._dtype = parameters, dtype_of(config)
        self._ranks = receivers + 1
        # Reserve the port: other processes can't bind it, but vLLM can, since it sets SO_REUSEADDR too.
        self._port_reservation = socket.socket()
        self._port_reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port_reservation.bind((LOOPBACK, 0))
        self._port = self._port_reservation.getsockname()[1]
        self._gate = Gate(own_address(), self._port)
        self._thread = ThreadPoolExecutor(1)

    def connection_info(self) -> ConnectionInfo:
        address = {"master_address": LOOPBACK, "master_port": self._port, "world_size": self._ranks}
        # In a thread: the call returns when all receivers have joined.
        self._group = self._thread.submit(self._open, address)
        dtype = str(self._dtype).removeprefix("torch.")
        return {"gate": self._gate.info, "ranks": self._ranks, "shapes": shapes_of(self._parameters), "dtype": dtype}

    def check_connection(self) -> None:
        if self._group.done() and (error := self._group.exception()):
            where = f'its end of sync.link = "nccl_direct" at {LOOPBACK}:{self._port}'
            raise UserError(f"the trainer can't open {where}: {error}") from error

    def stage(self, version: int) -> PublishHandle:
        return {"version": version}

    def send(self, handle: PublishHandle) -> None:
        tensors = ((name, p.detach().to(self._dtype)) for name, p in self._parameters.items())
        self._send(self._group.result(), tensors)
        torch.cuda.synchronize()

    def close(self) -> None:
        self._port_reservation.close()
        self._gate.close()
        self._thread.shutdown(wait=False)


class NcclDirectReceiver:
    """The engine's end: vLLM's worker receives into the served weights, so there is no `prepare`."""

    def __init__(self, connection_info: ConnectionInfo, worker: Any, rank: int) -> None:
        self._worker, self._tunnel = worker, open_tunnel(connection_info["gate"])
        address = {
            "master_address": LOOPBACK, "master_port": self._tunnel.port, "world_size": connection_info["ranks"],
        }  # fmt: skip
        shapes = connection_info["shapes"]
        update = {
            "names": list(shapes), "shapes": list(shapes.values()),
            "dtype_names": [connection_info["dtype"]] * len(shapes),
        }  # fmt: skip
        address, self._update = packed_options(worker.weight_transfer_engine, address | {"rank_offset": rank}, update)
        worker.init_weight_transfer_engine(address)

    def receive(self) -> None:
        """Receive the version that is being sent into the served weights. The engine is paused meanwhile."""
        self._worker.start_weight_update()
        self._worker.update_weights(self._update)
        self._worker.finish_weight_update()

    def close(self) -> None:
        self._tunnel.close()


class NcclDirect:
    Sender, Receiver = NcclDirectSender, NcclDirectReceiver


def import_transfer() -> tuple[Callable[[Mapping[str, Any]], Any], Callable[[Any, Iterator[tuple[str, Tensor]]], None]]:
    """Functions that open a communicator as rank 0, and send tensors, by vLLM's NCCL transfer (0.25 and 0.32).

    Raises `ConfigError` if vLLM is missing or has no such functions.
    """
    try:
        from vllm.distributed.weight_transfer.nccl_common import trainer_init
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer
    except ModuleNotFoundError as error:
        raise ConfigError(f'sync.link = "nccl_direct" needs vLLM in the trainer, too: {error}') from None
    except ImportError as error:
        raise ConfigError(
            f'sync.link = "nccl_direct" does not support the transfer of this vLLM ({error}); use sync.link = "nccl"'
        ) from None

    def send(group: Any, tensors: Iterator[tuple[str, Tensor]]) -> None:
        packed_nccl_broadcast_producer(tensors, group, src=0, post_iter_func=lambda named: named[1])

    return trainer_init, send


def packed_options(engine: Any, address: Mapping[str, Any], update: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Both arguments, with `packed = True` in the one where vLLM has it: `address` from 0.32 on, `update` in 0.25.

    Raises `InvalidInput` if neither or both have it.
    """
    kinds = (engine.init_info_cls, address), (engine.update_info_cls, update)
    packed = [{**info} | ({"packed": True} if "packed" in kind.__dataclass_fields__ else {}) for kind, info in kinds]
    if sum("packed" in info for info in packed) != 1:
        remedy = 'use sync.link = "nccl"'
        raise InvalidInput(f"this vLLM's transfer engine has an unknown option for packed tensors; {remedy}")
    return packed
