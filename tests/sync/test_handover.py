"""The `shared` link where engines and trainer take turns: buckets, engines that die, and where each engine connects."""

from __future__ import annotations

import multiprocessing as mp
import select
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.config.loading import load_config
from slipstream.errors import InvalidInput
from slipstream.sync import handover
from slipstream.sync.handover import HandoverReceiver, HandoverSender
from slipstream.sync.link import ParameterShard
from tests.sync.link_ends import SHAPES, weights

CPU = torch.device("cpu")
FLAGS = ["--model.path=m", "--environment.name=e", "--model.dtype=bfloat16", "--sync.placement=colocated",
         "--sync.in_flight=retry"]  # fmt: skip


@pytest.fixture
def sender(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HandoverSender]:
    """A sender of `weights(0)`, whose buckets hold less than the largest parameter."""
    monkeypatch.setattr(handover, "BUCKET", 4096)
    found = HandoverSender(weights(0), load_config(None, FLAGS), tmp_path, 2)
    assert len(found._buckets) > 2
    yield found
    found.close()


def connect(sender: HandoverSender, rank: int) -> tuple[HandoverReceiver, dict[str, ParameterShard]]:
    """A receiver, and the tensors that it serves: zeros, of each second row of the embedding only a part."""
    info = sender.connection_info()
    receiver = HandoverReceiver({**info, "parts": [info]}, info["shapes"], rank, CPU)
    shards = {name: ParameterShard(torch.zeros(shape), shape) for name, shape in SHAPES.items()}
    shards["embed"] = ParameterShard(torch.zeros(100, 64), SHAPES["embed"], (slice(50, 150),))
    receiver.attach(shards)
    return receiver, shards


def served(shards: dict[str, ParameterShard], version: int) -> bool:
    return all(torch.equal(s.tensor, weights(version)[name].float()[s.index]) for name, s in shards.items())


def test_every_engine_copies_its_parts_of_each_version(sender: HandoverSender) -> None:
    engines = [connect(sender, rank) for rank in (1, 2)]
    with ThreadPoolExecutor(2) as threads:
        for version in (0, 1):
            for name, tensor in weights(version).items():
                sender._parameters[name].copy_(tensor)
            handle = sender.stage(version)
            copying = [threads.submit(receiver.prepare, handle) for receiver, _ in engines]
            sender.send(handle)
            assert [call.result() for call in copying] == [{}, {}]
            assert all(served(shards, version) for _, shards in engines)


def test_an_engine_that_dies_is_not_waited_for(sender: HandoverSender, monkeypatch: pytest.MonkeyPatch) -> None:
    (dying, _), (well, shards) = (connect(sender, rank) for rank in (1, 2))
    copied: list[Any] = []

    def die_in_the_second_bucket() -> torch.Tensor:
        copied.append(None)
        if len(copied) == 2:
            dying.close()
        return HandoverReceiver._map(dying)

    monkeypatch.setattr(dying, "_map", die_in_the_second_bucket)
    with ThreadPoolExecutor(2) as threads:
        handle = sender.stage(0)
        calls = [threads.submit(receiver.prepare, handle) for receiver in (dying, well)]
        sender.send(handle)
        with pytest.raises((OSError, EOFError)):
            calls[0].result()
        calls[1].result()
    assert served(shards, 0) and len(sender._receivers) == 1


def test_a_bucket_of_another_version_is_refused(sender: HandoverSender) -> None:
    receiver, _ = connect(sender, 1)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(receiver.prepare, {"version": 8})
        sender.send({"version": 7})  # the engine fails and is not waited for
        with pytest.raises(InvalidInput, match="the trainer sent bucket 0 of version 7 instead of 0 of 8"):
            waiting.result()


def test_an_engine_on_a_gpu_without_a_rank_is_refused(sender: HandoverSender) -> None:
    info = sender.connection_info()
    parts = [{**info, "gpu": "GPU-1"}, {**info, "gpu": "GPU-2"}]
    with pytest.raises(InvalidInput, match=r"no trainer rank is on the CPU, where this engine is; leave generator\."):
        HandoverReceiver({**info, "parts": parts}, info["shapes"], 1, CPU)


def receive_on_gpu(info: Any, handle: Any) -> None:
    """In another process: raises unless the tensors on the GPU get the version."""
    torch.cuda.set_device(0)
    device = torch.device("cuda", 0)
    receiver = HandoverReceiver({**info, "parts": [info]}, info["shapes"], 1, device)
    shards = {name: ParameterShard(torch.zeros(shape, device=device), shape) for name, shape in SHAPES.items()}
    receiver.attach(shards)
    receiver.prepare(handle)
    for name, tensor in weights(3).items():
        torch.testing.assert_close(shards[name].tensor.cpu(), tensor.float(), rtol=0, atol=0)
    receiver.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_buckets_are_read_on_the_gpu(tmp_path: Path) -> None:
    parameters = {name: tensor.cuda() for name, tensor in weights(3).items()}
    sender = HandoverSender(parameters, load_config(None, FLAGS), tmp_path, 1)
    assert sender.connection_info()["gpu"]
    handle = sender.stage(3)
    receiving = mp.get_context("spawn").Process(target=receive_on_gpu, args=(sender.connection_info(), handle))
    receiving.start()
    while not select.select([sender._listener], [], [], 0.1)[0]:
        assert receiving.is_alive()
    sender.send(handle)
    receiving.join(60)
    assert receiving.exitcode == 0 and sender._memory is not None and sender._memory.is_cuda
    sender.close()
