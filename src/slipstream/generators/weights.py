"""The weights that an engine serves, and how a new version gets into their place.

An engine may hold only a part of a parameter (a tensor-parallel shard), or hold several in one tensor (query, key and
value). A `Place` says which part of which parameter a tensor of the engine is, so that every link can write into every
engine.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.sync.checksum import checksum
from slipstream.sync.link import Ticket, find_link


@dataclass(frozen=True)
class Place:
    """`tensor` holds `[index]` of a parameter of shape `shape`; `counted` unless another rank holds the same part."""

    tensor: Tensor
    shape: tuple[int, ...]
    index: tuple[slice, ...] = ()
    counted: bool = True


class DeviceClock:
    """How long a device is at something, without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        event: Any = torch.cuda.Event
        self._events: Any = [event(enable_timing=True) for _ in range(2)] if on_gpu else None
        self._times = [0.0, 0.0]

    def start(self) -> None:
        self._mark(0)

    def stop(self) -> None:
        self._mark(1)

    def done(self) -> bool:
        return self._events is None or self._events[1].query()

    def seconds(self) -> float:
        """Between the last start and stop, or the processor's own time where that is longer."""
        at_device = 0.0
        if self._events and self._times[1]:
            self._events[1].synchronize()
            at_device = self._events[0].elapsed_time(self._events[1]) / 1000
        return max(at_device, self._times[1] - self._times[0])

    def _mark(self, which: int) -> None:
        self._times[which] = time.perf_counter()
        if self._events:
            self._events[which].record(torch.cuda.current_stream())


class Beside:
    """A thread beside an engine that does one job after the other, until it is closed.

    Unlike an executor's, it keeps no process from its end while it waits for a trainer that is gone.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def do(self, job: Callable[[], Any]) -> Future[Any]:
        """Have a job done. Its result, or failure, is in the future."""
        future: Future[Any] = Future()
        self._jobs.put((job, future))
        return future

    def close(self) -> None:
        self._jobs.put(None)

    def _work(self) -> None:
        while asked := self._jobs.get():
            job, future = asked
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)
            del asked, job, future  # a version must not outlive its place here until the next one comes


class ServedWeights:
    """A generator's end of a link, and the places that it fills. `rebind` allows to swap memory instead of copying.

    What a link brings to the host of a GPU is staged there beside the running engine; `staged` false says that nothing
    runs meanwhile, and that there is no memory to spare.
    """

    def __init__(
        self, link: str, offer: Ticket, places: Mapping[str, Place], rank: int, rebind: bool, staged: bool = True
    ) -> None:
        self._places, self._staged = places, staged
        self._device = next(iter(places.values())).tensor.device
        shapes = {name: list(place.shape) for name, place in places.items()}
        _, receiver = find_link(link)
        self._receiver = receiver(offer, shapes, rank, self._device)
        self._stream = side_stream(self._device)
        self._rebind = rebind and self._receiver.lasting
        self._next: Future[list[tuple[Tensor, Tensor]]] | None = None
        self._sums: Future[dict[str, int]] | None = None
        self._clock = DeviceClock(self._device)
        self._beside = Beside("weights")

    def prepare(self, ticket: Ticket) -> None:
        """Begin to bring a version beside the running engine."""
        self._next = self._beside.do(lambda: self._prepare(ticket))

    def _prepare(self, ticket: Ticket) -> list[tuple[Tensor, Tensor]]:
        """Each tensor that is served, and what is to be in its place."""
        self._clock.seconds()  # the copy of the last version may still be reading where this one goes
        weights = self._receiver.prepare(ticket)
        new = [weights[name][place.index] for name, place in self._places.items()]
        served = [place.tensor for place in self._places.values()]
        if self._stream and self._staged:  # where they are on this device already, nothing is copied
            with torch.cuda.stream(self._stream):
                new = [tensor.to(self._device) for tensor in new]
            self._stream.synchronize()
        return list(zip(served, new, strict=True))

    def prepared(self) -> bool:
        """Whether it is all here. Raises what went wrong."""
        assert self._next is not None
        return self._next.done() and self._next.result() is not None

    @torch.no_grad()
    def apply(self) -> None:
        """Put it in place. Called between two forward passes; on a GPU in their stream, so nothing waits for it."""
        assert self._next is not None
        self._clock.start()
        copies = []
        for target, new in self._next.result():
            if self._rebind and new.dtype == target.dtype and new.device == target.device:
                target.data = new
            else:
                copies.append((target, new))
        if copies:
            torch._foreach_copy_([target for target, _ in copies], [new for _, new in copies])
        self._clock.stop()
        self._next = None

    def applied(self) -> bool:
        """Whether the last version is in place for the device, too."""
        return self._clock.done()

    def held(self) -> float:
        """Seconds that it took; waits until it is."""
        return self._clock.seconds()

    def check(self, names: Sequence[str]) -> None:
        """Begin to add up the part of each parameter that is served here; parts add up to the whole's checksum."""
        self._sums = self._beside.do(lambda: self._checksums(names))

    def checked(self) -> dict[str, int] | None:
        """The checksums, once they are there."""
        assert self._sums is not None
        return self._sums.result() if self._sums.done() else None

    def _checksums(self, names: Sequence[str]) -> dict[str, int]:
        places = {name: self._places[name] for name in names}
        # A stream of its own: what is asked for in that of the passes would have to wait for them, and they for it.
        with torch.cuda.stream(self._stream):
            return {n: checksum(p.tensor, p.index) if p.counted else 0 for n, p in places.items()}

    def close(self) -> None:
        self._beside.close()
        self._receiver.close()


def side_stream(device: torch.device) -> Any:
    """A stream beside that of the passes; None where there are none."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def local_places(parameters: Mapping[str, Tensor]) -> dict[str, Place]:
    """Every parameter in a place of its own, as in a Hugging Face model of this process."""
    return {name: Place(p, tuple(p.shape)) for name, p in parameters.items()}
