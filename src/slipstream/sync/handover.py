"""The link `handover`: what `sync.link = "shared"` is where engines and trainer take turns (`sync.placement`).

Each trainer rank hands full tensors to the engine processes on its GPU, in buckets. It gathers a bucket from all ranks,
and the engines copy their parts of it into the served weights. Engines do not decode meanwhile. Two buckets alternate,
so a rank gathers one while engines copy the other. No GPU holds a second copy of the weights beyond these buckets.
Engines map the buckets, which are in GPU memory, by CUDA IPC. If either side is on a CPU, or there are more engine
processes than ranks, all buckets are in shared memory of the host.
"""

from __future__ import annotations

import contextlib
import json
import select
import shutil
import socket
import struct
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from slipstream.config.schema import Config
from slipstream.errors import InvalidInput, UserError
from slipstream.model.device import dtype_of
from slipstream.sync.link import (
    ConnectionInfo,
    Layout,
    Parameters,
    ParameterShard,
    PublishHandle,
    Receiver,
    Sender,
    Shapes,
    copy_all,
    shapes_of,
)
from slipstream.sync.sharded_weights import gather_into
from slipstream.sync.shared import allocate_shared_file, free_shared_file
from slipstream.sync.single_copy import export_ipc_handles, import_ipc_handles

BUCKET = 2**29  # bytes; the largest parameter if that has more
TIMEOUT_S = 600.0  # for the other end to copy or gather one bucket
STEP = struct.Struct("<qq")  # version and number of a bucket
LENGTH = struct.Struct("<q")  # bytes of the description of both buckets


class HandoverSender(Sender):
    """A rank's end: gathers buckets with the other ranks, and hands them to the engine processes that have connected.

    An engine process that dies closes its connection, and is not waited for any more.
    """

    on_every_rank = one_trainer = receives_in_place = True

    def __init__(self, parameters: Parameters, config: Config, directory: Path, receivers: int) -> None:
        self._parameters = parameters
        self._device = next(iter(parameters.values())).device
        self._layout = Layout(shapes_of(parameters), dtype_of(config))
        self._buckets = self._layout.buckets(BUCKET)
        engines = config.generator.engines * config.generator.gpus_per_engine
        on_cpu = self._device.type == "cpu" or config.generator.device == "cpu"
        self._by_ipc = not on_cpu and engines <= config.trainer.ranks
        self._memory: Tensor | None = None  # of both buckets
        self._file: tuple[int, str] | None = None
        self._folder = tempfile.mkdtemp(prefix="slipstream-")  # that only this user can enter
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"{self._folder}/handover")
        self._listener.listen(1024)
        self._receivers: list[socket.socket] = []

    def connection_info(self) -> ConnectionInfo:
        dtype = str(self._layout.dtype).removeprefix("torch.")
        gpu = gpu_id(self._device) if self._by_ipc else ""
        where = {"link": "handover", "socket": f"{self._folder}/handover", "gpu": gpu}
        return {**where, "dtype": dtype, "shapes": self._layout.shapes}

    def stage(self, version: int) -> PublishHandle:
        return {"version": version}

    def send(self, handle: PublishHandle) -> None:
        version = handle["version"]
        self._accept()
        copying: list[list[socket.socket]] = [[], []]  # receivers that copy each bucket
        for number, (start, _, names) in enumerate(self._buckets):
            bucket = number % 2
            self._await(copying[bucket], version, number - 2)
            views = self._layout.views(self._allocate()[bucket], start, names)
            gather_into(list(views.values()), [self._parameters[name].detach() for name in names])
            if self._device.type == "cuda":
                torch.cuda.current_stream().synchronize()
            copying[bucket] = [r for r in [*self._receivers] if self._tell(r, STEP.pack(version, number))]
        for number in range(max(0, len(self._buckets) - 2), len(self._buckets)):
            self._await(copying[number % 2], version, number)

    def close(self) -> None:
        for receiver in (*self._receivers, self._listener):
            receiver.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._file:
            free_shared_file(*self._file)

    def _allocate(self) -> Tensor:
        """Both buckets, as bytes `[2, size]`."""
        if self._memory is None:
            size = max(end - start for start, end, _ in self._buckets)
            if self._by_ipc:
                self._memory = torch.empty(2, size, dtype=torch.uint8, device=self._device)
            else:
                self._file = allocate_shared_file(2 * size)
                self._memory = map_buckets(self._file[1], size)
        return self._memory

    def _describe(self, memory: Tensor) -> bytes:
        """The memory of both buckets, for one receiver."""
        if self._file:
            return json.dumps({"path": self._file[1], "size": len(memory[0])}).encode()
        return json.dumps({"handles": export_ipc_handles({"buckets": memory})}).encode()

    def _accept(self) -> None:
        """Accept the receivers that have connected since the last publish, and describe the buckets to them."""
        connected = select.poll()  # `select.select` refuses descriptors above 1,023, which a trainer on GPUs may have
        connected.register(self._listener, select.POLLIN)
        while connected.poll(0):
            receiver, _ = self._listener.accept()
            receiver.settimeout(TIMEOUT_S)
            self._receivers.append(receiver)
            description = self._describe(self._allocate())
            self._tell(receiver, LENGTH.pack(len(description)) + description)

    def _tell(self, receiver: socket.socket, message: bytes) -> bool:
        """Send a message, and drop the receiver if that fails. Returns whether it is alive."""
        try:
            receiver.sendall(message)
        except OSError:
            self._forget(receiver)
        return receiver in self._receivers

    def _await(self, receivers: Sequence[socket.socket], version: int, number: int) -> None:
        """Wait until these receivers have copied a bucket. Raises `UserError` after `TIMEOUT_S`."""
        for receiver in receivers:
            try:
                if _read(receiver, STEP.size) != STEP.pack(version, number):
                    self._forget(receiver)
            except TimeoutError:
                raise UserError(
                    f"an engine did not copy bucket {number} of version {version} within {TIMEOUT_S:g} s; see its log"
                ) from None
            except (OSError, EOFError):
                self._forget(receiver)

    def _forget(self, receiver: socket.socket) -> None:
        receiver.close()
        if receiver in self._receivers:
            self._receivers.remove(receiver)


