"""One publish to many receivers by `delta`: ready time and bytes from the trainer, one receiver compared with many.

    python benchmarks/publish_fan_out.py [--receivers 16] [--rate 8mbit] [--elements 64] [--changed 0.015]
        [--publishes 5] [--json benchmarks/results/publish_fan_out.json]
    python benchmarks/publish_fan_out.py --shape 11M --vllm 2    # receivers and two vLLM engines that decode

Needs the rights to make network namespaces (root). Each trainer and each receiver is a process on a host of its own: a
network namespace on one bridge, with a link whose rate is limited both ways (`tc tbf`) after the first publish, which
brings all weights to one receiver after the other. A receiver has the tensors of an engine, but samples nothing, so
that 16 of them need little of the CPU and the network is the limit. `--vllm` adds engines that sample. One trainer
publishes to one receiver, another to all others, in turns. `ready` is the time from the start of `stage` until all
receivers have swapped, and `copies` is what the trainer sent of frames by the size of the version. Checksums of all
receivers are compared with the trainer's. The first publishes over the shaped links are not counted: the sender has to
learn that all networks are slower.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from publish_network import change_elements
from work import SHAPES, at_least_one, conditions, save_model

from slipstream.config.loading import load_config
from slipstream.generators.served_weights import ServedWeights, local_shards
from slipstream.model.inspection import trained_parameters
from slipstream.model.loading import load_causal_lm
from slipstream.rollout import Sampling
from slipstream.runtime.addresses import ADDRESS
from slipstream.sync.delta import DeltaSender

NET = "10.98.0."
LEARNING = 3  # publishes over the shaped links until the sender knows their rates
ROWS = 2**20 // 1024  # of a matrix of 1,024 columns: 1 M elements each


def parameters(millions: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(ROWS, 1024, generator=generator).bfloat16()
    return {f"w{i}": values.clone() for i in range(millions)}


def load_parameters(options: argparse.Namespace) -> dict[str, torch.Tensor]:
    if not options.shape:
        return parameters(options.elements)
    return trained_parameters(load_causal_lm(options.model, device=torch.device("cpu"), dtype=torch.bfloat16))


class TrainerEnd:
    def __init__(self, options: argparse.Namespace) -> None:
        self._parameters, self._changed = load_parameters(options), options.changed
        config = load_config(None, ["--model.path=m", "--environment.name=addition", "--model.dtype=bfloat16"])
        self._sender = DeltaSender(self._parameters, config, Path(), 1)
        self._seed = torch.Generator().manual_seed(1)

    def connect(self) -> Any:
        return self._sender.connection_info()

    def change(self) -> None:
        change_elements(self._parameters.values(), self._changed, self._seed)

    def stage(self, version: int) -> Any:
        self._before = self._sender._server.sent
        self._handle = self._sender.stage(version)
        return self._handle

    def send(self) -> Any:
        self._sizes = self._sender.send(self._handle)
        return self._sizes["sums"]

    def sent(self) -> tuple[int, int]:
        """Bytes of frames that were sent since `stage`, and of the version's changes."""
        assert self._sender._coder
        self._sender._coder.join()
        return self._sender._server.sent - self._before, self._sender._steps[self._handle["state"]].size


class ReceiverEnd:
    def __init__(self, options: argparse.Namespace, rank: int) -> None:
        self._shards = local_shards(load_parameters(options))
        self._rank = rank

    def connect(self, info: Any) -> None:
        self._weights = ServedWeights("delta", info, self._shards, self._rank, rebind=False)

    def publish(self, handle: Any) -> float:
        """Receive a version and swap. Returns the end on the system's clock."""
        self._weights.prepare(handle)
        while not self._weights.prepared():
            time.sleep(0.01)
        self._weights.apply()
        return time.monotonic()

    def trim(self) -> None:
        """Return freed memory to the system. glibc keeps it, and 16 receivers of 192 M elements would need 22 GB."""
        ctypes.CDLL(None).malloc_trim(0)

    def checksums(self) -> dict[str, str]:
        self._weights.start_checksums(list(self._shards))
        while (sums := self._weights.checksums()) is None:
            time.sleep(0.01)
        return {name: str(value % 2**64) for name, value in sums.items()}


