"""Results of one run, from its records: accuracy, reward and off-policy statistics by trained tokens and by time.

Time is that of generating and training: it starts with the first rollout and excludes the evaluations for which a
synchronous run pauses.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.tools.lag_study.plan import Run

OFF_POLICY = {  # names in `metrics.jsonl`
    "effective_sample_size": "policy/effective_sample_size",
    "mismatch_kl": "policy/mismatch_kl",
    "clipped": "policy/clip_fraction",
}
SERIES = {"tokens": "train/total_tokens", "seconds": "time/window_s", "reward": "reward/mean", **OFF_POLICY}
POINTS = 40  # of a series at most; each is the mean over equally many steps


@dataclass(frozen=True)
class RunResult:
    """Results of one run. `evaluations` has columns tokens, seconds and score; `series` has the columns `SERIES`.

    `jobs` is the largest number of runs that were active together with this one; `cores` is the number of its CPU
    cores.
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
        """Trained tokens and seconds at which held-out accuracy first reaches `target`; None if it never does.

        Interpolates linearly between two evaluations.
        """
        tokens, seconds, scores = (self.evaluations[k] for k in ("tokens", "seconds", "score"))
        at = next((i for i, score in enumerate(scores) if score >= target), None)
        if at is None:
            return None
        if at == 0:
            return tokens[0], seconds[0]
        share = (target - scores[at - 1]) / (scores[at] - scores[at - 1])
        return tuple(x[at - 1] + share * (x[at] - x[at - 1]) for x in (tokens, seconds))  # type: ignore[return-value]


def read_result(run: Run, jobs: int, cores: int) -> RunResult:
    """The result of a run that has ended."""
    metrics, evaluations = (read_jsonl(run.path / name) for name in ("metrics.jsonl", "evaluations.jsonl"))
    summary = json.loads((run.path / "summary.json").read_text(encoding="utf-8"))
    pauses = [(e["step"], e["eval/duration_s"]) for e in evaluations if run.lag == 0 and e["step"]]
    for line in metrics:
        line["time/window_s"] -= sum(seconds for step, seconds in pauses if step < line["step"])
    columns = {
        name: np.array([line[metric] for line in metrics], dtype=np.float64)  # None becomes NaN
        for name, metric in SERIES.items()
    }
    # Off-policy statistics cover the tokens of groups with signal, so they are weighted by the share of these groups.
    signal = np.array([line["reward/frac_groups_with_signal"] for line in metrics], dtype=np.float64)
    weights = {name: signal if name in OFF_POLICY else np.ones_like(signal) for name in SERIES}
    count = min(POINTS, len(metrics))
    cuts = [round(i * len(metrics) / count) for i in range(1, count)]
    return RunResult(
        lag=run.lag, correction=run.correction, seed=run.seed, evaluations=_scores(metrics, evaluations),
        series={
            name: list(map(_mean, np.split(columns[name], cuts), np.split(weights[name], cuts))) for name in SERIES
        },
        tokens=summary["tokens_trained"], seconds=metrics[-1]["time/window_s"], steps=summary["steps"],
        lag_mean=summary["lag"]["mean"], lag_max=summary["lag"]["max"], jobs=jobs, cores=cores,
        **{name: _mean(columns[name], weights[name]) for name in OFF_POLICY},
    )  # fmt: skip


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The lines of a file in JSON Lines format."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _scores(metrics: Sequence[dict[str, Any]], evaluations: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Each evaluation's score with the tokens and the time of the evaluated weights.

    An asynchronous run trains during an evaluation, which covers several versions then: the middle of the oldest and
    the newest counts.
    """
    versions = [0, *(line["version"] for line in metrics)]
    at = [np.searchsorted(versions, e["versions"]).clip(max=len(metrics)) for e in evaluations]
    columns = {"score": [e["eval/score"] for e in evaluations]}
    for name in ("tokens", "seconds"):
        values = np.array([0.0, *(line[SERIES[name]] for line in metrics)])
        columns[name] = [float(values[ends].mean()) for ends in at]
    return columns


def _mean(values: NDArray[np.float64], weights: NDArray[np.float64]) -> float | None:
    """The weighted mean of the finite values, or None."""
    known = np.isfinite(values) & (weights > 0)
    return float(np.average(values[known], weights=weights[known])) if known.any() else None
