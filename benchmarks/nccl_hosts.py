"""Publishes by NCCL between two network namespaces, beside plain collectives of torch.distributed.

    sudo python benchmarks/nccl_hosts.py [--receivers plain vllm] [--shape 1.7B] [--rounds 8] [--json FILE]
    sudo python benchmarks/nccl_hosts.py --link nccl_direct --receivers vllm
    sudo python benchmarks/nccl_hosts.py --device cpu --backend gloo --shape 11M   # without GPUs

The trainer's end runs in one namespace on GPU 0, the receiver in another on GPU 1, and a pair of virtual devices joins
them. NCCL's peer-to-peer, shared memory and InfiniBand transports are off, so all bytes go through sockets, as between
two hosts. Each round has a plain broadcast, a plain all-reduce and a publish of the same bytes, in buffers of the same
size. A plain receiver has a staging buffer and served tensors; vLLM receives while it decodes. Rates are bytes of the
weights by the time of the slower end; in an all-reduce of two ranks each sends that many. Afterwards the receiver is
killed and another takes its place, while the trainer stays. Needs root, or user namespaces; `--one-namespace` needs
neither, and uses the loopback device.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import json
import os
import select
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, NoReturn

CLONE_NEWNET, CLONE_NEWUSER = 0x40000000, 0x10000000
NEWLINK, NEWADDR, REQUEST_ACK, CREATE = 16, 20, 5, 0x600
SOCKETS_ONLY = {
    "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket",
    "NCCL_NVLS_ENABLE": "0",
}  # fmt: skip
HOSTS = ("10.98.0.1", "10.98.0.2")
LIMIT_S = 300.0  # of any call
LIBC = ctypes.CDLL(None, use_errno=True)


# Network namespaces, by system calls: `ip` may be missing.


def enter(flags: int) -> None:
    """Move this thread into new namespaces. Raises `OSError`."""
    if LIBC.unshare(flags):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def attribute(kind: int, data: bytes) -> bytes:
    return struct.pack("HH", 4 + len(data), kind) + data + bytes(-len(data) % 4)


def netlink(kind: int, flags: int, body: bytes) -> None:
    """One request to the kernel's routing socket. Raises `OSError`."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as kernel:
        kernel.send(struct.pack("IHHII", 16 + len(body), kind, flags | REQUEST_ACK, 1, 0) + body)
        error: int = -struct.unpack("i", kernel.recv(65536)[16:20])[0]
    if error:
        raise OSError(error, os.strerror(error))


def set_up(device: str, address: str = "") -> None:
    index = socket.if_nametoindex(device)
    if address:
        packed = socket.inet_aton(address)
        netlink(NEWADDR, CREATE, struct.pack("BBBBI", 2, 24, 0, 0, index) + attribute(2, packed) + attribute(1, packed))
    netlink(NEWLINK, 0, struct.pack("BxHiII", 0, 0, index, 1, 1))


def change(namespace: int) -> None:
    """Move this thread into an open network namespace. Raises `OSError`."""
    if LIBC.setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@contextlib.contextmanager
def second_namespace() -> Iterator[int]:
    """Another network namespace, joined with this one by a pair of virtual devices of the addresses `HOSTS`."""
    holder = subprocess.Popen(["sleep", "infinity"], preexec_fn=lambda: enter(CLONE_NEWNET))  # noqa: PLW1509
    own, other = (os.open(path, os.O_RDONLY) for path in ("/proc/self/ns/net", f"/proc/{holder.pid}/ns/net"))
    try:
        peer = bytes(16) + attribute(3, b"veth1\0") + attribute(19, struct.pack("I", holder.pid))
        info = attribute(1, b"veth") + attribute(2, attribute(1, peer))
        netlink(NEWLINK, CREATE, bytes(16) + attribute(3, b"veth0\0") + attribute(18, info))
        set_up("veth0", HOSTS[0])
        change(other)
        try:
            set_up("lo")
            set_up("veth1", HOSTS[1])
        finally:
            change(own)
        yield other
    finally:
        holder.kill()
        holder.wait()


def leave_host() -> None:
    """Move this process into a namespace of its own, before it has threads. Exits with a line if that is forbidden."""
    user, group = os.geteuid(), os.getegid()
    try:
        try:
            enter(CLONE_NEWNET)
        except PermissionError:
            enter(CLONE_NEWUSER | CLONE_NEWNET)
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"0 {user} 1")
            Path("/proc/self/gid_map").write_text(f"0 {group} 1")
        set_up("lo")
    except OSError as error:
        sys.exit(f"no network namespaces here ({error}): run as root with CAP_SYS_ADMIN, or give --one-namespace")


# The two ends, each a process that answers calls.


