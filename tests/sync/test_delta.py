"""The `delta` link: engines serve what was published, whatever happens to connections, versions and receivers."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
import time
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.config.loading import load_config
from slipstream.errors import InvalidInput
from slipstream.generators.served_weights import ServedWeights
from slipstream.sync import arrays, changes, channel, coder, delta, frames, update
from slipstream.sync.blocks import words
from slipstream.sync.checksum import checksum
from slipstream.sync.delta import DeltaReceiver, DeltaSender
from slipstream.sync.link import ParameterShard, PublishHandle
from slipstream.sync.update import RolledBack

SHAPES = {"embed": (300, 64), "norm": (64,), "experts": (4, 24, 16), "head": (130, 64)}
HALF = {
    "embed": (slice(0, 150),), "norm": (), "experts": (), "head": (slice(0, 130), slice(32, 64)),
}  # fmt: skip


DEVICE = "cpu"  # of both ends


class Engine:
    """Served tensors, and the engine's end of the link; `index` by name selects shards."""

    def __init__(self, info: dict[str, Any], rank: int = 1, index: dict[str, tuple[slice, ...]] | None = None) -> None:
        self.index = index or dict.fromkeys(SHAPES, ())
        torch.manual_seed(rank)
        self.tensors = {
            name: torch.randn(shape)[self.index[name]].bfloat16().clone().to(DEVICE) for name, shape in SHAPES.items()
        }
        shards = {name: ParameterShard(self.tensors[name], SHAPES[name], self.index[name]) for name in SHAPES}
        self.weights = ServedWeights("delta", info, shards, rank, rebind=False)
        receiver = self.weights._receiver
        assert isinstance(receiver, DeltaReceiver)
        self.receiver = receiver

    def prepare(self, handle: PublishHandle) -> None:
        self.weights.prepare(json.loads(json.dumps(handle)))  # only plain data passes the controller
        while not self.weights.prepared():
            time.sleep(0.001)

    def swap(self, handle: PublishHandle) -> None:
        self.prepare(handle)
        self.weights.apply()
        self.weights.pause_s()  # on a GPU this confirms it

    def serves(self, parameters: dict[str, Tensor]) -> bool:
        return all(
            torch.equal(words(t), words(parameters[n][self.index[n]].contiguous())) for n, t in self.tensors.items()
        )

    def checksums_agree(self, trainer: Trainer) -> bool:
        self.weights.start_checksums(list(SHAPES))
        while (sums := self.weights.checksums()) is None:
            time.sleep(0.001)
        return sums == trainer.sums


class Trainer:
    """Parameters, and the trainer's end of the link."""

    def __init__(self, directory: Path, *flags: str) -> None:
        torch.manual_seed(0)
        self.parameters = {name: torch.randn(shape).bfloat16().to(DEVICE) for name, shape in SHAPES.items()}
        own = ["--model.path=m", "--environment.name=e", "--model.dtype=bfloat16", "--sync.link=delta"]
        self.sender = DeltaSender(self.parameters, load_config(None, [*own, *flags]), directory, 1)
        self.info = json.loads(json.dumps(self.sender.connection_info()))
        self.version = -1
        self._draw = torch.Generator().manual_seed(0)

    def publish(self, share: float = 0.02) -> PublishHandle:
        """Change this share of each parameter, and stage the next version."""
        for parameter in self.parameters.values():
            bits = words(parameter)
            count = int(share * len(bits))
            places = torch.randperm(len(bits), generator=self._draw)[:count]
            bits[places.to(bits.device)] += torch.randint(0, 2, (count,), generator=self._draw).to(bits) * 2 - 1
        self.version += 1
        handle = self.sender.stage(self.version)
        self.sizes = self.sender.send(handle)
        return handle

    @property
    def sums(self) -> dict[str, int]:
        return {name: checksum(parameter) for name, parameter in self.parameters.items()}


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


