"""The `delta` link: the elements that changed since the version that an engine has, over TCP.

For engines that share no fast network with the trainer. The sender keeps the last version on its device, compares the
bits of the next one with it, and codes the differences (`changes`); a parameter of which most elements changed is sent
whole. Each receiver says which version its engine serves, and gets the changes since then, or all weights if it has
none or one too old. Receivers with the same version form a chain: each passes frames on to the next while they come
(`frames`), so the trainer sends one copy, and the rest of one to each receiver whose predecessor fails.

Differences are right only on the version that they were made from. A receiver computes the checksums that its shards
will have, and compares them with the trainer's before the engine swaps. The swap reads the written words back.
"""

from __future__ import annotations

import secrets
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from statistics import median_high
from typing import Any

import torch
from torch import Tensor

from slipstream.config.schema import Config
from slipstream.errors import InvalidInput
from slipstream.model.device import dtype_of
from slipstream.runtime.addresses import address_towards, own_address
from slipstream.sync.changes import (
    Changes,
    ElementSpace,
    Update,
    checksum_change,
    decode,
    encode,
    find_changes,
    merge,
    to_bytes,
    words,
)  # fmt: skip
from slipstream.sync.checksum import checksum
from slipstream.sync.frames import FrameServer, Refused, Request, Stream, Superseded, fetch
from slipstream.sync.link import (
    ConnectionInfo,
    Parameters,
    ParameterShard,
    PublishHandle,
    Receiver,
    Sender,
    Shapes,
    shapes_of,
)

MIN_FRAME, MAX_FRAME = 2**16, 2**22  # bytes before compression
FRAMES = 64  # of a stream, so that a chain of receivers is hardly slower than one
SILENCE_LIMIT_S = 60.0  # without a byte: the transfer of a version fails
COMPRESSION = 2e8  # bytes per second of the fastest network on which compression is tried
SLOW = 0.25  # of the median rate, or of `COMPRESSION`: no receiver waits for one below
MIN_MEASURED = 2**20  # bytes of a stream that measures the rate of a network
Entry = tuple[str, int]  # name of a parameter that is sent whole, or "" for the changes of all others; bytes


