"""The weights that an engine serves, and the engine's end of a weight link.

An engine may hold a part of a parameter (a tensor-parallel shard), or several parameters in one tensor (query, key and
value). A `ParameterShard` names the part of a parameter that a tensor holds, so that links can update any engine.

`ServedWeights` is called in this order for a version: `prepare`; `prepared` until it is true; `apply`, between two
forward passes; `applied` until it is true. In vLLM workers, `BlockingWeights` takes its place for `nccl_direct`, and
`AdapterLoader` for adapters.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from slipstream.sync.link import (
    ConnectionInfo,
    OwnPart,
    ParameterShard,
    PublishHandle,
    call_link,
    copy_all,
    find_link,
    validate_same_shapes,
)
from slipstream.sync.update import Update


class DeviceTimer:
    """Measures the time of work on a device, between `mark(0)` and `mark(1)`, without blocking."""

    def __init__(self, device: torch.device) -> None:
        event: Any = torch.cuda.Event
        self._events: Any = [event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else None
        self._times = [0.0, 0.0]

    def mark(self, which: int) -> None:
        self._times[which] = time.perf_counter()
        if self._events:
            self._events[which].record(torch.cuda.current_stream())

    def done(self) -> bool:
        """Whether the device has reached `mark(1)`."""
        return self._events is None or self._events[1].query()

    def seconds(self) -> float:
        """Seconds between the last two marks, the larger of device and host time. Blocks until the device is there."""
        on_device = 0.0
        if self._events and self._times[1]:
            self._events[1].synchronize()
            on_device = self._events[0].elapsed_time(self._events[1]) / 1000
        return max(on_device, self._times[1] - self._times[0])


class BackgroundWorker:
    """A daemon thread that runs jobs in order, until it is closed.

    An executor's thread would keep the process alive while it waits for a trainer that has died.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, job: Callable[[], Any]) -> Future[Any]:
        """Queue a job. The future has its result or error."""
        future: Future[Any] = Future()
        self._jobs.put((job, future))
        return future

    def close(self) -> None:
        self._jobs.put(None)

    def _run(self) -> None:
        while item := self._jobs.get():
            job, future = item
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)
            del item, job, future  # they reference a version, which would stay in memory until the next job


