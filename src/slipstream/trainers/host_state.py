"""Optimizer state in host memory: copied to the device and back in pieces, while the device updates other pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

State = dict[str, Tensor]
IN_FLIGHT = 3  # pieces on the device: one arrives, one is updated, one leaves


def streamed(states: Sequence[State], device: torch.device) -> Iterator[State]:
    """Yield a copy of each of `states` on `device`. Copies back what the caller wrote into it.

    For a GPU the host's memory must be pinned. Copies in each direction run in their own stream. At most `IN_FLIGHT`
    states are on the GPU: the host waits until the oldest was copied back. At the end it waits for all copies.
    """
    if device.type != "cuda":
        yield from _copied(states)
        return
    main, (arrivals, departures) = torch.cuda.current_stream(device), _copy_streams(device)
    arrivals.wait_stream(main)
    queued: deque[tuple[State, torch.cuda.Event]] = deque()  # on the device, with the event of arrival
    leaving: deque[tuple[State, torch.cuda.Event]] = deque()  # with the event of departure, which frees the memory
    waiting = iter(states)
    for state in states:
        while len(queued) < 2 and (following := next(waiting, None)) is not None:
            if len(queued) + len(leaving) >= IN_FLIGHT:
                leaving.popleft()[1].synchronize()
            queued.append(_arrive(following, device, arrivals))
        here, arrived = queued.popleft()
        main.wait_event(arrived)
        yield here
        departures.wait_stream(main)
        with torch.cuda.stream(departures):
            for name, tensor in here.items():
                state[name].copy_(tensor, non_blocking=True)
        leaving.append((here, departures.record_event()))
    departures.synchronize()  # the host may read the state next


@cache
def _copy_streams(device: torch.device) -> tuple[Any, Any]:
    """The streams to and from `device`. Memory that torch caches for a stream is used again by this stream alone."""
    new_stream: Any = torch.cuda.Stream
    return new_stream(device), new_stream(device)


def _arrive(state: State, device: torch.device, stream: torch.cuda.Stream) -> tuple[State, torch.cuda.Event]:
    # Memory comes from this stream's pool, which is used again only after the event of departure.
    with torch.cuda.stream(stream):
        here = {name: tensor.to(device, non_blocking=True) for name, tensor in state.items()}
    return here, stream.record_event()


def _copied(states: Sequence[State]) -> Iterator[State]:
    for state in states:
        here = {name: tensor.clone() for name, tensor in state.items()}
        yield here
        for name, tensor in here.items():
            state[name].copy_(tensor)
