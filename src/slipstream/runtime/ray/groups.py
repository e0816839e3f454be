"""Which workers Ray places together: arithmetic, before any placement group is created."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.config.schema import ConfigError
from slipstream.runtime.placement import Placement

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
                'set generator.tensor_parallel_size = 1, or runtime.kind = "local"'
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
