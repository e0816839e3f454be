"""The bounded buffer of ready groups between generators and trainer."""

from __future__ import annotations

from collections.abc import Iterable

from slipstream.rollout import Group
from slipstream.staleness import is_stale


class BufferFull(RuntimeError):
    """A group was put into a full buffer: the admission gate let too much work start."""


class RolloutBuffer:
    """Ready groups, oldest policy first. Holds at most `capacity` groups and never waits: waiting is the loop's."""

    def __init__(self, capacity: int, groups: Iterable[Group] = ()) -> None:
        self.capacity = capacity
        self._groups: dict[int, tuple[int, Group]] = {}  # by entry, each with the version of its oldest token
        for group in groups:
            self.put(group)

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def groups(self) -> list[Group]:
        """What is ready, in the order in which it will be taken: by oldest token, then by ledger entry."""
        return [group for _, _, group in sorted((v, e, g) for e, (v, g) in self._groups.items())]

    def put(self, group: Group) -> None:
        """Add a ready group; a second group of the same entry, or one over capacity, is a bug in the caller."""
        if group.entry in self._groups:
            raise ValueError(f"entry {group.entry} is in the buffer already")
        if len(self._groups) >= self.capacity:
            raise BufferFull(f"entry {group.entry} arrived at a buffer that holds {self.capacity} groups already")
        self._groups[group.entry] = (group.oldest_version, group)

    def drop_stale(self, version: int, max_lag: int) -> list[Group]:
        """Remove and return the groups that are too old to train on at `version`."""
        stale = [g for g in self.groups if is_stale(version, self._groups[g.entry][0], max_lag)]
        for group in stale:
            del self._groups[group.entry]
        return stale

    def take(self, count: int) -> list[Group]:
        """Remove and return the `count` oldest groups, or nothing while there are fewer."""
        taken = self.groups[:count] if len(self) >= count else []
        for group in taken:
            del self._groups[group.entry]
        return taken
