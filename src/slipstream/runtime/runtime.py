"""Where the workers of a run are started: on this host (`Runtime`), or on a Ray cluster (`RayRuntime`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from socket import gethostname

from slipstream.config.schema import Config, ConfigError, RuntimeConfig
from slipstream.runtime.placement import Placement, gpus_here, visible
from slipstream.runtime.process import Launch, Launcher, LocalProcess


@dataclass(frozen=True)
class Node:
    """A host that can run workers. `gpus`: the number of GPUs that Ray can allocate on it; None without Ray."""

    name: str
    address: str
    launcher: Launcher
    gpus: int | None = None


class Runtime:
    """Starts workers as child processes of the controller; `RayRuntime` starts them on a cluster.

    A role is the name of a worker that no other worker of the run has.
    """

    kind = "local"  # as `runtime.kind` of the configuration
    hosts = 1  # that workers may be on
    address = "127.0.0.1"  # of this process for workers: the loopback address if all of them are on this host
    bandwidth: Mapping[tuple[str, str], float] = {}  # bytes per second between nodes, if measured before the checks

    @property
    def gpus(self) -> int:
        """GPUs that the workers of a run may use."""
        return gpus_here()

    def reserve(self, config: Config, placement: Placement) -> None:
        """Reserve resources for trainer ranks and engines. Raises `ConfigError` if the placement can't be reserved."""

    def launcher(self, role: str, gpus: Sequence[int] = ()) -> Launcher:
        """The launcher of a trainer rank (`trainer 0`) or an engine (`generator 0`) on these GPUs of the placement."""
        return partial(_start, visible(tuple(gpus)))

    def release(self, role: str) -> None:
        """Give back what is reserved for an engine that has ended."""

    def nodes(self) -> Sequence[Node]:
        """The hosts that workers may be on, each with the launcher of workers there that reserve nothing."""
        return [Node(gethostname(), self.address, LocalProcess)]

    def service(self, device: str) -> Launcher:
        """The launcher of another worker that computes on this device: "cpu", "auto" or a GPU."""
        return LocalProcess

    def forward(self, run: Path) -> AbstractAsyncContextManager[None]:
        """Context in which clients on other hosts reach the socket in this run directory by the run's name."""
        return nullcontext()


def _start(environment: dict[str, str], launch: Launch) -> LocalProcess:
    return LocalProcess(replace(launch, environment=environment | dict(launch.environment)))


_current = Runtime()


def current_runtime() -> Runtime:
    """The runtime of this process: the local one outside of `open_runtime`."""
    return _current


@contextmanager
def open_runtime(options: RuntimeConfig) -> Iterator[None]:
    """Context in which workers are started as `runtime.kind` says. Raises `ConfigError` without Ray or a cluster."""
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
            _current = Runtime()
