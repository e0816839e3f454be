"""Publishes over a shaped network: from a trainer in one network namespace to engines in others.

    sudo python benchmarks/publish_network.py MODEL [--links delta nccl checkpoint] [--rate 1gbit] [--engines 1]
        [--changed 0.01] [--publishes 6] [--json FILE]
    sudo python benchmarks/publish_network.py MODEL --versions RUN/weights --every 1    # versions of a run

Two namespaces are joined by a pair of virtual devices whose rate is limited both ways (`tc tbf`). The trainer's end of
the link runs in the first, engines that decode in the second. Between publishes the given share of the elements moves
to the next bfloat16 value. With `--versions` the weights become those of the next, or every `--every`-th, version that
a run kept (`sync.link = "checkpoint"`, `sync.keep_versions`; `benchmarks/publish_network.toml` makes one). `held` is
the time of `stage` and `send`, `ready` the time from the start of `stage` until all engines serve the version, `pause`
the time of the swap, `step` that of a decode step. "delta, all weights" is the `delta` link to engines without a
version. `checkpoint` needs files that both hosts can read: here the trainer's host sends each file over the link in
one plain TCP stream, and the engine reads its copy, as from a network file system. `sent` is what left the trainer's
namespace. `trainer` and `engine` are the bytes by which the memory of these processes rose in a publish, at most, per
changed element.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from work import at_least_one, conditions

from slipstream.config.loading import load_config
from slipstream.config.schema import Config
from slipstream.generators.served_weights import ServedWeights, local_shards
from slipstream.generators.torch.engine import Engine
from slipstream.model.inspection import trained_parameters
from slipstream.model.loading import load_model
from slipstream.model.tokenizer import load_tokenizer
from slipstream.rollout import Sampling
from slipstream.runtime.addresses import ADDRESS
from slipstream.sync.blocks import words
from slipstream.sync.delta import DeltaReceiver
from slipstream.sync.link import find_link

HOSTS = ("10.97.0.1", "10.97.0.2")
ALL_WEIGHTS = "delta, all weights"
CHANGES = ("changed", "versions", "every")


def configuration(model: str, link: str) -> Config:
    link = "delta" if link == ALL_WEIGHTS else link
    return load_config(
        None, [f"--model.path={model}", "--environment.name=addition", "--model.dtype=bfloat16", f"--sync.link={link}"]
    )


class Memory:
    """The peak of the memory of this process since `reset`."""

    def reset(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self._before = self._bytes("VmRSS")

    def rise(self) -> int:
        return self._bytes("VmHWM") - self._before

    def _bytes(self, name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


@torch.no_grad()
def change_elements(parameters: Iterable[torch.Tensor], share: float, generator: torch.Generator) -> None:
    """Move a share of the elements to the next bfloat16 value, as a step at a small learning rate does."""
    for parameter in parameters:
        bits = words(parameter)
        count = int(share * len(bits))
        places = torch.randint(len(bits), (count,), generator=generator)
        bits[places] += torch.randint(0, 2, (count,), generator=generator).to(bits.dtype) * 2 - 1


def version_files(options: argparse.Namespace) -> list[Path]:
    """The files of every `--every`-th version in `--versions`, in order."""
    numbered = {int(p.stem.removeprefix("version_")): p for p in options.versions.glob("version_*.safetensors")}
    return [numbered[number] for number in sorted(numbered)][:: options.every]


class Versions:
    """The weights that a run published; each `step` copies those of the next file to `parameters`."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], files: Iterable[Path]) -> None:
        self._parameters, self._files = parameters, iter(files)

    @torch.no_grad()
    def step(self) -> None:
        for name, weight in load_file(next(self._files)).items():
            self._parameters[name].copy_(weight)


class TrainerEnd(Memory):
    """Weights that change as in training, and the sender of a link."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.set_num_threads(1)
        model, link, scratch, engines = options.model, options.link, options.trainer, options.engines
        config = configuration(model, link)
        loaded = load_model(config.model, config.lora, device=torch.device("cpu"), dtype=torch.bfloat16)
        self._parameters, self._changed = trained_parameters(loaded), options.changed
        self._versions = Versions(self._parameters, version_files(options)) if options.versions else None
        self._sender = find_link(config.sync.link)[0](self._parameters, config, Path(scratch), engines)
        self._seed = torch.Generator().manual_seed(0)
        self._files = socket.create_server((os.environ[ADDRESS], 0)) if link == "checkpoint" else None
        if self._files:
            threading.Thread(target=self._send_files, args=(self._files,), daemon=True).start()

    def _send_files(self, server: socket.socket) -> None:
        """Send the staged file to each client."""
        while True:
            client = server.accept()[0]
            threading.Thread(target=self._send_file, args=(client,), daemon=True).start()

    def _send_file(self, client: socket.socket) -> None:
        with client, Path(self._handle["path"]).open("rb") as file:
            client.sendfile(file)

    def connect(self) -> Any:
        return self._sender.connection_info()

    def change(self) -> None:
        if self._versions:
            self._versions.step()
        else:
            change_elements(self._parameters.values(), self._changed, self._seed)

    def stage(self, version: int) -> Any:
        self._sender.before_update()
        self._handle = self._sender.stage(version)
        return self._handle | {"files": self._files.getsockname()} if self._files else self._handle

    def send(self) -> tuple[float, Any]:
        """Returns the end on the system's clock, and the sizes if the link counts them."""
        sizes = self._sender.send(self._handle)
        return time.monotonic(), sizes

    def release(self) -> None:
        self._sender.release(self._handle)


