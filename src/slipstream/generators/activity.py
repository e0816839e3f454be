"""What an engine did since the last record: times with requests, times asleep, seconds in forward passes, tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Interval = tuple[float, float]


@dataclass(frozen=True)
class Activity:
    """What an engine did from `start` to `end`, on the clock of its pool.

    `requests` are the times with at least one request in flight, `asleep` those in which the pool was paused.
    `forward_s` and `tokens` are as the engine has counted them, up to its last publish or call of `stats`.
    """

    track: str
    start: float
    end: float
    requests: list[Interval]
    asleep: list[Interval]
    forward_s: float
    tokens: float


class Spans:
    """The times between calls of `begin` and `end`."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._ended: list[Interval] = []

    def begin(self, now: float) -> None:
        self._since = now

    def end(self, now: float) -> None:
        if self._since is not None:
            self._ended.append((self._since, now))
            self._since = None

    def take(self, now: float) -> list[Interval]:
        """The times since the last call, the present one included."""
        since = self._since
        self.end(now)
        self._since = None if since is None else now
        taken, self._ended = self._ended, []
        return taken


class ActivityLog:
    """The activity of an engine, and of its successors after restarts, from time `now`. `track` is their name."""

    def __init__(self, track: str = "", now: float = 0.0) -> None:
        self.track = track
        self.requests, self.asleep = Spans(), Spans()
        self._taken, self._forward, self._tokens = now, 0.0, 0.0
        self.busy_s = 0.0  # seconds with requests in flight and awake, up to the last call of `take`

    def take(self, now: float, totals: Mapping[str, float]) -> Activity:
        """The activity since the last call. `totals` are the engine's since its start."""
        forward, tokens = totals["busy_s"] - self._forward, totals["tokens"] - self._tokens
        spans = requests, asleep = self.requests.take(now), self.asleep.take(now)
        slept = sum(max(0.0, min(e, end) - max(s, start)) for s, e in requests for start, end in asleep)
        self.busy_s += sum(end - start for start, end in requests) - slept
        activity = Activity(self.track, self._taken, now, *spans, forward, tokens)
        self._taken, self._forward, self._tokens = now, totals["busy_s"], totals["tokens"]
        return activity