class End:
    """What both ends have: a device, and a group of torch.distributed for the plain collectives."""

    def __init__(self, options: argparse.Namespace, rank: int) -> None:
        import torch

        self.options, self.rank, self.torch = options, rank, torch
        self.device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(1)

    def join_plain(self, address: str) -> None:
        """Form a group of torch.distributed, beside the default group, which vLLM may have in this process."""
        from torch.distributed import TCPStore

        from slipstream.sync.nccl import join

        store = TCPStore(address, 29555, 2, self.rank == 0)
        self._group = join(store, self.rank, 2, self.device)
        self._plain: Any = None

    def plain(self, kind: str, size: int, bucket: int) -> float:
        """Seconds of a broadcast or all-reduce of `size` bytes in buffers of `bucket` bytes."""
        if self._plain is None:
            count = min(bucket, size) // 2
            self._plain = self.torch.zeros(count, dtype=self.torch.bfloat16, device=self.device)
        self._group.allreduce([self._plain[:1]]).wait()  # both ends begin together
        self.finish()
        began = time.perf_counter()
        for at in range(0, size, bucket):
            part = self._plain[: min(bucket, size - at) // 2]
            work = self._group.broadcast(part, 0) if kind == "broadcast" else self._group.allreduce([part])
            work.wait()
        self.finish()
        return time.perf_counter() - began

    def finish(self) -> None:
        if self.device.type == "cuda":
            self.torch.cuda.synchronize()

    def configuration(self, model: str) -> Any:
        from slipstream.config.loading import load_config

        vllm = ["--generator.engine=vllm", "--generator.max_model_len=2048", "--generator.max_num_seqs=64"]
        vllm += ["--generator.gpu_memory_utilization=0.5"] if self.device.type == "cuda" else []
        return load_config(None, [
            f"--model.path={model}", "--environment.name=addition", "--model.dtype=bfloat16",
            f"--sync.link={self.options.link}", *(vllm if self.options.receiver == "vllm" else []),
        ])  # fmt: skip


class TrainerEnd(End):
    """Random weights of the shape, and the sender of the link."""

    def __init__(self, options: argparse.Namespace) -> None:
        from work import build_model

        super().__init__(options, 0)
        torch = self.torch
        with torch.device("meta"):
            shapes = {name: p.shape for name, p in build_model(options.shape).named_parameters()}
        seed = torch.Generator(self.device).manual_seed(0)
        self._parameters = {
            name: torch.nn.Parameter(
                torch.randn(shape, generator=seed, device=self.device, dtype=torch.bfloat16).mul_(0.02)
            )
            for name, shape in shapes.items()
        }
        self._sender: Any = None

    def open(self, model: str) -> Any:
        from slipstream.sync.link import find_link
        from slipstream.sync.nccl import BUCKET

        if self._sender:
            self._sender.close()
        sender, _ = find_link(self.options.link)
        self._sender = sender(self._parameters, self.configuration(model), Path(model), 1)
        size = sum(p.numel() * p.element_size() for p in self._parameters.values())
        return {"info": self._sender.connection_info(), "bytes": size, "bucket": BUCKET}

    def stage(self, version: int) -> Any:
        with self.torch.no_grad():
            for parameter in self._parameters.values():
                parameter.add_(1e-3 * (version % 3 - 1))
        self.finish()
        self._handle = self._sender.stage(version)
        return self._handle

    def send(self) -> float:
        """Seconds of the transfer."""
        began = time.perf_counter()
        self._sender.send(self._handle)
        return time.perf_counter() - began

    def checksums(self) -> dict[str, str]:
        from slipstream.sync.checksum import checksum

        return {name: str(checksum(p.detach()) % 2**64) for name, p in self._parameters.items()}


class ReceiverEnd(End):
    """Served weights: plain tensors, or those of a vLLM engine that decodes 32 sequences."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options, 1)
        self._engine: Any = None

    def connect(self, info: Any, model: str) -> None:
        from slipstream.generators.served_weights import ServedWeights, local_shards

        if self.options.receiver == "vllm":
            return self._start_vllm(info, model)
        tensors = {
            name: self.torch.zeros(shape, dtype=self.torch.bfloat16, device=self.device)
            for name, shape in info["shapes"].items()
        }
        self._names = list(tensors)
        self._weights: Any = ServedWeights("nccl", info, local_shards(tensors), 1, rebind=False)
        return None

    def _start_vllm(self, info: Any, model: str) -> None:
        from slipstream.generators.vllm.engine import VllmEngine
        from slipstream.rollout import Sampling

        self._engine = VllmEngine(self.configuration(model))
        self._names = list(info["shapes"])
        self._weights = self._engine.open_weights(self.options.link, info, 1)
        self._lock = threading.Lock()
        self._sampling = Sampling(max_tokens=1500, ignore_eos=True)

    def decode_until(self, done: Any) -> None:
        """Step the engine, if there is one, until `done()`."""
        while not done():
            if self._engine is None:
                time.sleep(0.0005)
                continue
            for key in range(32 - self._engine.running):
                self._engine.submit((time.perf_counter(), key), [1, 2, 3], self._sampling)
            self._engine.step()

    def publish(self, handle: Any) -> dict[str, float]:
        """Seconds of the transfer, and of the pause by the receiver's own measure."""
        began = time.perf_counter()
        self._weights.prepare(handle)
        self.decode_until(self._weights.prepared)
        received = time.perf_counter() - began
        if self._engine is None:
            self._weights.apply()
            self.decode_until(self._weights.applied)
        else:
            self._engine.swap(handle["version"], self._weights.apply)
            self.decode_until(lambda: self._engine.versions_known)
        if self.options.link == "nccl_direct":  # transfers in the swap
            received = time.perf_counter() - began
        return {"received_s": received, "pause_ms": 1000 * self._weights.pause_s()}

    def checksums(self) -> dict[str, str]:
        self._weights.start_checksums(self._names)
        found: list[Any] = []
        self.decode_until(lambda: found.append(self._weights.checksums()) or found[-1] is not None)
        return {name: str(value % 2**64) for name, value in found[-1].items()}


def serve(end: Any) -> None:
    """Answer calls that arrive as lines of JSON. An error ends the process, whatever its threads do."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    print(json.dumps(True), file=answers)
    for line in sys.stdin:
        method, arguments = json.loads(line)
        try:
            print(json.dumps(getattr(end, method)(*arguments)), file=answers)
        except Exception:
            traceback.print_exc()
            os._exit(1)
    os._exit(0)


class Remote:
    """The process of one end, in this network namespace or another."""

    started: ClassVar[list[Remote]] = []

    def __init__(self, role: str, receiver: str, environment: dict[str, str], namespace: int | None, log: Path) -> None:
        self.role, self._log = role, log
        Remote.started.append(self)
        command = [sys.executable, __file__, *sys.argv[1:], "--role", role, "--receiver", receiver]
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True,
                env=os.environ | SOCKETS_ONLY | environment,
                preexec_fn=None if namespace is None else lambda: change(namespace),  # noqa: PLW1509 (this process has one thread)
            )  # fmt: skip

    def start(self, method: str, *arguments: Any) -> None:
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):  # `wait` reports it
            self.process.stdin.write(json.dumps((method, arguments)).encode() + b"\n")
            self.process.stdin.flush()

    def wait(self) -> Any:
        assert self.process.stdout
        ready = select.select([self.process.stdout], [], [], LIMIT_S)[0]
        if not ready or not (line := self.process.stdout.readline()):
            self._fail("ended" if ready else "did not answer")
        return json.loads(line)

    def _fail(self, what: str) -> NoReturn:
        """Exit with the end of all logs, and the stacks of an end that hangs."""
        for remote in Remote.started if what == "did not answer" else ():
            if remote.process.poll() is None:
                remote.process.send_signal(signal.SIGUSR1)
        time.sleep(2)
        for log in sorted(self._log.parent.glob("*.log")):
            print(f"== {log.name}", *log.read_text(errors="replace").splitlines()[-60:], sep="\n", file=sys.stderr)
        sys.exit(f"the {self.role} {what}; the logs are above")

    def call(self, method: str, *arguments: Any) -> Any:
        self.start(method, *arguments)
        return self.wait()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def both(trainer: Remote, receiver: Remote, method: str, *arguments: Any) -> list[Any]:
    for end in (trainer, receiver):
        end.start(method, *arguments)
    return [end.wait() for end in (trainer, receiver)]


def publish(trainer: Remote, receiver: Remote, version: int) -> dict[str, float]:
    handle = trainer.call("stage", version)
    receiver.start("publish", handle)
    trainer.start("send")
    sent = trainer.wait()
    return {"sent_s": sent, **receiver.wait()}


class Measurement:
    """A trainer, and receivers one after the other in `namespace` (None: where the trainer is)."""

    def __init__(
        self, options: argparse.Namespace, receiver: str, namespace: int | None, folder: Path, model: str
    ) -> None:
        self._options, self._kind, self._namespace = options, receiver, namespace
        self._folder, self._model = folder, model
        self._started: list[Remote] = []

    def _start(self, role: str) -> Remote:
        """Start an end on its GPU and network, and wait until it is ready."""
        number, apart = int(role == "receiver"), self._namespace is not None
        gpus = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0,1").split(",")
        device = f"veth{number}" if apart else "lo"
        environment = {
            "CUDA_VISIBLE_DEVICES": gpus[number] if self._options.device == "cuda" else "",
            "NCCL_SOCKET_IFNAME": f"={device}", "GLOO_SOCKET_IFNAME": device,
            "SLIPSTREAM_ADDRESS": HOSTS[number] if apart else "127.0.0.1",
        }  # fmt: skip
        log = self._folder / f"{role}_{self._kind}.log"
        self._started.append(
            Remote(role, self._kind, environment, self._namespace if role == "receiver" else None, log)
        )
        self._started[-1].wait()
        return self._started[-1]

    def _connect(self, trainer: Remote) -> tuple[Remote, dict[str, Any]]:
        """A new receiver, connected. Returns it, and what the trainer opened."""
        receiver = self._start("receiver")
        opened = trainer.call("open", self._model)
        receiver.call("connect", opened["info"], self._model)
        return receiver, opened

    def run(self) -> dict[str, Any]:
        trainer = self._start("trainer")
        receiver, opened = self._connect(trainer)
        first = publish(trainer, receiver, 0)
        both(trainer, receiver, "join_plain", opened["info"]["gate"]["host"])
        size, rows = opened["bytes"], []
        for version in range(1, self._options.rounds + 2):
            row = {
                f"{kind}_s": max(both(trainer, receiver, "plain", kind, size, opened["bucket"]))
                for kind in ("broadcast", "all_reduce")
            }
            rows.append(row | publish(trainer, receiver, version))
        equal = receiver.call("checksums") == trainer.call("checksums")
        median = {key: statistics.median(row[key] for row in rows[1:]) for key in rows[0]}
        rates = {f"{key[:-2]}_gb_per_s": size / value / 1e9 for key, value in median.items() if key.endswith("_s")}
        return {
            "receiver": self._kind, "bytes": size, **median, **rates, "first_s": first["sent_s"],
            "of_all_reduce": median["all_reduce_s"] / median["sent_s"],
            "of_broadcast": median["broadcast_s"] / median["sent_s"], "checksums_equal": equal,
            **self._replace(trainer, receiver),
        }  # fmt: skip

    def _replace(self, trainer: Remote, receiver: Remote) -> dict[str, Any]:
        """Kill the receiver, and bring another to the next version. The trainer stays."""
        receiver.kill()
        receiver, _ = self._connect(trainer)
        began = time.perf_counter()
        publish(trainer, receiver, 100)
        seconds = time.perf_counter() - began
        equal = receiver.call("checksums") == trainer.call("checksums")
        return {"replaced_s": seconds, "replaced_checksums_equal": equal}

    def close(self) -> None:
        for end in self._started:
            end.kill()


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--receivers", nargs="+", choices=("plain", "vllm"), default=["plain"])
    found.add_argument("--link", choices=("nccl", "nccl_direct"), default="nccl", help="nccl_direct needs vLLM")
    found.add_argument("--shape", default="1.7B")
    found.add_argument("--rounds", type=int, default=8)
    found.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    found.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    found.add_argument("--one-namespace", action="store_true", help="use the loopback device instead of namespaces")
    found.add_argument("--json", type=Path)
    found.add_argument("--role", choices=("trainer", "receiver"), help=argparse.SUPPRESS)
    found.add_argument("--receiver", help=argparse.SUPPRESS)
    return found


def main() -> None:
    options = parser().parse_args()
    if options.role:
        sys.argv = sys.argv[:1]
        return serve(TrainerEnd(options) if options.role == "trainer" else ReceiverEnd(options))
    if options.link == "nccl_direct" and options.receivers != ["vllm"]:
        sys.exit("--link nccl_direct is vLLM's own: give --receivers vllm")
    if options.link == "nccl_direct" and options.device == "cpu":
        sys.exit("--link nccl_direct needs GPUs")
    if not options.one_namespace:
        leave_host()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        try:
            namespace = None if options.one_namespace else stack.enter_context(second_namespace())
        except OSError as error:
            sys.exit(f"no virtual network devices here ({error}); give --one-namespace")
        found = []
        for receiver in options.receivers:
            measurement = Measurement(options, receiver, namespace, folder, model_of(options, receiver, folder))
            stack.callback(measurement.close)
            found.append(measurement.run())
            print({k: round(v, 4) if isinstance(v, float) else v for k, v in found[-1].items()}, flush=True)
            measurement.close()
    write_record(options, found)
    return None


def model_of(options: argparse.Namespace, receiver: str, folder: Path) -> str:
    """A model directory of the shape, with files for vLLM alone."""
    model = folder / "model"
    if receiver == "vllm":
        import torch
        from work import save_model

        save_model(options.shape, model, torch.bfloat16)
    return str(model)


def write_record(options: argparse.Namespace, found: list[dict[str, Any]]) -> None:
    if options.json:
        from work import conditions

        kept = {name: getattr(options, name) for name in ("link", "shape", "rounds", "backend", "one_namespace")}
        options.json.write_text(json.dumps(conditions() | kept | {"results": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
