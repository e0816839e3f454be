"""The `lora` link: publishes only the adapter, each version under its own name, to vLLM, which serves several at once.

A version is a PEFT directory whose files are in memory. Engines on other hosts fetch it by `frames`. Sequences in
flight finish on the adapter that they started with, new sequences take the newest, and vLLM decodes while it reads a
version. This module has the trainer's end and the files; the engine's end is `generators.vllm.weights`.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.config.adapter import ADAPTER, ADAPTER_WEIGHTS
from slipstream.config.schema import Config
from slipstream.model.device import dtype_of
from slipstream.runtime.addresses import has_own_address, may_cross_hosts, own_address
from slipstream.sync.checksum import checksum
from slipstream.sync.frames import (
    PLAIN,
    SILENCE_LIMIT_S,
    FrameServer,
    Refused,
    Request,
    Stream,
    Superseded,
    fetch,
    unpack,
)
from slipstream.sync.link import ConnectionInfo, Parameters, PublishHandle, Sender, Shapes, shapes_of
from slipstream.sync.shared import SharedFiles, allocate_shared_file, free_shared_file

FRAME = 2**22  # bytes
DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}  # in safetensors, for each `model.dtype`


class AdapterMemory:
    """The files of one adapter, in memory that all its versions use.

    With `summed`, `sums` has the checksum of each parameter of the version, as decimal text.
    """

    def __init__(self, parameters: Parameters, shapes: Shapes, config: Config, summed: bool) -> None:
        self._summed, self.sums = summed, dict[str, str]()
        self._parameters, dtype = parameters, dtype_of(config)
        targets = {name.rpartition(".lora_")[0].rpartition(".")[2] for name in parameters}
        adapter_config = {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": config.model.path,
            "r": config.lora.rank, "lora_alpha": config.lora.alpha, "use_rslora": config.lora.use_rslora,
            "target_modules": sorted(targets), "bias": "none",
        }  # fmt: skip
        head, size = safetensors_header({split_name(name)[1]: shapes[name] for name in parameters}, dtype)
        self.config = json.dumps(adapter_config)
        self._files = {ADAPTER: _create_file(self.config.encode()), ADAPTER_WEIGHTS: _create_file(head, size)}
        self._mapped = SharedFiles(next(iter(parameters.values())).device)
        self.data = self._mapped.map(Path(self._files[ADAPTER_WEIGHTS][1]))
        self._values = self.data[len(head) :].view(dtype)

    @torch.no_grad()
    def write(self, folder: Path) -> None:
        """Write the adapter as PEFT saves it, with symlinks in `folder`: one cast on the parameters' device, one copy
        into the file's memory."""
        parameters = list(self._parameters.values())  # gathers each sharded parameter once
        device = parameters[0].device
        flat = self._values if device == self._values.device else torch.empty_like(self._values, device=device)
        flat_parts = torch.split(flat, [p.numel() for p in parameters])
        parts = [part.view(p.shape) for part, p in zip(flat_parts, parameters, strict=True)]
        torch._foreach_copy_(parts, parameters)
        if self._summed:
            self.sums = {name: str(checksum(part)) for name, part in zip(self._parameters, parts, strict=True)}
        if flat is not self._values:
            self._values.copy_(flat)
        folder.mkdir(parents=True)
        for name, (_, memory) in self._files.items():
            (folder / name).symlink_to(memory)

    def close(self) -> None:
        self._mapped.close()
        for handle, memory in self._files.values():
            free_shared_file(handle, memory)