class ServedWeights:
    """An engine's end of a link, and the shards that it updates.

    `rebind` allows to swap memory instead of copying. `staged` copies versions from the host to the GPU while the
    engine runs; without it (the engine sleeps, and has no memory to spare) they are copied at the swap. With
    `stage_only` the shards are those of a pipeline stage, and other stages hold the other parameters. If the link
    updates tensors and the engine serves quantized ones, this object holds a copy of the trainer's values. Raises
    `InvalidInput` if parameter names or shapes differ from the trainer's.
    """

    def __init__(
        self, link: str, connection_info: ConnectionInfo, shards: Mapping[str, ParameterShard], rank: int, rebind: bool,
        staged: bool = True, stage_only: bool = False,
    ) -> None:  # fmt: skip
        self._shards, self._staged = shards, staged
        self._device = next(iter(shards.values())).tensor.device
        shapes = {name: list(shard.shape) for name, shard in shards.items()}
        wanted = connection_info["shapes"]
        validate_same_shapes(shapes, {name: wanted[name] for name in shapes} if stage_only else wanted)
        self._receiver = call_link(link, find_link(link)[1], connection_info, wanted, rank, self._device)
        self._quantized = any(shard.needs_received for shard in shards.values())
        self._copies: dict[str, ParameterShard] = {}
        if self._quantized and self._receiver.updates:
            dtype = getattr(torch, connection_info["dtype"])
            self._copies = {name: _empty_copy(shard, dtype) for name, shard in shards.items()}
        self._receiver.attach(self._copies or shards)
        self._stream = side_stream(self._device)
        self._rebind = rebind and self._receiver.rebindable
        self._next: Future[list[tuple[Tensor, Tensor]] | Update] | None = None
        self._applied: Update | None = None  # an update that is not confirmed yet
        self._received: Mapping[str, Any] = {}  # the version's values, if shards need them for their checksums
        self._sums: Future[dict[str, int]] | None = None
        self._timer = DeviceTimer(self._device)
        self._background = BackgroundWorker("weights")

    def prepare(self, handle: PublishHandle) -> None:
        """Start to receive and stage a version while the engine runs."""
        self._next = self._background.submit(lambda: self._stage(handle))

    def _stage(self, handle: PublishHandle) -> list[tuple[Tensor, Tensor]] | Update:
        self._timer.seconds()  # the last swap's copy may still read the memory that this version goes to
        weights = self._receiver.prepare(handle)
        if self._receiver.writes_served:
            return []
        if isinstance(weights, Update):
            if not self._copies:
                return weights
            weights = self._apply_to_copies(weights)
        pairs: list[tuple[Tensor, Tensor]] = []
        with torch.no_grad(), torch.cuda.stream(self._stream):
            for name, shard in self._shards.items():
                new = weights[name][shard.index]
                pairs += shard.encode(new.to(self._device) if self._staged else new)
        if self._stream:
            self._stream.synchronize()
        if self._quantized:
            self._received = weights
        return pairs

    @torch.no_grad()
    def _apply_to_copies(self, update: Update) -> Mapping[str, Any]:
        """Apply an update to the copies of the trainer's values. Returns them."""
        with torch.cuda.stream(self._stream):
            update.apply()
            update.confirm()
        self._receiver.swapped()
        return {name: OwnPart(shard.tensor) for name, shard in self._copies.items()}

    def prepared(self) -> bool:
        """Whether the whole version is staged. Raises the error of a failed transfer."""
        assert self._next is not None
        return self._next.done() and self._next.result() is not None

    @torch.no_grad()
    def apply(self) -> None:
        """Swap to the staged version. Call it between two forward passes; on a GPU it runs in their stream.

        Raises `RolledBack` if an update fails on a CPU; then the version before it is served. On a GPU `applied` and
        `pause_s` raise it, since only they wait for the device.
        """
        assert self._next is not None
        self._timer.mark(0)
        new = self._next.result()
        self._next = None
        if isinstance(new, Update):
            new.apply()
            self._applied = new
        else:
            self._copy(new)
            self._receiver.swapped()
        self._timer.mark(1)
        if self._device.type == "cpu":
            self._confirm()

    def _confirm(self) -> None:
        """Raise `RolledBack` if the last update failed. Blocks until the device has finished it."""
        update, self._applied = self._applied, None
        if update:
            with torch.cuda.stream(self._stream):  # in that of the passes it would wait for them
                update.confirm()
            self._receiver.swapped()

    def _copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy new tensors into the served ones, or rebind these where possible."""
        copies = list[tuple[Tensor, Tensor]]()
        for target, new in pairs:
            if self._rebind and new.dtype == target.dtype and new.device == target.device:
                target.data = new
            else:
                copies.append((target, new))
        copy_all(copies)

    def applied(self) -> bool:
        """Whether the device has finished the last swap. Raises `RolledBack` if it failed."""
        if done := self._timer.done():
            self._confirm()
        return done

    def pause_s(self) -> float:
        """Seconds of the last swap. Blocks until it has finished. Raises `RolledBack` if it failed."""
        seconds = self._timer.seconds()
        self._confirm()
        return seconds

    def start_checksums(self, names: Sequence[str]) -> None:
        """Start to compute checksums of these parameters' shards in this engine.

        The sum over the ranks of one pipeline stage is the parameter's checksum.
        """
        self._sums = self._background.submit(lambda: self._compute_checksums(names))

    def checksums(self) -> dict[str, int] | None:
        """The checksums; None until they are computed."""
        assert self._sums is not None
        return self._sums.result() if self._sums.done() else None

    def _compute_checksums(self, names: Sequence[str]) -> dict[str, int]:
        # In a side stream: in that of the passes, the checksums and the passes would delay each other.
        with torch.no_grad(), torch.cuda.stream(self._stream):
            return {n: self._compute_checksum(n, self._shards[n]) for n in names if n in self._shards}

    def _compute_checksum(self, name: str, shard: ParameterShard) -> int:
        if not shard.counted:
            return 0
        if deferred := self._receiver.deferred_checksums.get(name):
            return deferred()
        return shard.checksum(lambda: self._received[name][shard.index].to(self._device))

    def close(self) -> None:
        self._background.close()
        self._receiver.close()


def _empty_copy(shard: ParameterShard, dtype: torch.dtype) -> ParameterShard:
    values = torch.empty(shard.tensor.shape, dtype=dtype, device=shard.tensor.device)
    return ParameterShard(values, shard.shape, shard.index, shard.counted)


def side_stream(device: torch.device) -> Any:
    """A CUDA stream that runs concurrently with forward passes; None on a CPU."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def local_shards(parameters: Mapping[str, Tensor]) -> dict[str, ParameterShard]:
    """Shards that hold whole parameters, as in a Hugging Face model of this process."""
    return {name: ParameterShard(p, tuple(p.shape)) for name, p in parameters.items()}