class DeltaSender(Sender):
    """The trainer's end: the last version on its device, the latest changes, and a server of both."""

    trainer_free_after_send = independent_receivers = late_receivers = True

    def __init__(self, parameters: Parameters, config: Config, directory: Path, receivers: int) -> None:
        self._parameters, self._dtype = parameters, dtype_of(config)
        self._shapes = shapes_of(parameters)
        self._space = ElementSpace(self._shapes, next(iter(parameters.values())).device)
        self._secret = secrets.token_bytes(32)
        self._lock = threading.Lock()  # of all that follows
        self._served: dict[str, Tensor] = {}  # words of the staged version
        self._sums: dict[str, int] = {}
        self._state = 0  # number of the staged weights; a version that is staged again unchanged keeps its number
        self._steps: dict[int, tuple[list[Entry], list[bytes]]] = {}  # by state: changes since the one before
        self._streams: dict[int | None, Stream] = {}  # to the current state, by the state that they start from
        self._tails: dict[int | None, Any] = {}  # address of the receiver to ask next, by the same
        self._asked: set[tuple[int, int | None]] = set()  # rank and state of the receivers that have asked
        self._rates: dict[int, float] = {}  # bytes per second of each receiver's last transfer
        self._server = FrameServer(own_address(), self._secret, self._find, 1e6 * config.sync.max_mb_per_s)

    def connection_info(self) -> ConnectionInfo:
        dtype = str(self._dtype).removeprefix("torch.")
        return {
            "address": self._server.address, "secret": self._secret.hex(), "dtype": dtype, "shapes": self._shapes,
        }  # fmt: skip

    @torch.no_grad()
    def stage(self, version: int) -> PublishHandle:
        """Compare the weights with the last version, and keep a copy."""
        with self._lock:
            first = not self._served
            try:
                changes, whole = self._compare()
            except BaseException:
                self._forget()
                raise
            elements = len(changes.indices) + sum(self._served[name].numel() for name in whole)
            payloads = [encode(changes, self._dtype.itemsize)] if len(changes.indices) else []
            names = [""] * len(payloads)
            if not first:
                payloads += [to_bytes(self._served[name]) for name in whole]
                names += whole
            if first or payloads:
                self._advance([(name, len(p)) for name, p in zip(names, payloads, strict=True)], payloads)
            sums = {name: str(value) for name, value in self._sums.items()}  # too large for msgpack
            return {
                "version": version, "state": self._state, "sums": sums, "bytes": sum(map(len, payloads)),
                "changed": elements / self._space.starts[-1],
            }  # fmt: skip

    def close(self) -> None:
        self._server.close()

    def _compare(self) -> tuple[Changes, list[str]]:
        """Changes since the last version, and names of the parameters to send whole.

        Keeps a copy of the new words, and their checksums.
        """
        parts, raised, whole = list[Changes](), dict[str, Tensor](), list[str]()
        for name, parameter in self._parameters.items():
            new = words(parameter.detach().to(self._dtype).contiguous())
            changes = find_changes(self._served[name], new) if name in self._served else None
            if changes is None:
                whole.append(name)
                self._served[name] = new.clone()
                self._sums[name] = checksum(self._served[name].view(self._dtype).view(*self._shapes[name]))
            elif len(changes.indices):
                parts.append(Changes(changes.indices + self._space.of(name).start, changes.differences))
                raised[name] = checksum_change(changes, prod(self._shapes[name][1:]))
                self._served[name][changes.indices] = new[changes.indices]
        for name, by in zip(raised, torch.stack(list(raised.values())).tolist() if raised else (), strict=True):
            self._sums[name] = (self._sums[name] + by) % 2**64
        return Changes.join(parts, self._space.device), whole

    def _forget(self) -> None:
        """Send all weights next time: the copy may be a mixture of two versions."""
        self._state += 1
        self._served, self._sums, self._steps = {}, {}, {}

    def _advance(self, entries: list[Entry], payloads: list[bytes]) -> None:
        """Begin a new state. Old changes are kept while they are smaller than all weights."""
        self._state += 1
        self._steps[self._state] = entries, payloads
        self._streams, self._tails, self._asked = {}, {}, set()
        total, kept = self._space.starts[-1] * self._dtype.itemsize, 0
        for state in sorted(self._steps, reverse=True):
            kept += sum(map(len, self._steps[state][1]))
            if kept > total:
                del self._steps[state]

    def _find(self, request: Request) -> tuple[Request, Stream | None]:
        """Answer a receiver: with a stream from the state that it has, or with the receiver before it in its chain.

        None follows a receiver whose network is slow.
        """
        with self._lock:
            if request["state"] != self._state:
                raise Refused("a newer version is published")
            base: int | None = request["base"]
            if base is not None and not all(n in self._steps for n in range(base + 1, self._state + 1)):
                base = None
            if base not in self._streams:
                self._streams[base] = self._open_stream(base)
            asks = request["rank"], request["base"]
            if request["direct"] or asks in self._asked:  # a peer may wait for this receiver
                return {}, self._streams[base]
            self._asked.add(asks)
            peer, self._rates[request["rank"]] = self._tails.get(request["base"]), request["rate"]
            if request["rate"] >= SLOW * min(COMPRESSION, self._median_rate()):
                self._tails[request["base"]] = request["listens"]
            return ({"peer": peer}, None) if peer else ({}, self._streams[base])

    def _open_stream(self, base: int | None) -> Stream:
        """The stream of changes since `base`, or of all weights. Frames are added in a thread."""
        if base is None:
            payloads = [to_bytes(served) for served in self._served.values()]
            steps = [[(name, len(payload)) for name, payload in zip(self._served, payloads, strict=True)]]
        else:
            parts = [self._steps[n] for n in range(base + 1, self._state + 1)]
            steps, payloads = [entries for entries, _ in parts], [p for _, payloads in parts for p in payloads]
        stream = Stream({"base": base, "state": self._state, "steps": steps})
        arguments = stream, payloads, self._median_rate()
        threading.Thread(target=_add_frames, args=arguments, name="delta", daemon=True).start()
        return stream

    def _median_rate(self) -> float:
        """Bytes per second to half of the receivers; 0.0 if unknown."""
        return median_high([rate for rate in self._rates.values() if rate] or [0.0])


