"""The `delta` link: the elements that changed since the version that an engine has, over TCP.

For engines that share no fast network with the trainer. The sender keeps the last version on its device, and compares
the bits of the next one with it block by block. Then the trainer is free: a thread (`coder`) codes the differences
(`changes`), while engines receive and stage those of the blocks before (`update`). Each receiver says which version its
engine serves, and gets the changes since then, or all weights if it has none or one too old. Receivers with the same
version form a chain: each passes frames on to the next while they come (`frames`), so the trainer sends one copy, and
the rest of one to each receiver whose predecessor fails.

A state is a numbered content of the trainer's weights: `stage` makes the next one.

Differences are right only on the version that they were made from. A receiver computes the checksums that its shards
will have, and compares them with the trainer's before the engine swaps. The swap reads the written words back.
"""

from __future__ import annotations

import secrets
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from statistics import median_high
from typing import Any

import torch
from torch import Tensor

from slipstream.config.schema import Config
from slipstream.errors import InvalidInput
from slipstream.model.device import dtype_of
from slipstream.runtime.addresses import address_towards, own_address
from slipstream.sync.blocks import Block, divide, gather
from slipstream.sync.changes import Changes, copy_changes, join_entries
from slipstream.sync.checksum import checksum
from slipstream.sync.coder import Coder
from slipstream.sync.delta_sources import ChangeSource, WeightsSource
from slipstream.sync.frames import (
    COMPRESSION,
    SILENCE_LIMIT_S,
    FrameServer,
    Refused,
    Request,
    Source,
    Stream,
    Superseded,
    fetch,
    unpack,
)
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
from slipstream.sync.update import Part, Tensors, Update

BLOCK = {"cpu": 2**20, "cuda": 2**27}  # words that are coded together
SLOW = 0.25  # of the median rate, or of `COMPRESSION`: no receiver waits for one below
MIN_MEASURED = 2**20  # bytes of a stream that measures the rate of a network
MIN_MEASURED_S = 1.0  # time of a smaller stream that measures it
MIN_MEASURED_SLOW = 2**15  # bytes of such a stream
BOTTLENECK = 0.5  # of the rate of the receiver before: below it a receiver's own network is the slowest of the chain
WINDOW = 2**26  # bytes of a version that a receiver holds for others


