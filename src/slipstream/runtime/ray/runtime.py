"""The Ray cluster of a run: connects to it or starts one, reserves placement groups, and starts actors in them."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from slipstream.config.schema import Config, ConfigError, RuntimeConfig
from slipstream.runtime.placement import Placement
from slipstream.runtime.process import Launch, Launcher
from slipstream.runtime.ray.connection import connect
from slipstream.runtime.ray.mailbox import serve_mailbox
from slipstream.runtime.ray.process import ACTOR, RayProcess
from slipstream.runtime.ray.socket_server import SocketServer
from slipstream.runtime.runtime import Node, Runtime

STRATEGIES = {"pack": "PACK", "spread": "SPREAD", "one_node": "STRICT_PACK"}
CPUS = 1.0  # of a worker, if the cluster has as many


@dataclass(frozen=True)
class Slot:
    """A worker's part of a placement group: its bundle, and its share of the bundle's GPUs."""

    group: str
    bundle: int
    gpus: float


@dataclass(frozen=True)
class Group:
    """Bundles, in GPUs each, that Ray reserves together or not at all."""

    name: str
    bundles: tuple[int, ...]
    strategy: str  # of `ray.util.placement_group`


class RayRuntime(Runtime):
    """A context in which this process is a driver of the cluster at `runtime.address`."""

    kind = "ray"

    def __init__(self, options: RuntimeConfig) -> None:
        self._options = options
        self._groups: dict[str, PlacementGroup] = {}
        self._slots: dict[str, Slot] = {}
        self._cpus = CPUS

    def __enter__(self) -> RayRuntime:
        """Connect. Raises `ConfigError` if no cluster answers at the address."""
        connect(self._options.address, "runtime.address")
        self.address: str = ray.util.get_node_ip_address()
        self._sockets = SocketServer(ray.get_runtime_context().get_node_id())
        return self

    def __exit__(self, *_: object) -> None:
        for group in self._groups.values():
            with contextlib.suppress(ray.exceptions.RayError):
                remove_placement_group(group)
        ray.shutdown()
        self._sockets.close()

    @property
    def gpus(self) -> int:
        return int(ray.cluster_resources().get("GPU", 0))

    @property
    def hosts(self) -> int:  # type: ignore[override]
        return len(self._nodes())

    def reserve(self, config: Config, placement: Placement) -> None:
        """As `Runtime.reserve`: one placement group for the trainer's ranks, and one for each engine."""
        strategy = STRATEGIES[self._options.placement]
        groups, self._slots = plan_groups(placement, config.trainer.ranks, strategy)
        workers = sum(len(group.bundles) for group in groups)
        total = ray.cluster_resources().get("CPU", 1.0)
        self._cpus = min(CPUS, math.floor(100 * total / workers) / 100)
        for group in groups:
            self._reserve(group)

    def launcher(self, role: str, gpus: Sequence[int] = ()) -> Launcher:
        if role not in self._slots:  # an engine that was added to the running run
            self._slots[role] = Slot(role, 0, len(gpus))
            self._reserve(Group(role, (len(gpus),), "STRICT_PACK"))
        slot = self._slots[role]
        where = PlacementGroupSchedulingStrategy(self._groups[slot.group], placement_group_bundle_index=slot.bundle)
        return partial(self._start, {"num_gpus": slot.gpus, "scheduling_strategy": where})

    def release(self, role: str) -> None:
        if role in self._groups:  # else it shares the group of others
            del self._slots[role]
            remove_placement_group(self._groups.pop(role))

    def service(self, device: str) -> Launcher:
        """As `Runtime.service`. Ray chooses node and GPU: one GPU, unless `device` is "cpu" or there are none."""
        gpus = 0 if device == "cpu" or not self.gpus else 1
        return partial(self._start, {"num_gpus": gpus, "scheduling_strategy": "SPREAD"})

    def forward(self, run: Path) -> AbstractAsyncContextManager[None]:
        """As `Runtime.forward`. On a cluster that the run started, clients only use the socket in its directory."""
        return serve_mailbox(run) if self._options.address else contextlib.nullcontext()

    def nodes(self) -> Sequence[Node]:
        """As `Runtime.nodes`. Nodes at one address are told apart by their Ray ids."""
        found, used = [], Counter(node["NodeManagerAddress"] for node in self._nodes())
        for node in self._nodes():
            number, address = node["NodeID"], node["NodeManagerAddress"]
            name = f"{address}-{number[:6]}" if used[address] > 1 else address
            where = NodeAffinitySchedulingStrategy(number, soft=False)
            launcher = partial(self._start, {"num_gpus": 0, "scheduling_strategy": where})
            found.append(Node(name, address, launcher, int(node["Resources"].get("GPU", 0))))
        return sorted(found, key=lambda node: node.name)

    def _reserve(self, group: Group) -> None:
        if group.name not in self._groups:
            bundles = [{"CPU": self._cpus, **({"GPU": gpus} if gpus else {})} for gpus in group.bundles]
            self._groups[group.name] = placement_group(bundles, strategy=group.strategy)

    def _start(self, options: dict[str, Any], launch: Launch) -> RayProcess:
        actor = ACTOR.options(**options).remote()
        pending = partial(self._describe, launch.name, options)
        return RayProcess(actor, launch, self._options.start_timeout, pending, self._sockets)

    def _describe(self, name: str, options: dict[str, Any]) -> str:
        """What a worker asks for, and what each node has, for a worker that is not placed."""
        strategy = options["scheduling_strategy"]
        grouped = isinstance(strategy, PlacementGroupSchedulingStrategy)
        asked = strategy.placement_group.bundle_specs if grouped else {"GPU": options["num_gpus"]}
        nodes = "; ".join(
            f"{node['NodeManagerAddress']} has {node['Resources'].get('CPU', 0):g} CPUs and "
            f"{node['Resources'].get('GPU', 0):g} GPUs"
            for node in self._nodes()
        )
        free = ray.available_resources()
        left = f"{free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs"
        return f"{name} asks for {asked}; {nodes}; {left} of them are free"

    def _nodes(self) -> list[dict[str, Any]]:
        return [node for node in ray.nodes() if node["Alive"]]


