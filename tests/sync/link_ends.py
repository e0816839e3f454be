"""The two ends of a link in processes: python -m tests.sync.link_ends trainer|engine LINK DIRECTORY FLAG ..."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from slipstream.config.adapter import ADAPTER
from slipstream.config.loading import load_config
from slipstream.generators.served_weights import ServedWeights
from slipstream.sync import adapters, delta
from slipstream.sync.adapters import adapter_files, read_adapter
from slipstream.sync.link import ParameterShard, find_link
from tests.hosts import serve

ROWS = int(os.environ.get("ROWS", "300"))
SHAPES = {"embed": (ROWS, 64), "norm": (64,), "experts": (4, 24, 16), "head": (130, 64)}


def weights(version: int) -> dict[str, torch.Tensor]:
    """The weights of a version: a thousandth of them differ from the version before, of every tenth version all."""
    torch.manual_seed(0)
    found = {name: torch.randn(shape).bfloat16() for name, shape in SHAPES.items()}
    for one in range(1, version + 1):
        for tensor in found.values():
            tensor.view(-1)[one % 7 :: 1000 if one % 10 else 1] += one
    return found


class Trainer:
    """The sender, whose parameters are `weights` of the staged version."""

    def __init__(self, link: str, directory: str, *flags: str) -> None:
        self._kind, self._directory = find_link(link)[0], Path(directory)
        self._parameters = {name: torch.nn.Parameter(tensor) for name, tensor in weights(0).items()}
        own = ["--model.path=m", "--environment.name=e", "--model.dtype=bfloat16"]
        own += ["--generator.engine=vllm", "--lora.rank=4", "--sync.link=lora"] if link == "lora" else []
        self._config = load_config(None, [*own, *flags])
        self._sender: Any = None

    def open(self, receivers: int) -> Any:
        if self._sender:
            self._sender.close()
        self._sender = self._kind(self._parameters, self._config, self._directory, receivers)
        return self._sender.connection_info()

    def stage(self, version: int) -> Any:
        with torch.no_grad():
            for name, tensor in weights(version).items():
                self._parameters[name].copy_(tensor)
        self._handle = self._sender.stage(version)
        return self._handle

    def send(self) -> None:
        self._sender.send(self._handle)


class Engine:
    """Served weights that may be shards: `parts` engines hold one row range each of every matrix."""

    def __init__(self, link: str) -> None:
        self._link = link
        self._weights: ServedWeights | None = None

    def connect(self, info: Any, rank: int, part: int = 0, parts: int = 1) -> None:
        if self._weights:
            self._weights.close()
        else:
            self._index = {}
            for name, shape in SHAPES.items():
                rows = shape[0] // parts
                split = len(shape) > 1 and parts > 1
                self._index[name] = (slice(part * rows, (part + 1) * rows),) if split else ()
            self._served = {name: torch.zeros(shape).bfloat16()[self._index[name]] for name, shape in SHAPES.items()}
        shards = {name: ParameterShard(self._served[name], SHAPES[name], self._index[name]) for name in SHAPES}
        self._weights = ServedWeights(self._link, info, shards, rank, rebind=False)

    def publish(self, handle: Any) -> bool:
        """Receive a version and swap. Returns whether the served weights are those of the version."""
        assert self._weights
        self._weights.prepare(handle)
        while not self._weights.prepared():
            time.sleep(0.001)
        self._weights.apply()
        return self.serves(handle["version"])

    def serves(self, version: int) -> bool:
        wanted = weights(version)
        return all(torch.equal(t, wanted[name][self._index[name]]) for name, t in self._served.items())


class AdapterEngine:
    """Reads adapters as a vLLM worker does."""

    def __init__(self, link: str) -> None:
        self._served = -1

    def connect(self, info: Any, rank: int) -> None: ...

    def serves(self, version: int) -> bool:
        return version == self._served

    def publish(self, handle: Any) -> bool:
        """Whether the adapter that was read has the values of the version."""
        with adapter_files(handle) as path:
            found, config = read_adapter(path, torch.device("cpu")), json.loads((path / ADAPTER).read_text())
        wanted, self._served = weights(handle["version"]), handle["version"]
        return config["r"] == 4 and all(torch.equal(found[name], wanted[name]) for name in wanted)


if __name__ == "__main__":
    torch.set_num_threads(1)
    delta.SILENCE_LIMIT_S = adapters.SILENCE_LIMIT_S = float(os.environ.get("SILENCE_LIMIT_S", "60"))
    engine = AdapterEngine if sys.argv[2] == "lora" else Engine
    serve(Trainer(*sys.argv[2:]) if sys.argv[1] == "trainer" else engine(sys.argv[2]))
