"""Weight links: how a version of the weights gets from the trainer's process into the generators'.

A link has two ends, both in one file because they must agree to the byte: a `Sender` beside the trainer and a
`Receiver` beside each generator. Only small tickets pass through the controller, never weights. One publish is

    ticket = sender.stage(version)             # trainer: the version is fixed, and nobody reads it yet
    sender.send(ticket)                        # trainer, while
    weights = receiver.prepare(ticket)         # each generator, beside the running engine: all of the version is here
    engine.swap(version, place weights)        # each generator, between two forward passes
    sender.release(ticket)                     # trainer: every generator has swapped

and a publish that fails anywhere before the swap leaves the old version serving.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from slipstream.config import Config, ConfigError
from slipstream.things import load_option

Ticket = dict[str, Any]
Parameters = Mapping[str, Tensor]  # whole, by name; of a trainer of several ranks each is gathered when it is read
LINKS = {
    "shared": "slipstream.sync.shared:Shared",
    "checkpoint": "slipstream.sync.checkpoint:Checkpoint",
    "lora": "slipstream.sync.adapters:Adapters",
    "single_copy": "slipstream.sync.single_copy:SingleCopy",
    "nccl": "slipstream.sync.nccl:Nccl",
    "nccl_direct": "slipstream.sync.nccl_direct:Native",
}


class Sender(Protocol):
    """The trainer's end. `receivers` is the number of generators' processes that hold weights.

    A link inherits what it has nothing to do in. It is `collective` if receivers depend on each other: what one of them
    does not take part in fails for all. If weights travel `at_swap`, into what is served, none of them is staged. It
    `lets_go` if the trainer may take its next step once all is sent, before generators have swapped. Of a
    trainer of several ranks rank 0 has the sender, unless it is `everywhere`: then each has one, with its own part of
    the parameters, and receivers find all their offers as `parts` of the first.
    """

    collective: bool = False
    at_swap: bool = False
    lets_go: bool = False
    everywhere: bool = False

    def __init__(self, parameters: Parameters, config: Config, directory: Path, receivers: int) -> None: ...

    def offer(self) -> Ticket:
        """What a receiver needs to connect, as plain data."""
        ...

    def connecting(self) -> None:
        """Called now and then while receivers of a `collective` link connect. Raises what keeps this end from it: they
        may wait for it far longer than anybody should for the reason."""

    def before_update(self) -> None:
        """Called before parameters change in place."""
        ...

    def stage(self, version: int) -> Ticket: ...

    def send(self, ticket: Ticket) -> None: ...

    def release(self, ticket: Ticket) -> None: ...

    def close(self) -> None: ...


class Receiver(Protocol):
    """A generator's end."""

    lasting: bool  # whether what `prepare` returns may be computed on until the next version is released

    def __init__(self, offer: Ticket, shapes: dict[str, list[int]], rank: int, device: torch.device) -> None: ...

    def prepare(self, ticket: Ticket) -> Mapping[str, Any]:
        """All weights of the version, by the trainer's names: tensors, or what gives one for an index. Called in a
        thread while the engine decodes."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class PublishStats:
    """One publish in seconds: the longest that a generator was held between two passes, sending, the time until every
    generator drew by it, and all of it with the comparison of checksums.

    `lost` says of each generator that has left the pool since the last one, why.
    """

    version: int
    hold: float
    sending: float
    ready: float
    total: float
    lost: tuple[str, ...] = ()


def find_link(name: str) -> tuple[type[Sender], type[Receiver]]:
    """The two ends of the link named by `sync.link`. Raises `ConfigError`."""
    link = load_option("sync.link", LINKS.get(name, name), "link", list(LINKS))
    for end in ("Sender", "Receiver"):
        if not hasattr(link, end):
            raise ConfigError(f'sync.link = "{name}" has no {end}; a link has a Sender and a Receiver')
    return link.Sender, link.Receiver


def shapes_of(parameters: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """Shape of each parameter, as plain data for an offer."""
    return {name: list(p.shape) for name, p in parameters.items()}


def refuse_other_parameters(ours: dict[str, list[int]], theirs: dict[str, list[int]]) -> None:
    """Raise `ValueError`, naming the first difference, unless the generator's names and shapes are the trainer's."""
    for name in (*theirs, *ours):
        if ours.get(name) != theirs.get(name):
            raise ValueError(f"{name} is {theirs.get(name)} in the trainer and {ours.get(name)} in the generator")