class VllmEnd(ReceiverEnd):
    """A vLLM engine that decodes four sequences while it receives."""

    def __init__(self, options: argparse.Namespace, rank: int) -> None:
        from slipstream.generators.vllm.engine import VllmEngine

        self._names, self._rank = [*load_parameters(options)], rank
        self._sampling = Sampling(max_tokens=800, ignore_eos=True)
        self._engine = VllmEngine(load_config(None, [
            f"--model.path={options.model}", "--model.dtype=bfloat16", "--environment.name=addition",
            "--sync.link=delta", "--generator.engine=vllm", "--generator.max_model_len=1024",
            "--generator.max_num_seqs=4",
        ]))  # fmt: skip

    def connect(self, info: Any) -> None:
        self._weights = self._engine.open_weights("delta", info, self._rank)

    def publish(self, handle: Any) -> float:
        self._weights.prepare(handle)
        self._decode_until(self._weights.prepared)
        self._engine.swap(handle["version"], self._weights.apply)
        self._decode_until(lambda: self._engine.versions_known)
        return time.monotonic()

    def checksums(self) -> dict[str, str]:
        self._weights.start_checksums(self._names)
        while (sums := self._weights.checksums()) is None:
            self._engine.step()
        return {name: str(value % 2**64) for name, value in sums.items()}

    def _decode_until(self, done: Callable[[], bool]) -> None:
        while not done():
            for key in range(4 - self._engine.running):
                self._engine.submit((time.perf_counter(), key), [1, 2, 3], self._sampling)
            self._engine.step()


FORK = multiprocessing.get_context("fork")


class Remote:
    """One end in a process on a host. Processes are forked, so that they share the memory of what is imported."""

    def __init__(self, host: int, prefix: str, make: Callable[[], Any]) -> None:
        self._pipe, other = FORK.Pipe()
        self._process = FORK.Process(target=self._serve, args=(other, host, prefix, make), daemon=True)
        self._process.start()
        other.close()

    def _serve(self, pipe: Connection, host: int, prefix: str, make: Callable[[], Any]) -> None:
        with Path(f"/run/netns/{prefix}{host}").open() as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), "setns failed")
        os.environ[ADDRESS] = f"{NET}{host + 1}"
        torch.set_num_threads(1)
        end = make()
        while True:
            method, arguments = pipe.recv()
            pipe.send(getattr(end, method)(*arguments))

    def call(self, method: str, *arguments: Any) -> Any:
        self._pipe.send((method, arguments))
        try:
            return self._pipe.recv()
        except EOFError:
            sys.exit(f"a process ended in {method!r}")

    def end(self) -> None:
        self._process.kill()
        self._process.join()


@contextlib.contextmanager
def hosts(count: int) -> Iterator[str]:
    """Network namespaces on one bridge, named by the result and their number."""
    prefix = f"fan{os.getpid()}h"
    try:
        run(f"ip link add {prefix} type bridge")
        run(f"ip link set {prefix} up")
        for i in range(count):
            run(f"ip netns add {prefix}{i}")
            run(f"ip link add {prefix}{i} type veth peer name eth1 netns {prefix}{i}")
            run(f"ip link set {prefix}{i} master {prefix} up")
            run(f"ip -n {prefix}{i} addr add {NET}{i + 1}/24 dev eth1")
            run(f"ip -n {prefix}{i} link set eth1 up")
            run(f"ip -n {prefix}{i} link set lo up")
        yield prefix
    finally:
        for i in range(count):
            subprocess.run(["ip", "netns", "del", f"{prefix}{i}"], check=False)
        subprocess.run(["ip", "link", "del", prefix], check=False)


def shape(prefix: str, count: int, rate: str) -> None:
    """Limit what each host sends and receives."""
    for i in range(count):
        for where in (f"tc -n {prefix}{i} qdisc add dev eth1", f"tc qdisc add dev {prefix}{i}"):
            run(f"{where} root tbf rate {rate} burst 16kb latency 400ms")


def run(command: str) -> None:
    subprocess.run(command.split(), check=True)