class HandoverReceiver(Receiver):
    """An engine process's end: copies its parts of each bucket into the served weights while it samples nothing."""

    writes_served = True

    def __init__(self, connection_info: ConnectionInfo, shapes: Shapes, rank: int, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        part = _own_part(connection_info["parts"], rank, device)
        self._layout = Layout(connection_info["shapes"], getattr(torch, connection_info["dtype"]))
        self._memory: Tensor | None = None
        self.deferred_checksums: dict[str, Callable[[], int]] = {}
        self._trainer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._trainer.settimeout(TIMEOUT_S)
        self._trainer.connect(part["socket"])

    def attach(self, shards: Mapping[str, ParameterShard]) -> None:
        self._shards = shards

    def prepare(self, handle: PublishHandle) -> dict[str, Tensor]:
        """Copy all buckets into the served weights. Returns an empty dict, since the swap copies nothing."""
        try:
            for number, (start, _, names) in enumerate(self._layout.buckets(BUCKET)):
                self._copy(STEP.pack(handle["version"], number), number, start, names)
        except BaseException:
            self.close()  # else the trainer would wait for this engine
            raise
        return {}

    def _copy(self, step: bytes, number: int, start: int, names: Sequence[str]) -> None:
        """Wait for a bucket, and copy its parameters. Raises `InvalidInput` if another bucket arrives."""
        memory = self._map()
        if (found := _read(self._trainer, STEP.size)) != step:
            version, bucket = STEP.unpack(found)
            raise InvalidInput(
                f"the trainer sent bucket {bucket} of version {version} instead of {number} of {STEP.unpack(step)[0]}"
            )
        with torch.no_grad(), torch.cuda.stream(self._stream):
            views = self._layout.views(memory[number % 2], start, names)
            pairs = list[tuple[Tensor, Tensor]]()
            for name in names:
                shard = self._shards[name]
                values = views[name][shard.index]
                pairs += (encoded := shard.encode(values))
                if shard.counted:
                    self.deferred_checksums[name] = shard.deferred_checksum(values, [new for _, new in encoded])
            copy_all(pairs)
        if self._stream:
            self._stream.synchronize()
        self._trainer.sendall(step)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._trainer.shutdown(socket.SHUT_RDWR)  # ends a `prepare` that waits in another thread
        self._trainer.close()
        self._memory = None

    def _map(self) -> Tensor:
        """The trainer's buckets, as bytes `[2, size]`."""
        if self._memory is None:
            (size,) = LENGTH.unpack(_read(self._trainer, LENGTH.size))
            buffers = json.loads(_read(self._trainer, size))
            if handles := buffers.get("handles"):
                self._memory = import_ipc_handles(handles, self._device)["buckets"]
            else:
                self._memory = map_buckets(**buffers)
        return self._memory


class Handover:
    Sender, Receiver = HandoverSender, HandoverReceiver


def map_buckets(path: str, size: int) -> Tensor:
    """Both buckets of a shared file, as bytes `[2, size]`."""
    return torch.from_file(path, shared=True, size=2 * size, dtype=torch.uint8).view(2, size)


def gpu_id(device: torch.device) -> str:
    """The identity of a GPU in all processes of its host, which number GPUs differently."""
    return str(torch.cuda.get_device_properties(device).uuid)


def _own_part(parts: Sequence[ConnectionInfo], rank: int, device: torch.device) -> ConnectionInfo:
    """The connection information of the trainer rank that serves this engine process, which has this rank of the link.

    Raises `InvalidInput` if the trainer has no rank on its GPU.
    """
    if not parts[0]["gpu"]:
        return parts[(rank - 1) % len(parts)]
    own = gpu_id(device) if device.type == "cuda" else "the CPU"
    for part in parts:
        if part["gpu"] == own:
            return part
    raise InvalidInput(
        f"no trainer rank is on {own}, where this engine is; leave generator.device and trainer.device out where "
        'sync.placement = "colocated"'
    )


def _read(connection: socket.socket, size: int) -> bytes:
    """Exactly `size` bytes. Raises `EOFError` if the other end is closed."""
    found = b""
    while len(found) < size:
        if not (more := connection.recv(size - len(found))):
            raise EOFError("the other end of the handover is closed")
        found += more
    return found