class DeltaSender(Sender):
    """The trainer's end: the last version on its device, the latest changes, and a server of both."""

    trainer_free_after_send = independent_receivers = True

    def __init__(self, parameters: Parameters, config: Config, directory: Path, receivers: int) -> None:
        self._parameters, self._dtype = parameters, dtype_of(config)
        self._shapes, self._device = shapes_of(parameters), next(iter(parameters.values())).device
        self._size = BLOCK[self._device.type]
        self._blocks = divide(self._shapes, self._size)
        self._total = sum(block.length for block in self._blocks)
        self._secret = secrets.token_bytes(32)
        self._served: list[Tensor] = []  # words of each block of the sent version
        self._sums: dict[str, int] = {}
        self._copying = threading.Lock()  # of the served words, and of what undoes their changes
        self._written: Any = None  # the event after served words were last written, on a GPU
        if self._device.type == "cuda":
            self._written = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._snapshots: weakref.WeakSet[WeightsSource] = weakref.WeakSet()
        self._lock = threading.Lock()  # of all that follows
        self._state = self._first = 0  # numbers of the staged weights, and of those before which no changes are known
        self._steps: dict[int, Stream] = {}  # by state: changes since the one before
        self._sources: dict[tuple[int, int | None], ChangeSource] = {}  # by the states that they lead to and start from
        self._tails: dict[int | None, Request] = {}  # the receiver to ask next, by the state that it has
        self._asked: set[tuple[int, int | None]] = set()  # rank and state of the receivers that have asked
        self._latest: dict[int, Request] = {}  # of each receiver, by rank: the last request
        self._coder: Coder | None = None  # of the last version
        self._server = FrameServer(own_address(), self._secret, self._find, 1e6 * config.sync.max_mb_per_s)

    @classmethod
    def late_receivers(cls, config: Config) -> bool:
        return True

    def connection_info(self) -> ConnectionInfo:
        dtype = str(self._dtype).removeprefix("torch.")
        return {
            "address": self._server.address, "secret": self._secret.hex(), "dtype": dtype, "shapes": self._shapes,
            "block": self._size,
        }  # fmt: skip

    def stage(self, version: int) -> PublishHandle:
        """Number the version. Receivers may ask for it, and wait for `send`."""
        if self._coder:
            self._coder.join()
        with self._lock:
            if self._state in self._steps and not self._steps[self._state].ended:  # the last publish failed early
                self._forget("the version was not sent")
            self._state += 1
            self._first = self._first if self._served else self._state
            self._steps[self._state], self._tails, self._asked = Stream(), {}, set()
            recently = time.monotonic() - SILENCE_LIMIT_S
            self._sources = {k: s for k, s in self._sources.items() if s.used > recently and not s.done}
            return {"version": version, "state": self._state}

    @torch.no_grad()
    def send(self, handle: PublishHandle) -> PublishHandle:
        """Compare the weights with the last version, and keep a copy. A thread codes and sends the changes.

        Returns the bytes of the changes, the changed share of all elements, and the checksums by parameter.
        """
        state = handle["state"]
        coder = Coder(self._steps[state], self._device, lambda *end: self._coded(state, *end))
        self._coder = coder
        try:
            self._compare(state, coder)
            for name, rise in coder.measure().items():
                self._sums[name] = (self._sums[name] + rise) % 2**64
        except BaseException as error:
            with self._lock:
                self._forget(str(error) or type(error).__name__)
            raise
        sums = {name: str(value) for name, value in self._sums.items()}  # too large for msgpack
        with self._lock:
            rate = self._median_rate()
        coder.start(sums, rate)
        return {"bytes": coder.size, "changed": coder.changed / self._total, "sums": sums}

    def close(self) -> None:
        if self._coder:
            self._coder.join()
        self._server.close()

    def _coded(self, state: int, trailer: dict[str, Any], failure: str) -> None:
        """End the stream of a version. If its changes could not be coded, engines get all its weights.

        Drops changes of earlier versions that together would exceed the size of all weights.
        """
        with self._lock:
            step, kept = self._steps[state], 0
            if failure:
                self._steps[state].end(f"the changes could not be coded: {failure}")
                step = Stream()
                self._steps, self._sources, self._first = {state: step}, {}, state
            step.end(trailer=trailer)
            for other in sorted(self._steps, reverse=True):  # while they are smaller than all weights
                kept += self._steps[other].size
                if kept > self._total * self._dtype.itemsize and other < state:
                    del self._steps[other]

    def _forget(self, why: str) -> None:
        """Send all weights next time: the copy may be a mixture of two versions."""
        for step in self._steps.values():
            step.end(why)
        self._served.clear()  # for snapshots, too
        self._served, self._sums, self._steps = [], {}, {}

    def _compare(self, state: int, coder: Coder) -> None:
        """Find the changes since the last version, and keep a copy of the new words."""
        first = not self._served
        for number, new in enumerate(gather(self._blocks, self._parameters, self._dtype, copy=first)):
            block = self._blocks[number]
            if first:
                self._served.append(new)
                self._sum(block, new)
                coder.changed += block.length
                continue
            found = self._keep(state, number, new)
            if found is None or len(found.indices):
                coder.add(number, block, self._served[number], found)

    def _keep(self, state: int, number: int, new: Tensor) -> Changes | None:
        """Copy a block's new words over the old ones. Returns the changes, or None if the block is to be sent whole.

        Records in snapshots of earlier states how to undo the changes, since they share the words.
        """
        old = self._served[number]
        with self._copying:
            found = copy_changes(old, new)
            if found is None:
                self._sum(self._blocks[number], old, -1)
                self._sum(self._blocks[number], new)
            for snapshot in self._snapshots:
                if snapshot.state < state:
                    snapshot.undo[number].append(old.clone() if found is None else found.on_host())
            if found is None:
                old.copy_(new)
            if self._written:
                self._written.record()
        return found

    def _sum(self, block: Block, words: Tensor, sign: int = 1) -> None:
        """Add what these words contribute to the checksums of their parameters, or subtract it."""
        for segment in block.segments:
            by = sign * checksum(segment.of(words), (slice(segment.row, None),))
            self._sums[segment.name] = (self._sums.get(segment.name, 0) + by) % 2**64

    def _find(self, request: Request) -> tuple[Request, Source | None]:
        """Answer a receiver: with a stream from the state that it has, or with the receiver before it in its chain.

        A receiver whose network is slow gets no successor in the chain.
        """
        with self._lock:
            state, base = request["state"], request["base"]
            known = base is not None and base >= self._first
            if not known or any(n not in self._steps for n in range(base + 1, state + 1)):
                base = None
            if (state, base) not in self._sources:
                if state != self._state or state not in self._steps:
                    raise Refused("a newer version is published")
                self._sources[state, base] = self._open(state, base)
            asks, rate = (request["rank"], request["base"]), self._median_rate()
            here = {"rate": rate}, self._sources[state, base]
            if request["direct"] or asks in self._asked or state != self._state:  # a peer may wait for this receiver
                return here
            # A network may be slower for all.
            asked_rates = [r for rank, _ in self._asked if (r := self._latest[rank]["rate"])]
            self._asked.add(asks)
            self._latest[request["rank"]] = request
            peer = self._predecessor(request)
            if request["rate"] >= SLOW * min(COMPRESSION, rate, median_high(asked_rates or [rate])):
                self._tails[request["base"]] = request
            return ({"peer": peer["listens"]}, None) if peer else here

    def _predecessor(self, request: Request) -> Request | None:
        """The receiver before this one in its chain, or None.

        A successor receives no faster than the receiver before it, so its own network stays unknown. While only one
        network is measured, the second receiver gets the version from the trainer: the first one may be slow, and all
        others would wait for it. A receiver that is known to be much faster than the one before does not follow it.
        """
        peer = self._tails.get(request["base"])
        if request["measured"]:
            alone = peer and 0.0 < peer["rate"] < SLOW * min(COMPRESSION, request["rate"])
        else:
            measured = sum(known["measured"] for known in self._latest.values())
            alone = request["rate"] and measured == 1 and len(self._asked) == 2
        return None if alone else peer

    def _median_rate(self) -> float:
        """Of the receivers' networks, in bytes per second; 0.0: unknown."""
        known = [request for request in self._latest.values() if request["rate"]]
        measured = [request for request in known if request["measured"]]
        rates: list[float] = [request["rate"] for request in measured or known]
        return median_high(rates or [0.0])

    def _open(self, state: int, base: int | None) -> ChangeSource:
        """The changes since `base`, or all weights."""
        if base is not None:
            return ChangeSource(state, base, [self._steps[n] for n in range(base + 1, state + 1)])
        snapshot = WeightsSource(state, self._steps[state], self._served, self._blocks, self._copying, self._written)
        with self._copying:
            self._snapshots.add(snapshot)
        return snapshot