@pytest.fixture(params=["NumPy's arrays", "tensors", pytest.param("a GPU", marks=needs_gpu)])
def trainer(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trainer]:
    """In several blocks. With tensors both ends compute as on a GPU, here on the CPU."""
    monkeypatch.setattr(delta, "BLOCK", {"cpu": 4096, "cuda": 4096})
    if request.param == "tensors":
        monkeypatch.setattr(arrays, "as_array", lambda tensor: tensor)
    if request.param == "a GPU":
        monkeypatch.setattr(f"{__name__}.DEVICE", "cuda")
    made = Trainer(tmp_path)
    yield made
    made.sender.close()


def test_receivers_form_a_chain_also_once_the_network_is_slower_for_all(trainer: Trainer) -> None:
    assert sources(trainer, 0.0) == sources(trainer, 1e6) == [0]
    assert [sources(trainer, 1e5) for _ in range(2)] == [[0, 1], [0]]


def sources(trainer: Trainer, rate: float, measured: Collection[int] = range(16), slow: float = 0.0) -> list[int]:
    """Which of 16 receivers get a version from the trainer. `rate` is that of all, but of rank 0 maybe `slow`."""
    state, found = trainer.publish()["state"], []
    for rank in range(16):
        ask = {"state": state, "base": None, "direct": False, "rank": rank, "listens": ["peer", rank]}
        ask |= {"rate": rate if rank else slow or rate, "measured": rank in measured}
        if trainer.sender._find(ask)[1]:
            found.append(rank)
    return found


def test_a_second_receiver_gets_a_version_from_the_trainer_until_its_network_is_measured(trainer: Trainer) -> None:
    """The first may be the slow one, which the others had to wait for."""
    assert sources(trainer, 0.0, []) == [0]
    assert [sources(trainer, 1e6, [0]) for _ in range(2)] == [[0, 1]] * 2
    assert [sources(trainer, 9e6, [0, 1], slow=1e6) for _ in range(2)] == [[0, 1]] * 2
    assert [sources(trainer, 9e6, [0, 1]) for _ in range(2)] == [[0]] * 2


def test_two_hundred_publishes_in_a_row_equal_a_full_copy(trainer: Trainer) -> None:
    engine, draw = Engine(trainer.info), random.Random(0)
    for _ in range(200):
        handle = trainer.publish(draw.choice([0.0, 0.001, 0.02, 0.3, 1.0]))
        engine.swap(handle)
    assert engine.serves(trainer.parameters) and engine.checksums_agree(trainer)


def test_changes_are_small_and_never_larger_than_all_weights(trainer: Trainer) -> None:
    total = 2 * sum(p.numel() for p in trainer.parameters.values())
    trainer.publish()
    sizes = [trainer.publish(share) and trainer.sizes for share in (0.01, 1.0, 0.0)]
    assert sizes[0]["bytes"] < 0.05 * total and sizes[0]["changed"] == pytest.approx(0.01, abs=0.001)
    assert sizes[1]["bytes"] <= 1.01 * total and sizes[1]["changed"] == 1.0
    assert sizes[2]["bytes"] == sizes[2]["changed"] == 0


def test_an_engine_that_missed_versions_gets_the_changes_since_its_own(trainer: Trainer) -> None:
    engine, late = Engine(trainer.info), Engine(trainer.info, 2)
    handle = trainer.publish()
    engine.swap(handle)
    late.swap(handle)
    for share in (0.01, 0.02, 1.0, 0.02, 0.01):  # one of them is sent whole
        engine.swap(handle := trainer.publish(share))
    sent = trainer.sender._server.sent
    late.swap(handle)
    total = 2 * sum(p.numel() for p in trainer.parameters.values())
    assert late.serves(trainer.parameters) and trainer.sender._server.sent - sent < 1.3 * total


def test_a_version_that_was_prepared_and_not_swapped_in_is_no_base(trainer: Trainer) -> None:
    engine = Engine(trainer.info)
    engine.swap(trainer.publish())
    engine.prepare(trainer.publish())
    engine.swap(trainer.publish())
    assert engine.serves(trainer.parameters)


