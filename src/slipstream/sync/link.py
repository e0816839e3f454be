"""Weight links: how a version of the weights gets from the trainer's process into the generators'.

A link has two ends, both in one file because they must agree to the byte: a `Sender` beside the trainer and a
`Receiver` beside each generator. Only small tickets pass through the controller, never weights. One publish is

    ticket = sender.stage(version)             # trainer: all of the version is in place, nobody reads it yet
    receiver.prepare(ticket)                   # generator, in the background: whatever can be done while decoding
    engine.swap(version, receiver.apply)       # generator: between two forward passes
    sender.release(ticket)                     # trainer: every generator has swapped

and a publish that fails anywhere before `apply` leaves the old version serving.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from slipstream.config import ConfigError

Ticket = dict[str, Any]
Parameters = dict[str, nn.Parameter]


class Sender(Protocol):
    """The trainer's end. `offer` is what a receiver needs to connect; it is plain data."""

    def __init__(self, parameters: Parameters, dtype: torch.dtype, directory: Path) -> None: ...
    def offer(self) -> Ticket: ...
    def before_update(self) -> None:
        """Called before parameters change in place."""
        ...

    def stage(self, version: int) -> Ticket: ...
    def release(self, ticket: Ticket) -> None: ...
    def close(self) -> None: ...


class Receiver(Protocol):
    """A generator's end."""

    def __init__(self, parameters: Parameters, offer: Ticket) -> None: ...
    def prepare(self, ticket: Ticket) -> None: ...
    def apply(self) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class PublishStats:
    """One publish: the longest time that a generator was held between two passes, and the whole of it, in seconds."""

    version: int
    hold: float
    total: float


def find_link(name: str) -> tuple[type[Sender], type[Receiver]]:
    """The two ends of the link named by `sync.link`. Raises `ConfigError`."""
    if name == "shared":
        from slipstream.sync.shared import SharedReceiver, SharedSender

        return SharedSender, SharedReceiver
    if name == "checkpoint":
        from slipstream.sync.checkpoint import CheckpointReceiver, CheckpointSender

        return CheckpointSender, CheckpointReceiver
    module, _, attribute = name.partition(":")
    if not attribute:
        raise ConfigError(f'sync.link = "{name}" is unknown; give "shared", "checkpoint" or "module:Class"')
    try:
        link = getattr(import_module(module), attribute)
        return link.Sender, link.Receiver
    except (ImportError, AttributeError) as error:
        raise ConfigError(f'sync.link = "{name}" can\'t be used: {error}') from None
