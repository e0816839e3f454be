"""The running totals of a run: what the metrics lines and the summary are made from, and a checkpoint carries."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from slipstream.rollout import Batch, mean


@dataclass
class Tally:
    """Totals over all sittings of a run. `lag` counts trained tokens by their lag in versions; times are seconds."""

    wall_seconds: float = 0.0
    window_seconds: float = 0.0
    generator_busy: float = 0.0
    trainer_busy: float = 0.0
    tokens_generated: int = 0
    tokens_trained: int = 0
    lag: Counter[int] = field(default_factory=Counter)
    holds: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)

    def batch(self, batch: Batch, version: int) -> dict[str, float]:
        """Count a batch about to be trained on at `version`; returns what its metrics line says about it."""
        lags: Counter[int] = Counter()
        completions = [c for group in batch.groups for rollout in group.rollouts for c in rollout.completions]
        for completion in completions:
            for span in completion.spans:
                lags[version - span.version] += span.end - span.start
        self.lag += lags
        self.tokens_trained += batch.tokens
        rollouts = [r for g in batch.groups for r in g.rollouts]
        self.rewards.append(mean([r.reward for r in rollouts]))
        return {
            "reward": self.rewards[-1],
            "signal": mean([float(len(set(g.rewards)) > 1) for g in batch.groups]),
            "lag_mean": _mean(lags),
            "lag_max": max(lags),
            "completion_length": mean([len(c.token_ids) for c in completions]),
            "truncated": mean([float(c.finish_reason == "length") for c in completions]),
            **_metrics(rollouts),
        }

    def with_times(self, clock: Clock) -> Tally:
        """The totals with this sitting's times added."""
        return replace(
            self,
            wall_seconds=self.wall_seconds + clock.wall,
            window_seconds=self.window_seconds + clock.window,
            generator_busy=self.generator_busy + clock.generator_busy,
            trainer_busy=self.trainer_busy + clock.trainer_busy,
        )

    def summary(self) -> dict[str, Any]:
        window = max(self.window_seconds, 1e-9)
        tenth = max(1, len(self.rewards) // 10)
        holds = [1000 * h for h in self.holds]
        scores = [e["score"] for e in self.evaluations]
        return {
            "wall_seconds": round(self.wall_seconds, 3),
            "window_seconds": round(self.window_seconds, 3),
            "tokens_generated": self.tokens_generated,
            "tokens_trained": self.tokens_trained,
            "reward": {"first": mean(self.rewards[:tenth]), "last": mean(self.rewards[-tenth:])},
            "lag": {
                "mean": _mean(self.lag),
                "max": max(self.lag, default=0),
                "histogram": {str(k): self.lag[k] for k in sorted(self.lag)},
            },
            "eval": {
                "initial": scores[0] if scores else None,
                "final": scores[-1] if len(scores) > 1 else None,
                "history": [{k: v for k, v in e.items() if k != "samples"} for e in self.evaluations],
            },
            "busy": {"generator": self.generator_busy / window, "trainer": self.trainer_busy / window},
            "publish": {
                "count": len(holds),
                "hold_ms": {"median": statistics.median(holds) if holds else 0.0, "max": max(holds, default=0.0)},
            },
        }

    def snapshot(self) -> dict[str, Any]:
        return asdict(self) | {"lag": {str(k): v for k, v in self.lag.items()}}

    @classmethod
    def restore(cls, data: dict[str, Any]) -> Tally:
        return cls(**(data | {"lag": Counter({int(k): v for k, v in data["lag"].items()})}))


class Clock:
    """This sitting's times: since the start, and in the window between the first rollout and the last step."""

    def __init__(self) -> None:
        self._began = self._opened = self._closed = self._lap = time.perf_counter()
        self._at_open = self._at_close = {"tokens": 0.0, "busy": 0.0}
        self.trainer_busy = 0.0

    def open(self, generator: dict[str, float]) -> None:
        """The first rollout starts. `generator`: its totals of tokens and busy seconds so far."""
        self._opened = self._closed = self._lap = time.perf_counter()
        self._at_open = self._at_close = generator

    def step(self, generator: dict[str, float], trainer_seconds: float) -> None:
        """A step has ended."""
        self.close(generator)
        self._lap = self._closed
        self.trainer_busy += trainer_seconds

    def close(self, generator: dict[str, float]) -> None:
        """The window ends here, unless another step does."""
        self._closed = time.perf_counter()
        self._at_close = generator

    def lap(self) -> float:
        """Seconds since the last step ended."""
        return time.perf_counter() - self._lap

    @property
    def wall(self) -> float:
        return time.perf_counter() - self._began

    @property
    def window(self) -> float:
        return self._closed - self._opened

    @property
    def generator_busy(self) -> float:
        return self._at_close["busy"] - self._at_open["busy"]

    @property
    def generator_rate(self) -> float:
        """Tokens per second of the window."""
        return (self._at_close["tokens"] - self._at_open["tokens"]) / max(self.window, 1e-9)


def _mean(counts: Counter[int]) -> float:
    return sum(k * n for k, n in counts.items()) / max(1, counts.total())


def _metrics(rollouts: list[Any]) -> dict[str, float]:
    """Means of what the environment reported beside the reward, as `metric/NAME`."""
    names = sorted({name for r in rollouts for name in r.metrics})
    return {f"metric/{n}": mean([r.metrics[n] for r in rollouts if n in r.metrics]) for n in names}