class EngineEnd(Memory):
    """An engine that decodes eight sequences all the time, and its end of a link."""

    def __init__(self, model: str, link: str, scratch: str) -> None:
        torch.set_num_threads(1)
        self._config, self._link, self._copies = configuration(model, link), link, Path(scratch)
        loaded = load_model(self._config.model, self._config.lora, device=torch.device("cpu"), dtype=torch.bfloat16)
        self._engine = Engine(loaded, slots=8, context=4096, tokenizer=load_tokenizer(model))
        self._shards = local_shards(trained_parameters(loaded))
        self._steps: list[float] = []
        self._lock = threading.Lock()  # held by each step
        threading.Thread(target=self._decode, daemon=True).start()

    def _decode(self) -> None:
        for i in range(8):
            self._engine.submit(i, [2, 3, 4 + i], Sampling(max_tokens=4000, ignore_eos=True, seed=i))
        while self._engine.busy:
            began = time.perf_counter()
            with self._lock:
                self._engine.step()
            self._steps.append(time.perf_counter() - began)
            time.sleep(0)

    def connect(self, info: Any, rank: int) -> None:
        self._weights = ServedWeights(self._config.sync.link, info, self._shards, rank, rebind=True)

    def publish(self, handle: Any) -> dict[str, float]:
        """Receive and swap in a version. Returns the time of the swap, and of the end on the system's clock."""
        if self._link == ALL_WEIGHTS:
            receiver: Any = self._weights._receiver
            assert isinstance(receiver, DeltaReceiver)
            receiver._held = None
        if "files" in handle:
            handle = self._copy_file(handle)
        self._weights.prepare(handle)
        while not self._weights.prepared():
            time.sleep(0.001)
        with self._lock:
            began = time.perf_counter()
            self._weights.apply()
            pause = time.perf_counter() - began
        return {
            "ended": time.monotonic(),
            "pause": pause,
            "step": statistics.median(self._steps),
        }

    def _copy_file(self, handle: Any) -> Any:
        """Copy the file of a version to this host, in place of the one before. Returns a handle that names the copy."""
        shutil.rmtree(self._copies, ignore_errors=True)
        self._copies.mkdir()
        path = self._copies / Path(handle["path"]).name
        with socket.create_connection(tuple(handle["files"])) as source, path.open("wb") as copy:
            shutil.copyfileobj(source.makefile("rb"), copy, 2**20)
        return handle | {"path": str(path)}

    def checksums(self) -> dict[str, str]:
        self._weights.start_checksums(list(self._shards))
        while (sums := self._weights.checksums()) is None:
            time.sleep(0.01)
        return {name: str(value % 2**64) for name, value in sums.items()}