def test_an_engine_without_a_version_or_with_one_too_old_gets_all(trainer: Trainer) -> None:
    old = Engine(trainer.info)
    old.swap(trainer.publish())
    for _ in range(30):
        handle = trainer.publish(0.3)
    assert 1 not in trainer.sender._steps  # forgotten: the changes since then are larger than all weights
    for engine in (old, Engine(trainer.info, 2)):
        engine.swap(handle)
        assert engine.serves(trainer.parameters)


def test_shards_of_two_ranks_get_their_parts(trainer: Trainer) -> None:
    rest = {
        "embed": (slice(150, 300),), "norm": (), "experts": (), "head": (slice(0, 130), slice(0, 32)),
    }  # fmt: skip
    ranks = [Engine(trainer.info, rank, index) for rank, index in ((1, HALF), (2, rest))]
    for share in (0.02, 0.02, 1.0, 0.02):
        handle = trainer.publish(share)
        for engine in ranks:
            engine.swap(handle)
            assert engine.serves(trainer.parameters)


def test_a_wrong_base_is_noticed_before_the_swap_and_answered_by_all_weights(trainer: Trainer) -> None:
    """As if the engine served another version than it believes."""
    engine = Engine(trainer.info)
    for _ in range(3):
        engine.swap(trainer.publish())
    engine.receiver._held = 1
    engine.swap(trainer.publish())
    assert engine.serves(trainer.parameters)


def test_a_flipped_bit_of_a_served_tensor_shows_in_its_checksum(trainer: Trainer) -> None:
    engine = Engine(trainer.info)
    engine.swap(trainer.publish())
    words(engine.tensors["head"])[77] ^= 64
    engine.swap(trainer.publish())
    assert not engine.checksums_agree(trainer)


def publish_second(trainer: Trainer) -> tuple[Engine, dict[str, torch.Tensor], PublishHandle]:
    """An engine that serves the first version, the weights of that version, and the second version for it."""
    engine = Engine(trainer.info)
    engine.swap(trainer.publish())
    before = {name: tensor.clone() for name, tensor in trainer.parameters.items()}
    return engine, before, trainer.publish()