def plan_groups(placement: Placement, ranks: int, strategy: str) -> tuple[list[Group], dict[str, Slot]]:
    """The placement groups of trainer ranks and engines, and the slot of each by role.

    The trainer's ranks are one group with a bundle for each. An engine has its own group, so that one that is
    pending blocks no other, unless it shares GPUs with the trainer, or all are on one node. Raises `ConfigError` for an
    engine of several GPUs that shares them.
    """
    users = [*(placement.trainer[r : r + 1] for r in range(ranks)), *placement.generators]
    together = [len(gpus) for gpus in users[:ranks]]  # bundles of the trainer's group
    slots = {f"trainer {r}": Slot("trainer", r, _share(users[r], users)) for r in range(ranks)}
    groups = []
    for number, gpus in enumerate(placement.generators):
        role, shared = f"generator {number}", set(gpus) & set(placement.trainer)
        if shared and len(gpus) > 1:
            raise ConfigError(
                f"generator {number} shares GPUs with the trainer and has {len(gpus)}; on Ray such an engine has one: "
                'set generator.tensor_parallel_size = 1 without pipeline_parallel_size, or runtime.kind = "local"'
            )
        if shared:
            slots[role] = Slot("trainer", placement.trainer.index(gpus[0]), _share(gpus, users))
        elif strategy == "STRICT_PACK":
            slots[role] = Slot("trainer", len(together), len(gpus))
            together.append(len(gpus))
        else:
            groups.append(Group(role, (len(gpus),), "STRICT_PACK"))
            slots[role] = Slot(role, 0, len(gpus))
    return [Group("trainer", tuple(together), strategy), *groups], slots


def _share(gpus: tuple[int, ...], users: list[tuple[int, ...]]) -> float:
    """Share of a GPU for one of several workers that use it."""
    return 1 / sum(gpus[0] in other for other in users) if gpus else 0.0