class AdapterSender(Sender):
    """The trainer's end. The files on disk are symlinks to memory of this process, which the system frees at its end.

    All versions use the same memory: `stage` follows the `release` of the previous version. A version of several
    policies has a directory for each, and `policies` in its handle.
    """

    trainer_free_after_send = one_trainer = independent_receivers = True

    def __init__(self, parameters: Parameters, config: Config, directory: Path, receivers: int) -> None:
        self._directory = directory / "adapters"
        shutil.rmtree(self._directory, ignore_errors=True)
        self._shapes = shapes_of(parameters)
        self._policies = [policy.name for policy in config.policies]
        own: dict[str, Parameters] = {
            policy: {name: p for name, p in parameters.items() if split_name(name)[0] == policy}
            for policy in self._policies
        }
        fetched = has_own_address()
        self._adapters = {
            policy: AdapterMemory(each, self._shapes, config, summed=fetched)
            for policy, each in (own or {"": parameters}).items()
        }
        self._lock = threading.Lock()  # of the staged version and the streams of its policies
        self._staged, self._streams = -1, dict[str, Stream]()
        self._secret, self._server = secrets.token_bytes(32), None
        if fetched:
            self._server = FrameServer(own_address(), self._secret, self._find, 1e6 * config.sync.max_mb_per_s)

    @classmethod
    def late_receivers(cls, config: Config) -> bool:
        """Engines on one host read the memory of the newest version; others are sent a copy of it."""
        return may_cross_hosts(config)

    def connection_info(self) -> ConnectionInfo:
        return {"shapes": self._shapes}

    def stage(self, version: int) -> PublishHandle:
        """Write the adapter of each policy."""
        self.release({})
        with self._lock:
            self._staged, self._streams = -1, {}
        path = self._directory / f"policy-v{version}"
        for policy, memory in self._adapters.items():
            memory.write(path / policy)
        self._staged = version
        handle = {"version": version, "path": str(path.resolve()), "policies": self._policies}
        remote = {"server": self._server.address, "secret": self._secret.hex()} if self._server else {}
        return handle | remote

    def send(self, handle: PublishHandle) -> PublishHandle:
        """Return the bytes of the adapters, and their checksums for engines that fetch the version."""
        sent: PublishHandle = {"bytes": sum(len(memory.data) for memory in self._adapters.values())}
        if self._server:
            sent["sums"] = {name: value for memory in self._adapters.values() for name, value in memory.sums.items()}
        return sent

    def release(self, handle: PublishHandle) -> None:
        """Remove the directory: engines keep copies of the adapter."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def close(self) -> None:
        self.release({})
        if self._server:
            self._server.close()
        for memory in self._adapters.values():
            memory.close()

    def _find(self, request: Request) -> tuple[Request, Stream]:
        """Answer an engine on another host with the files of the staged version."""
        with self._lock:
            if request["version"] != self._staged:
                raise Refused(f"version {request['version']} of the adapter is not staged")
            policy: str = request["policy"]
            if policy not in self._streams:
                adapter, stream = self._adapters[policy], Stream()
                stream.begin({"config": adapter.config, "bytes": len(adapter.data)})
                for part in torch.split(adapter.data, FRAME):
                    stream.add(PLAIN + part.numpy().tobytes())
                stream.end()
                self._streams[policy] = stream
            return {}, self._streams[policy]


class Adapters:
    Sender, Receiver = AdapterSender, None  # vLLM loads adapters itself


def split_name(name: str) -> tuple[str, str]:
    """The policy of an adapter parameter ("" of a single one), and its name in PEFT's files, without the adapter's."""
    own = re.search(r"\.(?:default|policy-([\w-]+))\.", name)
    return (own[1] or "", name.replace(own[0], ".")) if own else ("", name)


def safetensors_header(shapes: dict[str, list[int]], dtype: torch.dtype) -> tuple[bytes, int]:
    """Header of a safetensors file for tensors of these shapes, and the number of bytes of the tensors after it.

    The header is the length of a JSON text in 8 bytes, and that text, padded to a multiple of 8 bytes
    (https://github.com/huggingface/safetensors#format).
    """
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + prod(shape) * dtype.itemsize
        described[name] = {"dtype": DTYPE_NAMES[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, end


def _create_file(header: bytes, payload_size: int = 0) -> tuple[int, str]:
    """Descriptor and path of a shared file that starts with `header` and has `payload_size` more bytes."""
    handle, path = allocate_shared_file(len(header) + payload_size)
    os.write(handle, header)
    return handle, path


@contextmanager
def adapter_files(handle: PublishHandle, policy: str = "") -> Iterator[Path]:
    """The PEFT directory of a policy's version on this host: the trainer's, or one with files in memory in the block.

    Raises `Superseded` for a version that the trainer has replaced, that stops to arrive, or that memory is too short
    for.
    """
    if "server" not in handle:
        yield Path(handle["path"], policy)
        return
    files: dict[str, tuple[int, str]] = {}
    try:
        _fetch_files(handle, policy, files)
        with tempfile.TemporaryDirectory(prefix="slipstream-adapter-") as folder:
            path = Path(folder, policy)
            path.mkdir(exist_ok=True)
            for name, (_, memory) in files.items():
                (path / name).symlink_to(memory)
            yield path
    finally:
        for descriptor, memory in files.values():
            free_shared_file(descriptor, memory)


def _fetch_files(handle: PublishHandle, policy: str, files: dict[str, tuple[int, str]]) -> None:
    """Fill `files` with descriptor and path of each file of a version. Raises `Superseded`."""
    stream, (host, port) = Stream(), handle["server"]
    request = {"version": handle["version"], "policy": policy}
    try:
        fetch((host, port), bytes.fromhex(handle["secret"]), request, stream, SILENCE_LIMIT_S)
        header = stream.wait_header()
        files[ADAPTER] = _create_file(header["config"].encode())
        files[ADAPTER_WEIGHTS] = _create_file(b"", header["bytes"])
        for frame in stream.frames():
            os.write(files[ADAPTER_WEIGHTS][0], unpack(frame))
    except (Refused, OSError, MemoryError) as error:  # a timeout is an `OSError`
        raise Superseded(f"version {handle['version']} did not arrive: {error or type(error).__name__}") from None


def read_adapter(version: Path, device: torch.device, files: SharedFiles | None = None) -> dict[str, Tensor]:
    """The tensors of a version by PEFT's names, on `device`: views of one copy of the file that `stage` wrote.

    `files` has what this process has mapped of earlier versions.
    """
    path = version / ADAPTER_WEIGHTS
    data = (files or SharedFiles(torch.device("cpu"))).map(path.readlink() if path.is_symlink() else path)
    start = 8 + int.from_bytes(data[:8].numpy().tobytes(), "little")
    described = json.loads(data[8:start].numpy().tobytes())
    described.pop("__metadata__")
    shapes = {name: one["shape"] for name, one in described.items()}
    kind = next(iter(described.values()))["dtype"]
    values = data[start:].view(next(dtype for dtype, name in DTYPE_NAMES.items() if name == kind))
    parts = torch.split(values.to(device, copy=True), [prod(shape) for shape in shapes.values()])
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