def test_a_swap_that_is_rolled_back_leaves_the_old_version_and_the_next_one_arrives(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, before, handle = publish_second(trainer)
    with monkeypatch.context() as patched, pytest.raises(RolledBack):
        patched.setattr(update._Changed, "swap", lambda changed: (changed._old, changed._new))
        engine.swap(handle)
    assert engine.serves(before)
    engine.swap(trainer.publish())
    assert engine.serves(trainer.parameters)


def test_an_engine_without_memory_for_a_version_keeps_its_own_and_gets_the_next_one(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, before, handle = publish_second(trainer)

    def full(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patched, pytest.raises(frames.Superseded, match="no memory for version"):
        patched.setattr(update.Update, "add", full)
        engine.prepare(handle)
    assert engine.serves(before)
    engine.swap(trainer.publish())
    assert engine.serves(trainer.parameters)


def test_a_tensor_that_can_not_be_updated_is_refused_by_name(trainer: Trainer) -> None:
    shards = {name: ParameterShard(torch.zeros(shape, dtype=torch.bfloat16), shape) for name, shape in SHAPES.items()}
    shards["head"] = ParameterShard(torch.zeros(64, 130, dtype=torch.bfloat16).T, SHAPES["head"])
    with pytest.raises(InvalidInput, match="stores head in another layout"):
        ServedWeights("delta", trainer.info, shards, 1, rebind=False)


class Proxy:
    """Forwards connections to an address, and damages them: each byte count in `cuts` ends one connection; `flip`
    changes a byte of the answer of the first, and `flip_request` one of what the client sends."""

    rate = 1e12  # bytes per second of each direction of a connection

    def __init__(self, address: Any, cuts: list[int] = [], flip: int = 0, flip_request: int = 0) -> None:  # noqa: B006
        self._address, self._cuts, self._flips = tuple(address), list(cuts), (flip_request, flip)
        self.connections = self.answered = 0  # connections, and bytes that the client got
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = self._socket.getsockname()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._socket.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._socket.accept()
                self.connections += 1
                server = socket.create_connection(self._address)
                limit = self._cuts.pop(0) if self._cuts else 2**60
                flips, self._flips = self._flips, (0, 0)
                pairs = ((client, server, 2**60, flips[0]), (server, client, limit, flips[1]))
                threading.Thread(target=self._serve, args=pairs, daemon=True).start()

    def _serve(self, there: tuple[Any, ...], back: tuple[Any, ...]) -> None:
        other = threading.Thread(target=self._forward, args=there, daemon=True)
        other.start()
        self._forward(*back)
        other.join()
        for end in there[:2]:
            end.close()

    def _forward(self, source: socket.socket, target: socket.socket, limit: int, flip: int) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while passed < limit and (data := bytearray(source.recv(4096))):
                if passed <= flip - 1 < passed + len(data):
                    data[flip - 1 - passed] ^= 1
                time.sleep(len(data) / self.rate)
                target.sendall(data[: limit - passed])
                if source.getpeername() == self._address:
                    self.answered += min(len(data), limit - passed)
                passed += len(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    "damage", [{"cuts": [500, 9000, 20000, 30000]}, {"flip": 30000}, {"flip": 260}, {"cuts": [40]}]
)
def test_a_broken_or_damaged_connection_is_resumed(
    trainer: Trainer, damage: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut in the handshake, in the header or in a frame; a byte changed on the way."""
    monkeypatch.setattr(frames, "RETRY_S", 0.01)
    monkeypatch.setattr(coder, "FRAME", 4096)
    proxy = Proxy(trainer.info["address"], **damage)
    engine = Engine(trainer.info | {"address": proxy.address})
    engine.swap(trainer.publish())
    assert engine.serves(trainer.parameters) and proxy.connections > 1
    whole = sum(tensor.nbytes for tensor in trainer.parameters.values())
    if "cuts" in damage:  # else the proxy reads ahead of the engine
        # Of a connection, the frame in which it broke is sent again, and what identifies the ends.
        assert proxy.answered < whole + proxy.connections * (coder.FRAME + 1024)
    proxy.close()


def test_a_hundred_random_cuts_and_flips_leave_only_published_weights(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "RETRY_S", 0.001)
    monkeypatch.setattr(coder, "FRAME", 2048)
    draw, engine = random.Random(0), Engine(trainer.info)
    for _ in range(100):
        proxy = Proxy(trainer.info["address"], [draw.randrange(1, 30000)], draw.choice([0, draw.randrange(1, 4000)]))
        engine.receiver._server = proxy.address
        engine.swap(trainer.publish(draw.choice([0.01, 0.1, 1.0])))
        assert engine.serves(trainer.parameters)
        proxy.close()


@pytest.mark.parametrize("direction", ["flip", "flip_request"])
def test_a_flipped_byte_anywhere_is_noticed_and_answered_by_a_new_connection(
    direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a nonce, a length, a request, an answer, the header, a frame, the end, or a MAC of these."""
    monkeypatch.setattr(frames, "RETRY_S", 0.0)
    stream, found = frames.Stream({"state": 7}), set[int]()
    for frame in (b"\0first", b"\0second"):
        stream.add(frame)
    stream.end()
    server = frames.FrameServer("127.0.0.1", b"secret", lambda request: ({}, stream))
    for flip in range(1, 400):
        proxy, into = Proxy(server.address, **{direction: flip}), frames.Stream()
        frames.fetch(proxy.address, b"secret", {"state": 7}, into, 10.0)
        assert into.header == {"state": 7} and list(into.frames()) == list(stream.frames())
        found.add(proxy.connections)
        proxy.close()
        if proxy.connections == 1:  # past the last byte
            break
    assert found == {1, 2} and flip > 100
    server.close()


def test_a_frame_may_take_longer_than_the_limit_of_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "SILENCE_S", 1.0)
    trainer = Trainer(tmp_path, "--sync.max_mb_per_s=0.03")
    proxy, began = Proxy(trainer.info["address"]), time.monotonic()
    engine = Engine(trainer.info | {"address": proxy.address})
    engine.swap(trainer.publish())
    assert engine.serves(trainer.parameters) and time.monotonic() - began > 1.5 and proxy.connections == 1
    proxy.close()
    trainer.sender.close()


def swap_at_once(engines: list[Engine], handle: PublishHandle) -> list[float]:
    """Let all engines swap to a version. Returns the seconds of each."""
    seconds = [0.0] * len(engines)

    def run(number: int) -> None:
        began = time.monotonic()
        engines[number].swap(handle)
        seconds[number] = time.monotonic() - began

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(engines))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seconds


def test_the_rate_of_a_transfer_is_that_at_which_its_frames_came() -> None:
    """Not a rate at which the kernel's buffers took frames that came slowly."""
    stream = frames.Stream({})
    server, into = frames.FrameServer("127.0.0.1", b"secret", lambda request: ({}, stream)), frames.Stream()
    fetching = threading.Thread(target=frames.fetch, args=(server.address, b"secret", {}, into, 10.0))
    fetching.start()
    for _ in range(20):
        stream.add(frames.PLAIN + bytes(9999))
        time.sleep(0.01)
    stream.rate = 7e5
    stream.end()
    fetching.join()
    assert 1e5 < into.rate < 1.2e6 and into.upstream_rate == 7e5
    server.close()


@pytest.mark.parametrize(("data", "packed"), [(bytes(300_000), True), (random.Random(0).randbytes(300_000), False)])
def test_frames_are_compressed_where_that_is_faster(data: bytes, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large frame that does not shrink is not compressed whole to find that out."""
    compressed, stream, into = list[int](), frames.Stream({}), frames.Stream()

    def compress(data: memoryview, level: int, original: Any = zlib.compress) -> bytes:
        compressed.append(len(data))
        return bytes(original(data, level))

    monkeypatch.setattr(zlib, "compress", compress)
    for _ in range(2):
        stream.add(frames.PLAIN + data)
    stream.end()
    server = frames.FrameServer("127.0.0.1", b"secret", lambda request: ({"rate": 1e4}, stream))
    frames.fetch(server.address, b"secret", {}, into, 10.0)
    assert [bytes(frames.unpack(frame)) for frame in into.frames()] == [data] * 2
    assert compressed == ([frames.PROBE, len(data)] * 2 if packed else [frames.PROBE])
    assert (into.size < 10_000) == packed
    server.close()


def test_a_network_is_judged_by_transfers_that_it_slowed_down() -> None:
    rate = delta.NetworkRate()
    found = []
    for measured, upstream in ((9e6, 0.0), (1e6, 0.0), (9e6, 8e6), (1e6, 1.1e6), (1e6, 1.1e6), (1e6, 9e6)):
        rate.add(measured, upstream)
        found.append(rate.estimate)
    assert found == [9e6, 1e6, 9e6, 9e6, 1e6, 1e6]


def test_frames_are_small_on_a_slow_network(trainer: Trainer) -> None:
    """An entry may span several."""
    engine, sizes = Engine(trainer.info), []
    engine.swap(trainer.publish())
    trainer.sender._latest = {1: {"rate": 1.0, "measured": True}}
    for share in (1.0, 0.02):
        engine.swap(handle := trainer.publish(share))
        sizes += map(len, trainer.sender._steps[handle["state"]].frames())
        assert engine.serves(trainer.parameters)
    assert len(sizes) > 20 and max(sizes) == coder.MIN_FRAME + 1


def test_whole_entries_are_found_in_pieces_with_any_cuts() -> None:
    draw, coded = random.Random(0), list[bytes]()
    for size in (0, 1, 40, 3, 2000, 0, 500, 7, 0):
        coded.append(changes.HEADER.pack(0, 0, size, 1, 0, 0, 0) + draw.randbytes(size))
    data = memoryview(b"".join(coded))
    for most in (1, 2, 29, 31, 100, 5000):
        pieces, at = list[memoryview](), 0
        while at < len(data):
            pieces.append(data[at : at + draw.randrange(1, most + 1)])
            at += len(pieces[-1])
        found = [bytes(one) for whole in changes.join_entries(pieces) for _, one in changes.entries(whole)]
        assert found == [entry[changes.HEADER.size :] for entry in coded]


def test_changes_that_end_in_an_entry_are_refused(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, before, _ = publish_second(trainer)
    monkeypatch.setattr(coder, "encode", lambda *arguments: changes.encode(*arguments)[:-1])
    with pytest.raises(ValueError, match="end in an entry"):
        engine.swap(trainer.publish())
    assert engine.serves(before)


def test_many_engines_pass_a_version_on(trainer: Trainer) -> None:
    engines = [Engine(trainer.info, rank) for rank in range(1, 9)]
    for share in (0.02, 0.02, 1.0):
        before, handle = trainer.sender._server.sent, trainer.publish(share)
        swap_at_once(engines, handle)
        assert all(engine.serves(trainer.parameters) for engine in engines)
        size = trainer.sizes["bytes"] or 2 * sum(map(torch.numel, trainer.parameters.values()))
        copies = (trainer.sender._server.sent - before) / size
        assert copies < 1.1


def test_no_engine_follows_one_with_a_slow_network(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it asks first. Rates are known after two publishes; a follower of a slow engine has a fast network."""
    monkeypatch.setattr(delta, "MIN_MEASURED", 1)
    proxy = Proxy(trainer.info["address"])
    proxy.rate = 1e5  # far below what the others reach on a busy machine
    slow = Engine(trainer.info | {"address": proxy.address})
    fast = [Engine(trainer.info, rank) for rank in (2, 3)]
    for _ in range(2):
        handle = trainer.publish(1.0)
        slow.swap(handle)  # alone, so that it receives from the trainer
        swap_at_once(fast, handle)
    handle = trainer.publish(1.0)
    slow.weights.prepare(handle)
    while (slow.receiver._rank, slow.receiver._held) not in trainer.sender._asked:
        time.sleep(0.001)
    swap_at_once(fast, handle)
    assert not slow.weights.prepared()
    proxy.rate = 1e7
    while not slow.weights.prepared():
        time.sleep(0.001)
    slow.weights.apply()
    assert all(engine.serves(trainer.parameters) for engine in (slow, *fast))
    proxy.close()


def test_a_small_version_measures_a_slow_network(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, "--sync.max_mb_per_s=0.02")
    engine = Engine(trainer.info)
    engine.swap(trainer.publish())
    assert delta.MIN_MEASURED_SLOW <= 2 * sum(map(torch.numel, trainer.parameters.values())) < delta.MIN_MEASURED
    assert engine.receiver._rate.estimate == pytest.approx(2e4, rel=0.4)
    trainer.sender.close()


def test_an_engine_whose_predecessor_dies_gets_the_rest_from_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coder, "FRAME", 2048)
    trainer = Trainer(tmp_path, "--sync.max_mb_per_s=0.2")
    first, second = (Engine(trainer.info, rank) for rank in (1, 2))
    handle = trainer.publish()
    first.weights.prepare(handle)
    while not trainer.sender._tails:
        time.sleep(0.001)
    passing = threading.Thread(target=second.swap, args=(handle,))
    passing.start()
    while second.receiver._incoming is None or len(second.receiver._incoming[1]) < 2:
        time.sleep(0.001)
    first.receiver.close()  # as its process dies
    passing.join()
    assert second.serves(trainer.parameters)
    trainer.sender.close()


def test_a_stage_that_fails_half_way_is_followed_by_all_weights(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(trainer.info)
    engine.swap(trainer.publish())
    calls = iter(range(10))

    def find(old: Tensor, new: Tensor) -> Any:
        if next(calls) == 2:
            raise MemoryError
        return changes.copy_changes(old, new)

    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(delta, "copy_changes", find)
        trainer.publish()
    engine.swap(trainer.publish())
    assert engine.serves(trainer.parameters) and engine.checksums_agree(trainer)


def test_changes_that_can_not_be_coded_are_followed_by_all_weights(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(trainer.info)
    engine.swap(trainer.publish())
    with monkeypatch.context() as patched:
        patched.setattr(coder, "encode", lambda *_: 1 // 0)
        handle = trainer.publish()
        try:
            engine.swap(handle)
        except frames.Superseded:  # it had begun to receive them: the publisher tries again
            engine.swap(handle)
    assert engine.serves(trainer.parameters) and engine.checksums_agree(trainer)
    engine.swap(trainer.publish())
    assert engine.serves(trainer.parameters)


def test_the_full_copy_of_a_new_engine_is_of_its_version_while_newer_ones_are_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changes of a few elements and of whole blocks are undone in it. It ends in a version that others have left."""
    monkeypatch.setattr(changes, "PIECE", 2048)
    monkeypatch.setattr(delta, "BLOCK", {"cpu": 4096})
    trainer = Trainer(tmp_path, "--sync.max_mb_per_s=0.05")
    handle = trainer.publish()
    before = {name: tensor.clone() for name, tensor in trainer.parameters.items()}
    engine = Engine(trainer.info)
    engine.weights.prepare(handle)
    while engine.receiver._incoming is None or not len(engine.receiver._incoming[1]):
        time.sleep(0.001)
    began = time.monotonic()
    for share in (0.02, 1.0, 0.1):
        newest = trainer.publish(share)
    assert time.monotonic() - began < 1.0 and not engine.weights.prepared()
    while not engine.weights.prepared():
        time.sleep(0.001)
    engine.weights.apply()
    assert engine.serves(before)
    engine.swap(newest)
    assert engine.serves(trainer.parameters)
    trainer.sender.close()


def test_the_bandwidth_is_limited(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, "--sync.max_mb_per_s=0.1")
    engine, began = Engine(trainer.info), time.monotonic()
    engine.swap(trainer.publish())
    size = 2 * sum(p.numel() for p in trainer.parameters.values())
    assert time.monotonic() - began > 0.8 * size / 1e5
    trainer.sender.close()


def test_a_version_that_is_no_longer_the_newest_is_reported_as_superseded(trainer: Trainer) -> None:
    engine, old = Engine(trainer.info), trainer.publish()
    trainer.publish()
    with pytest.raises(frames.Superseded, match="version 0 did not arrive: a newer version is published"):
        engine.prepare(old)


def test_a_client_without_the_secret_gets_nothing(trainer: Trainer) -> None:
    """Nor does garbage disturb the server."""
    engine = Engine(trainer.info)
    handle = trainer.publish()
    stranger = Engine(trainer.info | {"secret": "00" * 32}, 2)
    into = frames.Stream()
    with pytest.raises(TimeoutError, match=r"does not have the secret|ended|reset"):
        frames.fetch(stranger.receiver._server, bytes(32), {"state": 1, "base": None}, into, 0.0)
    assert into.header is None and not len(into)
    for data in (b"", b"\xff" * 8, b"GET / HTTP/1.1\r\n\r\n", bytes(100)):
        with socket.create_connection(trainer.info["address"]) as client:
            client.sendall(data)
    engine.swap(handle)
    assert engine.serves(trainer.parameters)
