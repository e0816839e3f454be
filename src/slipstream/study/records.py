"""What a run's records say about learning: accuracy, reward and off-policy statistics by trained tokens and by time.

Time is that of generating and training: it begins with the first rollout, and leaves out the evaluations that a
synchronous run stands still for.
"""

from __future__ import annotations

import bisect
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.rollout import mean
from slipstream.study.plan import Run

OFF_POLICY = ("effective_sample_size", "mismatch_kl", "clipped")
SERIES = ("tokens", "seconds", "reward", *OFF_POLICY)
PARTS = 40  # points of a series: each is the mean over as many steps


@dataclass(frozen=True)
class Course:
    """How one run went. `evaluations` has columns tokens, seconds and score; `series` those of `SERIES`.

    `jobs` is the most runs that went on at once while this one did; `cores` are those of one run.
    """

    lag: int
    correction: str
    seed: int
    evaluations: dict[str, list[float]]
    series: dict[str, list[float | None]]
    tokens: int
    seconds: float
    steps: int
    lag_mean: float
    lag_max: int
    effective_sample_size: float | None
    mismatch_kl: float | None
    clipped: float | None
    jobs: int
    cores: int

    def final(self) -> float:
        """Held-out accuracy at the end."""
        return self.evaluations["score"][-1]

    def reaches(self, target: float) -> tuple[float, float] | None:
        """Trained tokens and seconds at which held-out accuracy first is `target`, linear between two evaluations."""
        tokens, seconds, scores = (self.evaluations[k] for k in ("tokens", "seconds", "score"))
        at = next((i for i, score in enumerate(scores) if score >= target), None)
        if at is None:
            return None
        if at == 0:
            return tokens[0], seconds[0]
        share = (target - scores[at - 1]) / (scores[at] - scores[at - 1])
        return tuple(x[at - 1] + share * (x[at] - x[at - 1]) for x in (tokens, seconds))  # type: ignore[return-value]


def read_course(run: Run, jobs: int, cores: int) -> Course:
    """The course of a run that has ended."""
    metrics, evaluations = (_lines(run.path / name) for name in ("metrics.jsonl", "evaluations.jsonl"))
    summary = json.loads((run.path / "summary.json").read_text(encoding="utf-8"))
    waited = [(e["step"], e["seconds"]) for e in evaluations if run.cell.lag == 0 and e["step"]]
    for line in metrics:
        line["seconds"] = line["window_seconds"] - sum(seconds for step, seconds in waited if step < line["step"])
        line["tokens"] = line["tokens_trained"]
    return Course(
        lag=run.cell.lag, correction=run.cell.correction, seed=run.seed, evaluations=_scores(metrics, evaluations),
        series={name: _parts(_weighted(metrics, name)) for name in SERIES},
        tokens=summary["tokens_trained"], seconds=metrics[-1]["seconds"], steps=summary["steps"],
        lag_mean=summary["lag"]["mean"], lag_max=summary["lag"]["max"], jobs=jobs, cores=cores,
        **{name: _mean(_weighted(metrics, name)) for name in OFF_POLICY},
    )  # fmt: skip


def _scores(metrics: Sequence[dict[str, Any]], evaluations: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Each evaluation at the tokens and the time of the weights that it measured.

    An asynchronous run goes on training meanwhile, so they are those of several versions: the middle of oldest and
    newest counts.
    """
    versions = [0, *(line["version"] for line in metrics)]
    columns: dict[str, list[float]] = {"score": [e["score"] for e in evaluations]}
    for name in ("tokens", "seconds"):
        values = [0.0, *(line[name] for line in metrics)]
        at = [
            [values[bisect.bisect_left(versions, v, hi=len(versions) - 1)] for v in e["versions"]] for e in evaluations
        ]
        columns[name] = [mean(ends) for ends in at]
    return columns


def _weighted(metrics: Sequence[dict[str, Any]], name: str) -> list[tuple[float | None, float]]:
    """A column with the weight of each step.

    Off-policy statistics are of tokens that had a gradient, which are those of groups with signal: a step counts by its
    share of these. A step without any says nothing, though its line says that nothing is amiss.
    """
    return [(line[name], line["signal"] if name in OFF_POLICY else 1.0) for line in metrics]


def _parts(values: Sequence[tuple[float | None, float]]) -> list[float | None]:
    """Means of at most `PARTS` stretches of equal length."""
    count = min(PARTS, len(values))
    cuts = [round(i * len(values) / count) for i in range(count + 1)]
    return [_mean(values[a:b]) for a, b in itertools.pairwise(cuts)]


def _mean(values: Sequence[tuple[float | None, float]]) -> float | None:
    """The weighted mean of what is finite; None where nothing is."""
    known = [(value, weight) for value, weight in values if value is not None]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else None


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
