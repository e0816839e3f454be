"""The running totals of a run: what the metrics lines and the summary are made from, and a checkpoint carries."""

from __future__ import annotations

import copy
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from slipstream.observe.samples import compare
from slipstream.rollout import Batch, Rollout, mean
from slipstream.scoring.stage import Lap


@dataclass
class Tally:
    """Totals over all sittings of a run. `lag` counts trained tokens by their lag in versions; times are seconds.

    The window, which the busy times belong to, reaches from the first rollout to the last step of each sitting.
    """

    wall_seconds: float = 0.0
    window_seconds: float = 0.0
    generator_busy: float = 0.0
    trainer_busy: float = 0.0
    tokens_generated: int = 0
    tokens_trained: int = 0
    scored: int = 0
    scoring_seconds: float = 0.0
    scoring_waited: float = 0.0
    scoring_queue: int = 0  # the longest
    lag: Counter[int] = field(default_factory=Counter)
    holds: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)  # generators that have left the pool, and why
    reward_errors: dict[str, int] = field(default_factory=dict)  # by type: each gave a reward of 0
    given_up: dict[str, str] = field(default_factory=dict)  # tasks that can't be played, by id, and why

    def __post_init__(self) -> None:
        self._seen = time.perf_counter()

    def batch(self, batch: Batch, version: int) -> dict[str, float]:
        """Count a batch about to be trained on at `version`; returns what its metrics line says about it."""
        lags: Counter[int] = Counter()
        completions = [c for group in batch.groups for rollout in group.rollouts for c in rollout.completions]
        for span in (span for completion in completions for span in completion.spans):
            lags[version - span.version] += span.end - span.start
        self.lag += lags
        self.tokens_trained += batch.tokens
        rollouts = [r for g in batch.groups for r in g.rollouts]
        self.rewards.append(mean([r.reward for r in rollouts]))
        return {
            "reward": self.rewards[-1],
            "signal": mean(batch.signal),
            "lag_mean": _mean(lags),
            "lag_max": max(lags),
            "completion_length": mean([len(c.token_ids) for c in completions]),
            "truncated": mean([float(c.finish_reason == "length") for c in completions]),
            **{f"metric/{name}": value for name, value in metric_means(rollouts).items()},
        }

    def open(self, generator: dict[str, float]) -> None:
        """The first rollout of this sitting starts. `generator`: its totals of tokens and busy seconds so far."""
        self._opened = self._closed = time.perf_counter()
        self._at_open = self._at_close = generator

    def close(self, generator: dict[str, float], trainer_seconds: float = 0.0) -> None:
        """A step that took `trainer_seconds` has ended, or all have: the window reaches up to here."""
        now = time.perf_counter()
        self.window_seconds += now - self._closed
        self.generator_busy += generator["busy"] - self._at_close["busy"]
        self.trainer_busy += trainer_seconds
        self._closed, self._at_close = now, generator

    def evaluation(self, record: dict[str, Any]) -> None:
        """Add an evaluation. Samples are kept of the first and the last one alone."""
        if len(self.evaluations) > 1:
            self.evaluations[-1] = {k: v for k, v in self.evaluations[-1].items() if k != "samples"}
        self.evaluations.append(record)

    def scoring(self, lap: Lap) -> dict[str, Any]:
        """Count what the scoring stage did since the last step; returns what its metrics line says about it."""
        self.scored += lap.scored
        self.scoring_seconds += lap.seconds
        self.scoring_waited += lap.waited
        self.scoring_queue = max(self.scoring_queue, lap.longest_queue)
        return {
            "scored": lap.scored,
            "scoring": lap.running,
            "scoring_queue": lap.queue,
            "scoring_seconds": lap.seconds / max(1, lap.scored),
            "scoring_wait_seconds": lap.waited / max(1, lap.scored),
            "scoring_retries": lap.retries,
        }

    def lap(self) -> float:
        """Seconds since the last step ended."""
        return time.perf_counter() - self._closed

    def wall(self) -> float:
        """Seconds since the start of the run, over all sittings."""
        now = time.perf_counter()
        self.wall_seconds, self._seen = self.wall_seconds + now - self._seen, now
        return self.wall_seconds

    @property
    def generator_rate(self) -> float:
        """Tokens per second in this sitting's part of the window."""
        return (self._at_close["tokens"] - self._at_open["tokens"]) / max(self._closed - self._opened, 1e-9)

    def summary(self) -> dict[str, Any]:
        window = max(self.window_seconds, 1e-9)
        tenth = max(1, len(self.rewards) // 10)
        holds = [1000 * h for h in self.holds]
        scores = [e["score"] for e in self.evaluations]
        histogram = {str(lag): count for lag, count in sorted(self.lag.items())}
        hold = {"median": statistics.median(holds) if holds else 0.0, "max": max(holds, default=0.0)}
        history = [{k: v for k, v in e.items() if k != "samples"} for e in self.evaluations]
        first, last = (self.evaluations[0], self.evaluations[-1]) if len(scores) > 1 else ({}, {})
        return {
            "wall_seconds": round(self.wall(), 3),
            "window_seconds": round(self.window_seconds, 3),
            "tokens_generated": self.tokens_generated,
            "tokens_trained": self.tokens_trained,
            "reward": {"first": mean(self.rewards[:tenth]), "last": mean(self.rewards[-tenth:])},
            "lag": {"mean": _mean(self.lag), "max": max(self.lag, default=0), "histogram": histogram},
            "eval": {"initial": scores[0] if scores else None, "final": last.get("score"), "history": history},
            "busy": {"generator": self.generator_busy / window, "trainer": self.trainer_busy / window},
            "scoring": {
                "scored": self.scored,
                "seconds": self.scoring_seconds / max(1, self.scored),
                "wait_seconds": self.scoring_waited / max(1, self.scored),
                "longest_queue": self.scoring_queue,
            },
            "publish": {"count": len(holds), "hold_ms": hold},
            "lost": self.lost,
            "reward_errors": self.reward_errors,
            "given_up_tasks": self.given_up,
            "samples": compare(first.get("samples", []), last.get("samples", [])),
        }

    def snapshot(self) -> dict[str, Any]:
        """Plain data to restore from, which later counts do not change."""
        self.wall()
        known = {f.name: copy.copy(getattr(self, f.name)) for f in fields(self)}
        return known | {"lag": {str(k): v for k, v in self.lag.items()}}

    def restore(self, data: dict[str, Any]) -> None:
        """Go on from a snapshot; the time since this sitting began is still to be added."""
        vars(self).update(data | {"lag": Counter({int(k): v for k, v in data["lag"].items()})})


def metric_means(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Means of what an environment reported beside the reward, each over the rollouts that have it; with the reward of
    each role where there are several."""
    known = [r.metrics | ({f"reward/{r.role.partition(':')[0]}": r.reward} if r.role else {}) for r in rollouts]
    names = sorted({name for metrics in known for name in metrics})
    return {n: mean([metrics[n] for metrics in known if n in metrics]) for n in names}


def _mean(counts: Counter[int]) -> float:
    return sum(k * n for k, n in counts.items()) / max(1, counts.total())
