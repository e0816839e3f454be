"""A simulated engine: continuous batching, slots, prefix cache, preemption, swaps of weights, deaths.

Between two events the number of sequences is constant and the context grows by it each step, so the time of many decode
steps has a closed form: an event costs the same for 10 and for 10,000 tokens.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from slipstream.plan.costs import EngineCost
from slipstream.rollout import VersionSpan

TOLERANCE = 1e-6  # steps


@dataclass(eq=False, slots=True)
class Request:
    """A turn to sample: `remaining` tokens after `context` ones, of which `cached` have keys if the prefix cache has
    `prefix` in it. `spans` are those of the tokens sampled so far."""

    owner: Any
    context: int
    remaining: int
    prefix: object
    cached: int
    spans: list[VersionSpan] = field(default_factory=list)
    started: float = 0.0  # decode step of the engine at which it was admitted
    size: int = 0  # tokens in the cache at its admission

    @property
    def sampled(self) -> int:
        """Tokens sampled before its admission."""
        return sum(span.end - span.start for span in self.spans)

    def restart(self) -> None:
        """Discard all sampled tokens."""
        self.remaining += self.sampled
        self.spans.clear()


class SimulatedEngine:
    """One engine. Times are those of the simulation's clock; `at` is the time at which its state holds.

    `keeps_version`: whether sequences in flight keep the version that they started with over a swap, as on adapters.
    """

    def __init__(self, cost: EngineCost, slots: int, kv_tokens: float, keeps_version: bool = False) -> None:
        self.cost, self.slots, self.kv_tokens, self.keeps_version = cost, slots, kv_tokens, keeps_version
        self._each = cost.each
        self.waiting: deque[Request] = deque()
        self.active: list[tuple[float, int, Request]] = []  # heap by the decode step of their last token
        self.tokens = 0.0  # in the cache
        self.steps = 0.0
        self.at = self.busy_s = 0.0
        self.sampled = 0.0
        self.preemptions = self.epoch = self._admitted = 0
        self.slow = 1.0  # factor of all times
        self.alive = self.awake = True
        self.version = 0
        self._swaps: tuple[list[float], list[int]] = ([0.0], [0])  # decode steps, and the version from there on
        self._prefixes: set[object] = set()

    @property
    def load(self) -> int:
        return len(self.active) + len(self.waiting)

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def keep_prefix(self, prefix: object) -> None:
        """Add a prefix to the prefix cache: the keys of an episode's earlier turn."""
        self._prefixes.add(prefix)

    def next_event(self) -> float | None:
        """Time at which a sequence ends or the cache is full."""
        if not self.active or not (self.alive and self.awake):
            return None
        count = len(self.active)
        steps = max(0.0, self.active[0][0] - self.steps)
        if count > 1:
            steps = min(steps, max(0.0, self.kv_tokens - self.tokens) / count)
        each = self._each
        seconds = steps * (self.cost.fixed(count) + each * self.tokens) + each * count * steps * steps / 2
        return self.at + seconds * self.slow

    def advance(self, now: float) -> list[Request]:
        """Decode until `now`, then admit waiting requests. Returns the requests that ended."""
        ended: list[Request] = []
        if not (self.alive and self.awake):
            self.at = max(self.at, now)
            return ended
        if now > self.at:
            self._decode(now - self.at)
            self.at = now
        while self.active and self.active[0][0] <= self.steps + TOLERANCE:
            end, _, request = heapq.heappop(self.active)
            self._leave(request, end)
            ended.append(request)
        while len(self.active) > 1 and self.tokens >= self.kv_tokens - TOLERANCE:
            self._preempt()
        self._admit()
        return ended

    def swap(self, now: float, version: int, pause: float, in_flight: str) -> list[Request]:
        """Serve `version` after a pause. Returns the requests that ended before `now`.

        `in_flight` is `sync.in_flight`; "drain" is simulated as "continue".
        """
        ended = self.advance(now)
        if in_flight == "retry":
            self.waiting.extendleft(request for _, _, request in sorted(self.active, reverse=True))
            for request in self.waiting:
                request.restart()
            self.active.clear()
            self.tokens = 0.0
        self.at = max(self.at, now) + pause
        if in_flight == "recompute" and self.active:
            count = len(self.active)
            seconds = self.slow * count * self.cost.prefill(self.tokens / count)
            self.at += seconds
            self.busy_s += seconds
        self.version = version
        self._swaps[0].append(self.steps)
        self._swaps[1].append(version)
        self._prefixes.clear()  # the keys of another version
        self._admit()
        return ended

    def kill(self, now: float) -> list[Request]:
        """Die. Returns the requests in flight, which lose their tokens."""
        lost = [request for _, _, request in self.active] + list(self.waiting)
        for request in lost:
            request.restart()
        self.active.clear()
        self.waiting.clear()
        self.tokens, self.alive, self.at = 0.0, False, now
        self.epoch += 1
        return lost

    def _decode(self, seconds: float) -> None:
        count = len(self.active)
        if not count:
            return
        each, seconds = self._each, seconds / self.slow
        rate = self.cost.fixed(count) + each * self.tokens
        grows = each * count
        steps = seconds / rate if grows <= 0 else (math.sqrt(rate * rate + 2 * grows * seconds) - rate) / grows
        steps = min(steps, self.active[0][0] - self.steps)
        self.steps += steps
        self.tokens += count * steps
        self.sampled += count * steps
        self.busy_s += seconds * self.slow

    def _admit(self) -> None:
        while self.waiting and self.alive and len(self.active) < self.slots:
            request = self.waiting[0]
            size = request.context + request.sampled
            if self.active and self.tokens + size + len(self.active) + 1 > self.kv_tokens:
                return
            self.waiting.popleft()
            known = request.cached if request.prefix in self._prefixes else 0
            self._prefixes.add(request.prefix)
            seconds = self.slow * self.cost.prefill(max(0, size - known), known)
            self.at += seconds
            self.busy_s += seconds
            self.tokens += size
            self._admitted += 1
            request.started, request.size = self.steps, size
            heapq.heappush(self.active, (self.steps + request.remaining, self._admitted, request))

    def _preempt(self) -> None:
        """The newest sequence loses its keys and values, and waits for space."""
        entry = max(self.active, key=lambda item: item[1])
        self.active.remove(entry)
        heapq.heapify(self.active)
        self._leave(entry[2], self.steps)
        self.waiting.appendleft(entry[2])
        self.preemptions += 1

    def _leave(self, request: Request, end: float) -> None:
        """Take a request out of the cache, with the spans of the tokens that it has sampled."""
        done = min(request.remaining, round(end - request.started))
        self.tokens = max(0.0, self.tokens - request.size - (min(end, self.steps) - request.started))
        steps, versions = self._swaps
        first = request.sampled
        start, index = 0, bisect_right(steps, request.started) - 1
        if self.keeps_version and done > 0:
            version = request.spans[0].version if request.spans else versions[index]  # kept over a preemption
            request.spans.append(VersionSpan(version, first, first + done))
            start = done
        while start < done:
            stop = done
            if index + 1 < len(steps):
                stop = min(done, max(start, math.ceil(steps[index + 1] - request.started - TOLERANCE)))
            if stop > start:
                request.spans.append(VersionSpan(versions[index], first + start, first + stop))
            start, index = stop, index + 1
        request.remaining -= done
