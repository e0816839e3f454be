"""The `delta` link: the elements that changed since the version that an engine has, over TCP.

For engines that share no fast network with the trainer. The sender keeps the last version on its device, compares the
bits of the next one with it, and codes the differences (`changes`); a parameter of which most elements changed is sent
whole. Each receiver says which version its engine serves, and gets the changes since then, or all weights if it has
none or one too old. Receivers form a chain: each passes frames on to the next while they come (`frames`), so the
trainer sends about one copy for any number of engines.

Differences are right only on the version that they were made from. A receiver derives from the served tensors which
version they hold, and compares the checksums that the new version will have with the trainer's before it is swapped in.
"""

from __future__ import annotations

import secrets
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from slipstream.config.schema import Config
from slipstream.errors import InvalidInput
from slipstream.model.device import dtype_of
from slipstream.runtime.addresses import own_address
from slipstream.sync.changes import Changes, Update, columns_of, decode, encode, find_changes, merge, words
from slipstream.sync.checksum import checksum
from slipstream.sync.frames import FRAME, FrameServer, Refused, Request, Stream, Superseded, fetch
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

SILENCE_LIMIT_S = 60.0  # without a frame: the transfer of a version fails
COMPRESSION = 2e8  # bytes per second of the fastest network on which compression is tried
SLOW = 0.5  # of the median rate: below, a receiver passes nothing on
WHOLE, CHANGED = "whole", "changed"  # kinds of entries
Entry = tuple[str, str, int]  # name, kind and bytes of a parameter's part of a stream


class DeltaSender(Sender):
    """The trainer's end: the last version on its device, the latest changes, and a server of both."""

    trainer_free_after_send = independent_receivers = late_receivers = True

    def __init__(self, parameters: Parameters, config: Config, directory: Path, receivers: int) -> None:
        self._parameters, self._dtype = parameters, dtype_of(config)
        self._shapes = shapes_of(parameters)
        self._secret = secrets.token_bytes(32)
        self._lock = threading.Lock()  # of all that follows
        self._served: dict[str, Tensor] = {}  # words of the staged version
        self._sums: dict[str, int] = {}
        self._state = 0  # number of the staged weights; a version that is staged again unchanged keeps its number
        self._steps: dict[int, tuple[list[Entry], list[bytes]]] = {}  # by state: changes since the one before
        self._streams: dict[int | None, Stream] = {}  # to the current state, by the state that they start from
        self._tails: dict[int | None, Any] = {}  # address of the receiver to ask next, by the same
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
            entries, payloads, elements = list[Entry](), list[bytes](), 0
            for name, parameter in self._parameters.items():
                new = words(parameter.detach().to(self._dtype).contiguous())
                old = self._served.get(name)
                if old is None:
                    self._served[name] = new.clone()
                    self._sums[name] = self._checksum(name)
                    continue
                changes = find_changes(old, new)
                if changes is None or len(changes.indices):
                    elements += len(new) if changes is None else len(changes.indices)
                    entry, payload = self._replace(name, old, new, changes)
                    entries.append(entry)
                    payloads.append(payload)
            if entries or not self._state:
                self._advance(entries, payloads)
            size, total = sum(map(len, payloads)), sum(w.numel() for w in self._served.values())
            sums = {name: str(value) for name, value in self._sums.items()}  # beyond the integers of some encodings
            return {
                "version": version, "state": self._state, "bytes": size, "changed": elements / total, "sums": sums,
            }  # fmt: skip

    def close(self) -> None:
        self._server.close()

    def _replace(self, name: str, old: Tensor, new: Tensor, changes: Changes | None) -> tuple[Entry, bytes]:
        """Keep `new` as the served version of a parameter. Returns its entry and payload, the smaller of both kinds."""
        payload, size = None, new.element_size()
        if changes is not None:
            self._sums[name] = (self._sums[name] + changes.checksum(columns_of(self._shapes[name]))) % 2**64
            payload = encode(changes, size)
        old.copy_(new)
        if changes is None:
            self._sums[name] = self._checksum(name)
        if payload is None or len(payload) >= size * new.numel():
            payload = to_bytes(new)
            return (name, WHOLE, len(payload)), payload
        return (name, CHANGED, len(payload)), payload

    def _checksum(self, name: str) -> int:
        return checksum(self._served[name].view(self._dtype).view(*self._shapes[name]))

    def _advance(self, entries: list[Entry], payloads: list[bytes]) -> None:
        """Begin a new state. Old changes are kept while they are smaller than all weights."""
        self._state += 1
        self._steps[self._state] = entries, payloads
        self._streams, self._tails = {}, {}
        total, kept = sum(w.numel() * w.element_size() for w in self._served.values()), 0
        for state in sorted(self._steps, reverse=True):
            kept += sum(map(len, self._steps[state][1]))
            if kept > total:
                del self._steps[state]

    def _find(self, request: Request) -> tuple[Request, Stream | None]:
        """Answer a receiver: with a stream from the state that it has, or the receiver to ask. The next one is to ask
        this one, unless it is slow."""
        with self._lock:
            if request["state"] != self._state:
                raise Refused("a newer version is published")
            base: int | None = request["base"]
            if base is not None and not all(n in self._steps for n in range(base + 1, self._state + 1)):
                base = None
            if base not in self._streams:
                self._streams[base] = self._open_stream(base)
            if request["direct"]:
                return {}, self._streams[base]
            peer = self._tails.get(request["base"])
            if not self._is_slow(request):
                self._tails[request["base"]] = request["listens"]
            return ({"peer": peer}, None) if peer else ({}, self._streams[base])

    def _is_slow(self, request: Request) -> bool:
        """Whether a receiver's last transfer took much longer than the median one."""
        if not request["rate"]:
            return False
        self._rates[request["rank"]] = request["rate"]
        return bool(request["rate"] < SLOW * median(self._rates.values()))

    def _open_stream(self, base: int | None) -> Stream:
        """The stream of changes since `base`, or of all weights. Frames are added in a thread."""
        if base is None:
            payloads = [to_bytes(served) for served in self._served.values()]
            steps = [[(n, WHOLE, len(payload)) for n, payload in zip(self._served, payloads, strict=True)]]
        else:
            parts = [self._steps[n] for n in range(base + 1, self._state + 1)]
            steps, payloads = [entries for entries, _ in parts], [p for _, payloads in parts for p in payloads]
        stream = Stream({"base": base, "state": self._state, "steps": steps})
        rate = median(self._rates.values()) if self._rates else 0.0
        threading.Thread(target=_add_frames, args=(stream, payloads, rate), name="delta", daemon=True).start()
        return stream


