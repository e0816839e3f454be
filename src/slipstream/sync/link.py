"""Weight links: how a version of the weights gets from the trainer's process into the engines' processes.

A link has two ends, both in one file because they must agree to the byte: a `Sender` in the trainer and a `Receiver` in
each engine process. The controller passes only connection information and publish handles, never weights. One publish:

    handle = sender.stage(version)             # trainer: the version is fixed; every engine still serves the old one
    sender.send(handle)                        # trainer, while
    weights = receiver.prepare(handle)         # each engine stages the whole version, and continues to decode
    engine.swap(version, weights)              # each engine, between two forward passes
    sender.release(handle)                     # trainer: every engine has swapped

If a publish fails before the swap, engines continue to serve the old version.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from slipstream.config.plugins import SEE, load_option, option_code
from slipstream.config.schema import Config, ConfigError, SyncConfig
from slipstream.errors import InvalidInput
from slipstream.sync.checksum import checksum
from slipstream.sync.update import Update

# Plain data by which a receiver connects: always `shapes` by name, and `link` if it is not the link of `sync.link`.
ConnectionInfo = dict[str, Any]
PublishHandle = dict[str, Any]  # plain data that identifies a staged version; `version` is always in it
Shapes = dict[str, list[int]]  # by parameter name
Parameters = Mapping[str, Tensor]  # full tensors by name; a sharded parameter is gathered when it is read
ALIGNMENT = 64  # bytes
Result = TypeVar("Result")
LINKS = {
    "handover": "slipstream.sync.handover:Handover",  # "shared" where engines and trainer take turns
    "shared": "slipstream.sync.shared:Shared",
    "checkpoint": "slipstream.sync.checkpoint:Checkpoint",
    "lora": "slipstream.sync.adapters:Adapters",
    "single_copy": "slipstream.sync.single_copy:SingleCopy",
    "nccl": "slipstream.sync.nccl:Nccl",
    "delta": "slipstream.sync.delta:Delta",
    "nccl_direct": "slipstream.sync.nccl_direct:NcclDirect",
}


class Sender(Protocol):
    """The trainer's end of a link, built by `PytorchTrainerWorker.open_link`; `receivers` is the number of engine
    processes that hold weights.

    Subclasses set the class attributes that apply, and inherit the methods in which they have nothing to do.
    """

    collective: bool = False
    """Receivers depend on each other: if one of them misses a transfer, the transfer fails for all."""
    receives_in_place: bool = False
    """Engines receive into the served weights while they are paused; no engine stages a version."""
    trainer_free_after_send: bool = False
    """The trainer may take its next step as soon as `send` returns, before engines have swapped."""
    one_trainer: bool = False
    """Engines can't connect to the sender of another trainer: after the death of this one they are restarted, too."""
    independent_receivers: bool = False
    """A version that engines serve may be published again to others alone."""
    on_every_rank: bool = False
    """Each trainer rank has a sender with its own part of the parameters, and `parts` of the connection information
    lists what all of them returned. Otherwise rank 0 has the only sender."""

    def __init__(self, parameters: Parameters, config: Config, directory: Path, receivers: int) -> None: ...

    @classmethod
    def late_receivers(cls, config: Config) -> bool:
        """Whether a receiver may receive a version after its `release`, so that no engine waits for a slower one.

        If newer versions were staged it may raise `Superseded`. `send` returns the checksums of all parameters as
        decimal text in `sums`.
        """
        return False

    @abstractmethod
    def connection_info(self) -> ConnectionInfo:
        """Plain data by which a receiver connects: `shapes` by name, and what the link adds."""

    def check_connection(self) -> None:
        """Called every second while the receivers of a `collective` link connect. Raises the error that keeps this end
        from connecting, since receivers would wait for it until their timeout."""

    def before_update(self) -> None:
        """Called by the optimizer step before parameters change in place."""

    @abstractmethod
    def stage(self, version: int) -> PublishHandle:
        """Fix the weights of `version` for sending. Called when a publish starts."""

    def send(self, handle: PublishHandle) -> PublishHandle | None:
        """Transfer the staged version, while engines run `Receiver.prepare`.

        Returns keys to add to the handle, such as `bytes` and `changed` of `PublishStats`, or None.
        """

    def release(self, handle: PublishHandle) -> None:
        """Free what no engine needs once every engine serves this version."""

    def close(self) -> None: ...