class DeltaReceiver(Receiver):
    """The engine's end. It tracks the state that the engine serves, and passes received frames on."""

    rebindable = False

    def __init__(self, connection_info: ConnectionInfo, shapes: Shapes, rank: int, device: torch.device) -> None:
        self._server: tuple[str, int] = tuple(connection_info["address"])
        self._secret = bytes.fromhex(connection_info["secret"])
        self._dtype: torch.dtype = getattr(torch, connection_info["dtype"])
        self._rank, self._device, self._rate = rank, device, 0.0
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._whole = ElementSpace(connection_info["shapes"], device)
        self._held: int | None = None  # the state that the engine serves, and the checksums of its shards
        self._sums: dict[str, int] = {}
        self._next: tuple[int, dict[str, int]] = 0, {}  # the same of the version that is prepared
        self._incoming: tuple[Request, Stream] | None = None  # the last stream, which another receiver may read
        self._relay = FrameServer(address_towards(self._server[0]), self._secret, self._find)

    def attach(self, shards: Mapping[str, ParameterShard]) -> None:
        """The tensors into which the engine copies versions. Raises `InvalidInput` if they can't be updated."""
        for name, shard in shards.items():
            if not shard.tensor.is_contiguous() or shard.tensor.dtype != self._dtype:
                raise InvalidInput(f'the engine stores {name} in another layout or dtype: use sync.link = "checkpoint"')
        self._shards = {name: shards[name] for name in self._whole.names}
        shapes = {name: shard.shape for name, shard in self._shards.items()}
        self._own = ElementSpace(shapes, self._device, {name: s.index for name, s in self._shards.items()})

    @torch.no_grad()
    def prepare(self, handle: PublishHandle) -> Mapping[str, Tensor] | Update:
        """All weights, or an update of the shards, on the device. Raises `Superseded`."""
        with torch.cuda.stream(self._stream):
            new, sums = self._receive(handle)
            if self._held is not None and not self._is_published(handle, sums):
                self._held = None
                new, sums = self._receive(handle)
            if not self._is_published(handle, sums):
                raise InvalidInput(f"the weights of version {handle['version']} differ from those that were published")
            if self._stream:
                self._stream.synchronize()
            if not isinstance(new, Update):
                self._held = None  # if the engine fails to copy all, it serves a mixture
            self._next = handle["state"], sums
            return new

    def swapped(self) -> None:
        """The engine serves the version that was prepared last."""
        self._held, self._sums = self._next

    def close(self) -> None:
        self._relay.close()
        if self._incoming:
            self._incoming[1].end("the link is closed")

    def _receive(self, handle: PublishHandle) -> tuple[dict[str, Tensor] | Update, dict[str, int]]:
        """New weights and the checksums of the shards with them: the changes since the held state, or all weights."""
        stream = Stream()
        request = {
            "state": handle["state"], "base": self._held, "rank": self._rank, "rate": self._rate,
            "listens": self._relay.address,
        }  # fmt: skip
        self._incoming = request, stream
        threading.Thread(target=self._fetch, args=(request, stream), name="delta", daemon=True).start()
        try:
            header = stream.wait_header()
            changes, whole = self._read(header["steps"], _Reader(stream))
        except Refused as error:
            raise Superseded(f"version {handle['version']} did not arrive: {error}") from None
        self._rate = stream.rate if stream.size >= MIN_MEASURED else self._rate
        parts = {name: new[self._shards[name].index] for name, new in whole.items()}
        sums = {name: checksum(part, self._shards[name].index) for name, part in parts.items()}
        if header["base"] is None:
            return whole, sums
        changes = self._own.within(changes, self._whole)
        raised = zip(self._own.names, self._own.checksum_changes(changes), strict=True)
        sums = {name: (self._sums[name] + by) % 2**64 for name, by in raised} | sums
        numbers = {self._own.names.index(name): words(part.contiguous()) for name, part in parts.items()}
        return Update(self._own, [words(shard.tensor) for shard in self._shards.values()], changes, numbers), sums

    def _fetch(self, request: Request, stream: Stream) -> None:
        try:
            fetch(self._server, self._secret, request, stream, SILENCE_LIMIT_S)
        except Exception as error:  # `_receive` waits for the stream
            stream.end(str(error) or type(error).__name__)

    def _find(self, request: Request) -> tuple[Request, Stream | None]:
        """Answer another receiver, which wants the same stream."""
        if self._incoming is None or any(self._incoming[0][key] != request[key] for key in ("state", "base")):
            raise Refused("another stream")
        return {}, self._incoming[1]

    def _read(self, steps: list[list[Entry]], data: _Reader) -> tuple[Changes, dict[str, Tensor]]:
        """Changes, and whole parameters, from the entries of one or more consecutive states."""
        whole, chain = dict[str, Tensor](), list[Changes]()
        for name, size in (entry for entries in steps for entry in entries):
            payload = data.read(size)
            if name:
                whole[name] = torch.frombuffer(payload, dtype=self._dtype).to(self._device)
                chain = [changes.without(self._whole.of(name)) for changes in chain]
                continue
            changes = decode(payload, self._dtype.itemsize, self._device)
            if len(changes.indices) and changes.indices[-1] >= self._whole.starts[-1]:
                raise InvalidInput("a change of an element that no parameter has")
            for other, earlier in whole.items():
                part = self._whole.of(other)
                words(earlier).index_add_(0, *changes.only(part, words(earlier).dtype))
                changes = changes.without(part)
            chain.append(changes)
        shaped = {name: tensor.view(*self._shards[name].shape) for name, tensor in whole.items()}
        return merge(chain) if chain else Changes.join((), self._device), shaped

    def _is_published(self, handle: PublishHandle, sums: Mapping[str, int]) -> bool:
        """Whether shards that are whole parameters will have the published checksums."""
        whole = [name for name, shard in self._shards.items() if shard.tensor.numel() == prod(shard.shape)]
        return all(sums[name] == int(handle["sums"][name]) for name in whole)