class DeltaReceiver(Receiver):
    """The engine's end. `shards` are the served tensors, which it reads to derive the version that they hold."""

    rebindable = False

    def __init__(self, connection_info: ConnectionInfo, shapes: Shapes, rank: int, device: torch.device) -> None:
        self._server: tuple[str, int] = tuple(connection_info["address"])
        self._secret = bytes.fromhex(connection_info["secret"])
        self._dtype: torch.dtype = getattr(torch, connection_info["dtype"])
        self._rank, self._device, self._rate = rank, device, 0.0
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._shards: Mapping[str, ParameterShard] = {}
        self._held: int | None = None  # the state that the engine serves, and the checksums of its shards
        self._sums: dict[str, int] = {}
        self._next: tuple[int, dict[str, int], dict[str, Update | None]] | None = None  # prepared, maybe swapped in
        self._incoming: dict[str, Any] = {}  # the last request and its stream, which other receivers may read
        self._relay = FrameServer(own_address(), self._secret, self._find)

    def attach(self, shards: Mapping[str, ParameterShard]) -> None:
        """The tensors into which the engine copies versions."""
        for name, shard in shards.items():
            if not shard.tensor.is_contiguous() or shard.tensor.dtype != self._dtype:
                raise InvalidInput(f'the engine stores {name} in another layout or dtype: use sync.link = "checkpoint"')
        self._shards = shards

    @torch.no_grad()
    def prepare(self, handle: PublishHandle) -> dict[str, _OfShard]:
        """For each shard the whole of it, or an update of it, on the device. Raises `Superseded`."""
        with torch.cuda.stream(self._stream):
            self._settle()
            weights, sums = self._receive(handle)
            if self._held is not None and not self._is_published(handle, sums):
                self._held = None
                weights, sums = self._receive(handle)
            if not self._is_published(handle, sums):
                raise InvalidInput(f"the weights of version {handle['version']} differ from those that were published")
            updates = {name: new if isinstance(new, Update) else None for name, new in weights.items()}
            self._next = handle["state"], sums, updates
            if self._stream:
                self._stream.synchronize()
            return {name: _OfShard(new) for name, new in weights.items()}

    def _receive(self, handle: PublishHandle) -> tuple[dict[str, Tensor | Update], dict[str, int]]:
        """New weights of the shards and their checksums: the changes since the held state, or all weights."""
        stream, began = Stream(), time.monotonic()
        request = {
            "state": handle["state"], "base": self._held, "rank": self._rank, "rate": self._rate,
            "listens": self._relay.address,
        }  # fmt: skip
        self._incoming = {"request": request, "stream": stream}
        fetching = threading.Thread(target=self._fetch, args=(request, stream), name="delta", daemon=True)
        fetching.start()
        try:
            weights = self._read(stream.wait_header(), stream)
        except Refused as error:
            raise Superseded(f"version {handle['version']} did not arrive: {error}") from None
        fetching.join()
        self._rate = stream.size / max(time.monotonic() - began, 1e-6)
        return weights, {name: self._sum_with(name, new) for name, new in weights.items()}

    def close(self) -> None:
        self._relay.close()
        if self._incoming:
            self._incoming["stream"].end("the link is closed")

    def _fetch(self, request: Request, stream: Stream) -> None:
        try:
            fetch(self._server, self._secret, request, stream, SILENCE_LIMIT_S)
        except (Refused, TimeoutError) as error:
            stream.end(str(error))

    def _find(self, request: Request) -> tuple[Request, Stream | None]:
        """Answer another receiver, which wants the same stream."""
        own = self._incoming
        if not own or any(own["request"][key] != request[key] for key in ("state", "base")):
            raise Refused("another stream")
        return {}, own["stream"]

    def _settle(self) -> None:
        """Find out whether the engine serves the version prepared last, the one before it, or neither."""
        if self._next is None:
            return
        state, sums, updates = self._next
        self._next = None
        if all(self._serves(name, update, sums[name]) for name, update in updates.items()):
            self._held, self._sums = state, sums
        elif not all(update and update.is_undone(self._shards[name].tensor) for name, update in updates.items()):
            self._held = None

    def _serves(self, name: str, update: Update | None, wanted: int) -> bool:
        shard = self._shards[name]
        return bool(update.is_applied(shard.tensor)) if update else checksum(shard.tensor, shard.index) == wanted

    def _read(self, header: dict[str, Any], stream: Stream) -> dict[str, Tensor | Update]:
        """The shards' new weights, from the entries of one or more consecutive states."""
        whole: dict[str, Tensor] = {}
        chains: dict[str, list[Changes]] = {}
        data = _Reader(stream)
        for entries in header["steps"]:
            for name, kind, size in entries:
                shard, payload = self._shards[name], data.read(size)
                if kind == WHOLE:
                    tensor = torch.frombuffer(payload, dtype=self._dtype).view(*shard.shape)[shard.index]
                    whole[name], chains[name] = tensor.to(self._device), []
                else:
                    changes = decode(payload, self._dtype.itemsize, self._device)
                    chains.setdefault(name, []).append(changes.within(shard.shape, shard.index))
        weights: dict[str, Tensor | Update] = {}
        for name, shard in self._shards.items():
            chain = merge(chains[name]) if chains.get(name) else None
            if name in whole:
                if chain:
                    whole[name] = whole[name].clone()
                    Update.of(whole[name], chain).apply(whole[name])
                full = header["base"] is None
                weights[name] = whole[name] if full else Update.replacing(shard.tensor, whole[name])
            else:
                weights[name] = Update.of(shard.tensor, chain or Changes.none(self._device))
        return weights

    def _sum_with(self, name: str, new: Tensor | Update) -> int:
        """Checksum of a shard once `new` is swapped in."""
        shard = self._shards[name]
        if isinstance(new, Tensor):
            return checksum(new, shard.index)
        if new.changes is None:
            return checksum(new.new.view(self._dtype).view(shard.tensor.shape), shard.index)
        row, column = ((s.start or 0) for s in (*shard.index, slice(0), slice(0))[:2])
        return (self._sums[name] + new.changes.checksum(columns_of(shard.tensor.shape), (row, column))) % 2**64

    def _is_published(self, handle: PublishHandle, sums: Mapping[str, int]) -> bool:
        """Whether shards that are whole parameters will have the published checksums."""
        whole = [name for name, shard in self._shards.items() if shard.tensor.numel() == prod(shard.shape)]
        return all(sums[name] == int(handle["sums"][name]) for name in whole)