def publish_all_weights(trainer: Remote, receivers: list[Remote]) -> None:
    """The first publish, to one receiver after the other: each needs memory for all weights twice."""
    info, staged = trainer.call("connect"), trainer.call("stage", 0)
    trainer.call("send")
    for receiver in receivers:
        receiver.call("connect", info)
        receiver.call("publish", staged)
        receiver.call("trim")


def publish(version: int, trainer: Remote, receivers: list[Remote]) -> dict[str, float]:
    """One publish of changes to all receivers at the same time."""
    trainer.call("change")
    began, ends = time.monotonic(), [0.0] * len(receivers)
    staged = trainer.call("stage", version)

    def receive(number: int) -> None:
        ends[number] = receivers[number].call("publish", staged)

    threads = [threading.Thread(target=receive, args=(i,)) for i in range(len(receivers))]
    for thread in threads:
        thread.start()
    sums = trainer.call("send")
    for thread in threads:
        thread.join()
    assert all(receiver.call("checksums") == sums for receiver in receivers)
    sent, size = trainer.call("sent")
    return {"ready_s": max(ends) - began, "copies": sent / max(size, 1), "mb": size / 1e6}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    kinds = {"one": [ReceiverEnd], "many": [ReceiverEnd] * options.receivers + [VllmEnd] * options.vllm}
    count = options.receivers + options.vllm + 3
    ends: dict[str, tuple[Remote, list[Remote]]] = {}
    with hosts(count) as prefix:
        numbers = iter(range(count))
        try:
            for side, receivers in kinds.items():
                trainer = Remote(next(numbers), prefix, partial(TrainerEnd, options))
                others = [Remote(next(numbers), prefix, partial(kind, options, rank))
                          for rank, kind in enumerate(receivers, 1)]  # fmt: skip
                ends[side] = trainer, others
            found: dict[str, list[dict[str, float]]] = {side: [] for side in kinds}
            for trainer, others in ends.values():
                publish_all_weights(trainer, others)
            shape(prefix, count, options.rate)
            for version in range(1, options.publishes + LEARNING + 1):
                for side, (trainer, others) in ends.items():
                    found[side].append(publish(version, trainer, others))
                    print(version, side, {k: round(v, 3) for k, v in found[side][-1].items()}, flush=True)
        finally:
            for trainer, others in ends.values():
                for end in (trainer, *others):
                    end.end()
    one, many = (found[side][LEARNING:] for side in kinds)
    medians = {side: {k: statistics.median(f[k] for f in counted) for k in counted[0]}
               for side, counted in (("one", one), ("many", many))}  # fmt: skip
    ratios = [b["ready_s"] / a["ready_s"] for a, b in zip(one, many, strict=True)]
    most = max(each["copies"] for each in many)
    return medians | {"ready_by_one": statistics.median(ratios), "ratios": ratios, "copies_max": most}


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--receivers", type=at_least_one, default=16)
    found.add_argument("--rate", default="8mbit")
    found.add_argument("--elements", type=at_least_one, help="millions, by default 64")
    found.add_argument("--shape", choices=SHAPES, help="the parameters of this model, instead of --elements")
    found.add_argument("--vllm", type=int, choices=range(17), default=0, help="vLLM engines, too; with --shape")
    found.add_argument("--changed", type=float, default=0.015)
    found.add_argument("--publishes", type=at_least_one, default=5)
    found.add_argument("--json", type=Path)
    return found


def main() -> None:
    options = parser().parse_args()
    if options.vllm and not options.shape:
        sys.exit(f"--vllm {options.vllm} needs a model; give --shape, such as 11M")
    if options.shape and options.elements:
        sys.exit(f"--elements {options.elements} and --shape {options.shape} are both sizes; give one")
    if not options.shape:
        options.elements = options.elements or 64
    with tempfile.TemporaryDirectory() as folder:
        options.model = str(Path(folder) / "model")
        if options.shape:
            save_model(options.shape, Path(options.model), torch.bfloat16)
        found = measure(options)
    print(json.dumps(found))
    if options.json:
        names = ("receivers", "vllm", "shape", "rate", "elements", "changed", "publishes")
        kept = {name: getattr(options, name) for name in names}
        options.json.write_text(json.dumps(conditions() | kept | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