class Delta:
    Sender, Receiver = DeltaSender, DeltaReceiver


class _Reader:
    """Reads entries of known sizes from the frames of a stream, as they come."""

    def __init__(self, stream: Stream) -> None:
        self._frames = stream.frames()
        self._rest = memoryview(b"")

    def read(self, size: int) -> bytearray:
        found = bytearray()
        while len(found) < size:
            if not self._rest:
                frame = next(self._frames, None)
                if frame is None:
                    raise InvalidInput("the stream of a version ended early")
                self._rest = memoryview(zlib.decompress(frame[1:])) if frame[0] else memoryview(frame)[1:]
            taken = min(size - len(found), len(self._rest))
            found += self._rest[:taken]
            self._rest = self._rest[taken:]
        return found


def _add_frames(stream: Stream, payloads: list[bytes], rate: float) -> None:
    """Cut payloads into frames, compressed if that is faster at `rate` bytes per second (0: unknown), and add them."""
    size = max(MIN_FRAME, min(MAX_FRAME, sum(map(len, payloads)) // FRAMES))
    for chunk in _chunks(payloads, size):
        packed, began = chunk, time.perf_counter()
        if 0 < rate < COMPRESSION:
            packed = zlib.compress(chunk, 1)
        spent, spared = time.perf_counter() - began, (len(chunk) - len(packed)) / max(rate, 1)
        stream.add(b"\1" + packed if spent < spared else b"\0" + chunk)
        rate = rate if spent < spared else 0.0  # don't try again
    stream.end()


def _chunks(payloads: list[bytes], size: int) -> Iterator[bytes]:
    """The concatenated payloads in pieces of at most `size` bytes."""
    small = bytearray()
    for payload in payloads:
        if len(small) + len(payload) <= size:
            small += payload
            continue
        yield bytes(small)
        small.clear()
        yield from (payload[at : at + size] for at in range(0, len(payload), size))
    yield bytes(small)