class Delta:
    Sender, Receiver = DeltaSender, DeltaReceiver


class _OfShard:
    """What a shard changes to. Any index returns it, as the index can be that of this shard alone."""

    def __init__(self, new: Tensor | Update) -> None:
        self._new = new

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor | Update:
        return self._new


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
                self._rest = memoryview(zlib.decompress(frame[1:]) if frame[0] else frame)[0 if frame[0] else 1 :]
            taken = min(size - len(found), len(self._rest))
            found += self._rest[:taken]
            self._rest = self._rest[taken:]
        return found


def _add_frames(stream: Stream, payloads: list[bytes], rate: float) -> None:
    """Cut payloads into frames, compressed if that is faster at `rate` bytes per second (0: unknown), and add them."""
    for chunk in _chunks(payloads):
        packed, began = chunk, time.perf_counter()
        if 0 < rate < COMPRESSION:
            packed = zlib.compress(chunk, 1)
        spent, spared = time.perf_counter() - began, (len(chunk) - len(packed)) / max(rate, 1)
        stream.add(b"\1" + packed if spent < spared else b"\0" + chunk)
    stream.end()


def _chunks(payloads: list[bytes]) -> Iterator[bytes]:
    """The concatenated payloads in pieces of `FRAME` bytes."""
    piece = bytearray()
    for payload in payloads:
        for at in range(0, len(payload), FRAME):
            piece += payload[at : at + FRAME]
            while len(piece) >= FRAME:
                yield bytes(piece[:FRAME])
                del piece[:FRAME]
    if piece:
        yield bytes(piece)


def to_bytes(tensor: Tensor) -> bytes:
    """The bytes of a contiguous tensor."""
    return tensor.cpu().numpy().tobytes()
