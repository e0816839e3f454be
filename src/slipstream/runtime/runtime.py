"""Where the workers of a run are started: on this host (`LocalRuntime`), or on a Ray cluster (`RayRuntime`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from socket import gethostname
from typing import Protocol

from slipstream.config.schema import Config, ConfigError, RuntimeConfig
from slipstream.runtime.placement import Placement, gpus_here, visible
from slipstream.runtime.process import Launch, Launcher, LocalProcess


@dataclass(frozen=True)
class Node:
    """A host of workers. `gpus` is how many Ray schedules there, None without Ray."""

    name: str
    address: str
    launcher: Launcher
    gpus: int | None = None


class Runtime(Protocol):
    """Starts processes of workers. A role is the name of a worker that no other worker of the run has."""

    gpus: int
    """GPUs that the workers of a run may use."""
    hosts: int
    """Hosts that workers may be on."""
    address: str
    """Address of this process for workers: the loopback address if all of them are on this host."""

    def reserve(self, config: Config, placement: Placement) -> None:
        """Reserve resources for trainer ranks and engines. Raises `ConfigError` if the placement can't be reserved."""
        ...

    def launcher(self, role: str, gpus: Sequence[int] = ()) -> Launcher:
        """The launcher of a trainer rank (`trainer 0`) or an engine (`generator 0`) on these GPUs of the placement."""
        ...

    def release(self, role: str) -> None:
        """Give back what is reserved for an engine that has ended."""
        ...

    def nodes(self) -> Sequence[Node]:
        """The hosts that workers may be on, each with the launcher of workers there that reserve nothing."""
        ...

    def service(self, role: str, device: str) -> Launcher:
        """The launcher of another worker that computes on this device: "cpu", "auto" or a GPU."""
        ...

    def forward(self, run: Path) -> AbstractAsyncContextManager[None]:
        """Context in which clients on other hosts reach the socket in this run directory by the run's name."""
        ...


class LocalRuntime(Runtime):
    """Child processes of the controller."""

    hosts, address = 1, "127.0.0.1"

    @property
    def gpus(self) -> int:  # type: ignore[override]
        return gpus_here()

    def reserve(self, config: Config, placement: Placement) -> None:
        """Child processes need no reservation."""

    def launcher(self, role: str, gpus: Sequence[int] = ()) -> Launcher:
        return partial(_start, visible(tuple(gpus)))

    def release(self, role: str) -> None:
        """Child processes have no reservation."""

    def service(self, role: str, device: str) -> Launcher:
        return LocalProcess

    def forward(self, run: Path) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    def nodes(self) -> Sequence[Node]:
        return [Node(gethostname(), self.address, LocalProcess)]


def _start(environment: dict[str, str], launch: Launch) -> LocalProcess:
    return LocalProcess(replace(launch, environment=environment | dict(launch.environment)))


_current: Runtime = LocalRuntime()


def current_runtime() -> Runtime:
    """The runtime of this process: the local one outside of `open_runtime`."""
    return _current


@contextmanager
def open_runtime(options: RuntimeConfig) -> Iterator[None]:
    """Context in which workers are started as `runtime.kind` says.

    Raises `ConfigError` if Ray is missing or no cluster can be reached.
    """
    global _current  # noqa: PLW0603
    if options.kind == "local":
        yield
        return
    try:
        from slipstream.runtime.ray.runtime import RayRuntime
    except ImportError as error:
        raise ConfigError(
            f'runtime.kind = "ray" needs Ray ({error}): pip install "slipstream-rl[ray]" on every node'
        ) from None
    with RayRuntime(options) as _current:
        try:
            yield
        finally:
            _current = LocalRuntime()