class Receiver(Protocol):
    """An engine's end of a link, built by `ServedWeights` in each engine process that holds weights."""

    rebindable: bool = False
    """The engine may bind its parameters to the tensors of `prepare`, which stay valid until the next `release`."""
    writes_served: bool = False
    """`prepare` writes the version into the attached tensors: the engine sleeps during a publish."""
    updates: bool = False
    """`prepare` returns an `Update` of the attached tensors, which have the dtype `connection_info["dtype"]`."""
    deferred_checksums: Mapping[str, Callable[[], int]] = {}
    """If `writes_served`: the last `deferred_checksum` of each `counted` shard."""

    def __init__(self, connection_info: ConnectionInfo, shapes: Shapes, rank: int, device: torch.device) -> None: ...

    def attach(self, shards: Mapping[str, ParameterShard]) -> None:
        """Called once with the tensors that the engine serves, which change in `ServedWeights.apply` alone."""

    @abstractmethod
    def prepare(self, handle: PublishHandle) -> Mapping[str, Any] | Update:
        """All weights of the version by the trainer's names: tensors, or objects whose index returns a tensor.

        If `updates`: an `Update` of the attached tensors instead. Called in a thread; the engine decodes meanwhile,
        unless `writes_served`.
        """

    def swapped(self) -> None:
        """Called when the engine serves the version that was prepared last."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class ParameterShard:
    """`tensor` holds `[index]` of a parameter of shape `shape`; `counted` unless another rank holds the same part."""

    tensor: Tensor
    shape: tuple[int, ...]
    index: tuple[slice, ...] = ()
    counted: bool = True

    needs_received: ClassVar[bool] = False
    """`tensor` has other values than the trainer: `checksum` needs the received ones."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors of the engine that the part is written into."""
        return (self.tensor,)

    def encode(self, values: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Each tensor that the engine serves for these values of the part, and its new values."""
        return [(self.tensor, values)]

    def select(self, *index: int | slice) -> ParameterShard:
        """A shard of `tensor[index]` alone."""
        return replace(self, tensor=self.tensor[index])

    def holds(self, values: Tensor) -> bool:
        """Whether the engine serves exactly these values."""
        return all(torch.equal(new.to(served), served) for served, new in self.encode(values))

    def checksum(self, received: Callable[[], Tensor]) -> int:
        """The checksum of what the engine serves, as the trainer computes it. `received` returns the part's values."""
        return checksum(self.tensor, self.index)

    def deferred_checksum(self, values: Tensor, new: Sequence[Tensor]) -> Callable[[], int]:
        """`checksum` for these received values, and the tensors that `encode` made of them, to be called when both are
        gone."""
        return lambda: checksum(self.tensor, self.index)


@dataclass(frozen=True)
class OwnPart:
    """This rank's part of a parameter, in the place of the parameter: each index returns it."""

    tensor: Tensor

    def __getitem__(self, _: object) -> Tensor:
        return self.tensor


def copy_all(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair into the first, with one launch for all tensors of one dtype."""
    by_dtype: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
    for target, new in pairs:
        by_dtype.setdefault(target.dtype, []).append((target, new))
    for same in by_dtype.values():
        torch._foreach_copy_([target for target, _ in same], [new for _, new in same])


@dataclass(frozen=True)
class PublishStats:
    """Durations of one publish in seconds.

    `pause_s` is the longest pause of an engine, `sending` the transfer, `ready` the time until every engine that is not
    late served the version, `total` includes the comparison of checksums. `late` engines get the version later.
    `engines_lost` lists why engines left the pool since the last publish. On the pool's clock, `began` is the start and
    `pauses` lists track, start and end of each engine's pause since the last publish. `bytes` is the size of the
    version as coded for an engine that has the one before, and `changed` the fraction of elements that differ from it
    (None: not counted).
    """

    version: int
    pause_s: float
    sending: float
    ready: float
    total: float
    engines_lost: tuple[str, ...] = ()
    began: float = 0.0
    pauses: tuple[tuple[str, float, float], ...] = ()
    bytes: int | None = None
    changed: float | None = None
    late: int = 0


class Layout:
    """Offsets in one flat buffer of parameters of these shapes in `dtype`, each aligned to `ALIGNMENT` bytes."""

    def __init__(self, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype) -> None:
        self.shapes, self.dtype = shapes, dtype
        self.offsets: dict[str, int] = {}
        self.size = 0
        for name, shape in shapes.items():
            self.offsets[name] = self.size
            self.size += -(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT

    def views(self, buffer: Tensor, start: int = 0, names: Sequence[str] = ()) -> dict[str, Tensor]:
        """Parameters by name (default: all), as views of `buffer`, whose first byte is byte `start` of the layout."""
        views = {}
        for name in names or self.shapes:
            at, shape = self.offsets[name] - start, self.shapes[name]
            views[name] = buffer[at : at + prod(shape) * self.dtype.itemsize].view(self.dtype).view(*shape)
        return views

    def buckets(self, size: int) -> list[tuple[int, int, list[str]]]:
        """Buckets of consecutive parameters, at most `size` bytes or one parameter: first byte, end, names."""
        buckets: list[tuple[int, int, list[str]]] = []
        ends = [*list(self.offsets.values())[1:], self.size]
        for (name, start), end in zip(self.offsets.items(), ends, strict=True):
            if buckets and end - buckets[-1][0] <= size:
                first, _, names = buckets[-1]
                buckets[-1] = (first, end, [*names, name])
            else:
                buckets.append((start, end, [name]))
        return buckets


def link_name(sync: SyncConfig) -> str:
    """The name by which `find_link` finds the link of a run."""
    return "handover" if (sync.link, sync.placement) == ("shared", "colocated") else sync.link


def find_link(name: str) -> tuple[type[Sender], type[Receiver]]:
    """The two ends of the link of this `link_name`. Raises `ConfigError`."""
    link = load_option("sync.link", LINKS.get(name, name), "link", [known for known in LINKS if known != "handover"])
    with option_code("sync.link", name):
        for end, protocol in (("Sender", Sender), ("Receiver", Receiver)) if name not in LINKS else ():
            if not hasattr(link, end):
                raise ConfigError(f'sync.link = "{name}" has no {end}; a link has a Sender and a Receiver')
            if missing := _missing(getattr(link, end), protocol):
                raise ConfigError(f'sync.link = "{name}": its {end} {missing}; {SEE}')
        return link.Sender, link.Receiver


def _missing(end: Any, protocol: type) -> str:
    """What this end of a user's link lacks, or ""."""
    if not inspect.isclass(end):
        return f"is {end!r:.80} and no class"
    lacks = [name for name in dir(protocol) if not name.startswith("_") and not hasattr(end, name)]
    if lacks:
        return f"has no {', '.join(lacks)}: derive it from slipstream.sync.link.{protocol.__name__}"
    abstract: frozenset[str] = getattr(end, "__abstractmethods__", frozenset())
    return f"does not implement {', '.join(sorted(abstract))}" if abstract else ""


def call_link(link: str, function: Callable[..., Result], *arguments: Any) -> Result:
    """The result of a function of the link `sync.link`. What a user's own link raises becomes a `ConfigError`."""
    with nullcontext() if link in LINKS else option_code("sync.link", link):
        return function(*arguments)


def shapes_of(parameters: Mapping[str, Tensor]) -> Shapes:
    """Shape of each parameter as plain data, for `Sender.connection_info`."""
    known: Callable[[], Shapes] | None = getattr(parameters, "shapes", None)  # without a gather
    return known() if known else {name: list(p.shape) for name, p in parameters.items()}


def validate_same_shapes(ours: Shapes, theirs: Shapes) -> None:
    """Raise `InvalidInput`, naming the first difference, unless engine and trainer have equal names and shapes."""
    for name in (*theirs, *ours):
        if ours.get(name) != theirs.get(name):
            raise InvalidInput(f"{name} is {theirs.get(name)} in the trainer and {ours.get(name)} in the generator")