class DeltaReceiver(Receiver):
    """The engine's end. It tracks the state that the engine serves, and passes received frames on."""

    updates = True

    def __init__(self, connection_info: ConnectionInfo, shapes: Shapes, rank: int, device: torch.device) -> None:
        self._server: tuple[str, int] = tuple(connection_info["address"])
        self._secret = bytes.fromhex(connection_info["secret"])
        self._dtype: torch.dtype = getattr(torch, connection_info["dtype"])
        self._shapes: Shapes = connection_info["shapes"]
        self._blocks = divide(self._shapes, connection_info["block"])
        self._rank, self._device, self._rate = rank, device, NetworkRate()
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._held: int | None = None  # the state that the engine serves, and the checksums of its shards
        self._sums: dict[str, int] = {}
        self._next: tuple[int, dict[str, int]] = 0, {}  # the same of the version that is prepared
        self._incoming: tuple[Request, Stream] | None = None  # the last stream, which another receiver may read
        self._relay = FrameServer(address_towards(self._server[0]), self._secret, self._find)

    def attach(self, shards: Mapping[str, ParameterShard]) -> None:
        """Set the tensors into which the engine copies versions. Raises `InvalidInput` if they can't be updated."""
        for name, shard in shards.items():
            if not shard.tensor.is_contiguous() or shard.tensor.dtype != self._dtype:
                raise InvalidInput(f'the engine stores {name} in another layout or dtype: use sync.link = "checkpoint"')
        whole = {name: shards.get(name) or self._absent(shape) for name, shape in self._shapes.items()}
        self._tensors = Tensors({name: Part(shard) for name, shard in whole.items()}, self._blocks)

    def _absent(self, shape: list[int]) -> ParameterShard:
        """A shard without rows, of a parameter that other pipeline stages of the engine hold."""
        tensor = torch.empty(0, *shape[1:], dtype=self._dtype, device=self._device)
        return ParameterShard(tensor, tuple(shape), (slice(0, 0),))

    @torch.no_grad()
    def prepare(self, handle: PublishHandle) -> Update:
        """Receive a version, staged on the device. If checksums differ, receive all weights instead.

        Raises `Superseded`, and `InvalidInput` if the checksums of all weights differ, too.
        """
        with torch.cuda.stream(self._stream):
            update, sums, published = self._receive(handle)
            if self._held is not None and not self._agree(sums, published):
                self._held = None
                update, sums, published = self._receive(handle)
            if not self._agree(sums, published):
                raise InvalidInput(f"the weights of version {handle['version']} differ from those that were published")
            if self._stream:
                self._stream.synchronize()
            self._next = handle["state"], sums
            return update

    def swapped(self) -> None:
        """Record that the engine now serves the version that was prepared last."""
        self._held, self._sums = self._next

    def close(self) -> None:
        self._relay.close()
        if self._incoming:
            self._incoming[1].end("the link is closed")

    def _receive(self, handle: PublishHandle) -> tuple[Update, dict[str, int], dict[str, str]]:
        """An update, checksums of the engine's shards with the update, and checksums that the trainer published."""
        stream = Stream(window=WINDOW)
        request = {"state": handle["state"], "base": self._held, "rank": self._rank, "rate": self._rate.estimate,
                   "measured": self._rate.measured, "listens": self._relay.address}  # fmt: skip
        self._incoming = request, stream
        threading.Thread(target=self._fetch, args=(request, stream), name="delta", daemon=True).start()
        try:
            base = stream.wait_header()["base"]
            update = Update(self._tensors, base is None, 1 if base is None else handle["state"] - base)
            for whole in join_entries(map(unpack, stream.take())):
                update.add(update.decode(whole))
        except Refused as error:
            raise Superseded(f"version {handle['version']} did not arrive: {error}") from None
        except (MemoryError, torch.OutOfMemoryError) as error:  # there may be room for it later
            stream.end("the receiver is out of memory")
            raise Superseded(f"no memory for version {handle['version']}: {error}") from None
        except BaseException:
            stream.end("the receiver failed")
            raise
        if stream.rated >= min(MIN_MEASURED, max(MIN_MEASURED_SLOW, stream.rate * MIN_MEASURED_S)):
            self._rate.add(stream.rate, stream.upstream_rate)
        return update, update.checksums(self._sums), stream.trailer

    def _fetch(self, request: Request, stream: Stream) -> None:
        try:
            fetch(self._server, self._secret, request, stream, SILENCE_LIMIT_S)
        except Exception as error:  # `_receive` waits for the stream
            stream.end(str(error) or type(error).__name__)

    def _find(self, request: Request) -> tuple[Request, Stream]:
        """Answer another receiver, which wants the same stream."""
        if self._incoming is None or any(self._incoming[0][key] != request[key] for key in ("state", "base")):
            raise Refused("another stream")
        return {}, self._incoming[1]

    def _agree(self, sums: Mapping[str, int], published: Mapping[str, str]) -> bool:
        """Whether shards that are whole parameters will have the published checksums."""
        return all(sums[name] == int(published[name]) for name, part in self._tensors.parts.items() if part.whole)


class NetworkRate:
    """Estimates a receiver's network from the rates of its last two transfers: `estimate` in bytes per second.

    `measured`: one of all transfers was as fast as this network allows, not as the receiver before sent it.
    """

    def __init__(self) -> None:
        self.estimate = self._last = 0.0  # 0.0: unknown
        self.measured = False

    def add(self, rate: float, upstream: float) -> None:
        """Add the rate of a transfer, in bytes per second.

        `upstream` is the rate at which the frames reached the receiver before this one; 0.0 if the trainer sent them.
        """
        kept_up = rate >= BOTTLENECK * upstream > 0  # this network is at least as fast, maybe as fast as before
        self.estimate, self._last = max(rate, self._last if kept_up else 0.0), rate
        self.measured |= not kept_up


class Delta:
    Sender, Receiver = DeltaSender, DeltaReceiver