def serve(end: Any) -> None:
    """Answer calls that arrive as lines of JSON."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    print(json.dumps(True), file=answers)
    for line in sys.stdin:
        method, arguments = json.loads(line)
        print(json.dumps(getattr(end, method)(*arguments)), file=answers)


class Remote:
    """A process in a network namespace that serves one end."""

    def __init__(self, namespace: str, host: str, *arguments: str) -> None:
        command = ["ip", "netns", "exec", namespace, sys.executable, __file__, *arguments]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env=os.environ | {ADDRESS: host, "GLOO_SOCKET_IFNAME": f"veth{HOSTS.index(host)}"},
        )
        self._lock = threading.Lock()

    def wait(self) -> Any:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            sys.exit("a process ended")
        return json.loads(line)

    def call(self, method: str, *arguments: Any) -> Any:
        assert self._process.stdin
        print(json.dumps((method, arguments)), file=self._process.stdin)
        return self.wait()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def namespaces(rate: str) -> Iterator[tuple[str, str]]:
    """Two network namespaces joined by a link of this rate."""
    names = tuple(f"slip{os.getpid()}{side}" for side in "ab")
    run = lambda text: subprocess.run(["ip", *text.split()], check=True)  # noqa: E731
    try:
        for name in names:
            run(f"netns add {name}")
        run(f"link add veth0 netns {names[0]} type veth peer name veth1 netns {names[1]}")
        for name, device, host in zip(names, ("veth0", "veth1"), HOSTS, strict=True):
            run(f"-n {name} addr add {host}/24 dev {device}")
            run(f"-n {name} link set {device} up")
            run(f"-n {name} link set lo up")
            shape = f"tc -n {name} qdisc add dev {device} root tbf rate {rate} burst 1mb latency 100ms"
            subprocess.run(shape.split(), check=True)
        yield names  # type: ignore[misc]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


def sent(namespace: str) -> int:
    """Bytes that left the namespace."""
    read = ["ip", "netns", "exec", namespace, "cat", "/sys/class/net/veth0/statistics/tx_bytes"]
    return int(subprocess.run(read, check=True, capture_output=True, text=True).stdout)


def measure(options: argparse.Namespace, link: str, names: tuple[str, str], scratch: str) -> dict[str, Any]:
    common = (options.model, "--link", link)
    given = [f"--{name}={value}" for name in CHANGES if (value := getattr(options, name)) is not None]
    trainer = Remote(names[0], HOSTS[0], *common, "--trainer", scratch, "--engines", str(options.engines), *given)
    engines = [Remote(names[1], HOSTS[1], *common, "--engine", f"{scratch}/copies{i}") for i in range(options.engines)]
    try:
        for end in (trainer, *engines):
            end.wait()
        info = trainer.call("connect")
        for rank, engine in enumerate(engines, 1):
            engine.call("connect", info, rank)
        elements = sum(math.prod(shape) for shape in info["shapes"].values())
        found = [publish(version, trainer, engines, names[0], elements) for version in range(options.publishes + 1)][1:]
        sums = [engine.call("checksums") for engine in engines]
        assert all(s == sums[0] for s in sums)
    finally:
        for end in (trainer, *engines):
            end.end()
    return {"link": link} | {key: statistics.median(f[key] for f in found) for key in found[0]}


def publish(version: int, trainer: Remote, engines: list[Remote], namespace: str, elements: int) -> dict[str, float]:
    """One publish to all engines at the same time."""
    trainer.call("change")
    for end in (trainer, *engines):
        end.call("reset")
    before, began = sent(namespace), time.monotonic()
    staged = trainer.call("stage", version)
    replies = [dict[str, float]() for _ in engines]

    def receive(number: int) -> None:
        replies[number] = engines[number].call("publish", staged)

    threads = [threading.Thread(target=receive, args=(i,)) for i in range(len(engines))]
    for thread in threads:
        thread.start()
    held, sizes = trainer.call("send")
    for thread in threads:
        thread.join()
    trainer.call("release")
    ready = max(reply["ended"] for reply in replies) - began
    share = (sizes or {"changed": 1.0})["changed"]
    changed = share * elements or 1
    return {
        "held_s": held - began, "ready_s": ready, "pause_ms": 1000 * max(r["pause"] for r in replies),
        "step_ms": 1000 * max(r["step"] for r in replies), "sent_mb": (sent(namespace) - before) / 1e6,
        "changed": share,
        "trainer_bytes": trainer.call("rise") / changed, "engine_bytes": max(e.call("rise") for e in engines) / changed,
    }  # fmt: skip


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("model")
    found.add_argument("--links", nargs="+", default=["delta", ALL_WEIGHTS, "nccl", "checkpoint"])
    found.add_argument("--rate", default="1gbit")
    found.add_argument("--engines", type=at_least_one, default=1)
    found.add_argument("--changed", type=float, default=0.01)
    found.add_argument("--versions", type=Path)
    found.add_argument("--every", type=at_least_one, default=1)
    found.add_argument("--publishes", type=at_least_one, default=6)
    found.add_argument("--json", type=Path)
    found.add_argument("--link", help=argparse.SUPPRESS)
    found.add_argument("--trainer", help=argparse.SUPPRESS)
    found.add_argument("--engine", help=argparse.SUPPRESS)
    return found


def main() -> None:
    options = parser().parse_args()
    if options.trainer:
        return serve(TrainerEnd(options))
    if options.engine:
        return serve(EngineEnd(options.model, options.link, options.engine))
    if options.versions and (count := len(version_files(options))) <= options.publishes:
        needed = f"--publishes {options.publishes} needs {options.publishes + 1}"
        sys.exit(f"--versions {options.versions} has {count} versions, and {needed}")
    found = []
    with namespaces(options.rate) as names:
        for link in options.links:
            with tempfile.TemporaryDirectory() as scratch:
                found.append(measure(options, link, names, scratch))
            print({k: round(v, 3) if isinstance(v, float) else v for k, v in found[-1].items()}, flush=True)
    if options.json:
        kept = {name: getattr(options, name) for name in ("rate", "engines", "publishes")}
        kept |= {"every": options.every} if options.versions else {"changed": options.changed}
        options.json.write_text(
            json.dumps(conditions() | kept | {"model": Path(options.model).name, "links": found}, indent=1) + "\n"
        )
    return None


if __name__ == "__main__":
    main()
