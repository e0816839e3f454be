"""Results of a lag study: of one run from its records, and of all runs as a Markdown table.

Time is that of generating and training: it starts with the first rollout and excludes the evaluations for which a
synchronous run pauses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.observe.formatting import number
from slipstream.observe.run_data import load_run
from slipstream.rollout import mean
from slipstream.tools.lag_study.plan import Run

OFF_POLICY = {  # names in `metrics.jsonl`
    "effective_sample_size": "policy/effective_sample_size",
    "mismatch_kl": "policy/mismatch_kl",
    "clipped": "policy/clip_fraction",
}
SERIES = {"tokens": "train/total_tokens", "seconds": "time/window_s", "reward": "reward/mean", **OFF_POLICY}
POINTS = 40  # of a series at most; each is the mean over equally many steps
TARGET_SHARE = 0.9  # of the reference's gain: the default target
HEAD = (
    "lag", "correction", "seeds", "final accuracy", "against lag {reference}", "tokens to target", "seconds to target",
    "speed-up", "tokens trained", "seconds", "mean lag", "ESS", "mismatch KL", "clipped",
)  # fmt: skip
NOTES = """
Means over seeds; in brackets minimum and maximum. Every run ended at {tokens:,} trained tokens, within one step.
{target} The speed-up is the time that lag {reference} took to the target with the same correction, divided by this
row's, over the seeds that reach it in both. Time is from the first rollout on, without the evaluations for which a
synchronous run pauses. With --jobs above 1, concurrent runs shared memory bandwidth and caches: judge times by a
study with --jobs 1.

Lag is in versions, by token. ESS is the effective sample size as a share of the tokens, mismatch KL is
KL(behaviour ‖ policy) in nats a token, clipped the share of tokens whose gradient the clip removes: means over
steps, each by its share of groups with signal.
"""
TARGET = """The target is a held-out accuracy of {:.1%}, reached where the line between two evaluations first
crosses it; a fraction says how many seeds reached it, and the mean is over those."""
NO_TARGET = "There is no target, since lag {} gained nothing; give one with --target."


@dataclass(frozen=True)
class RunResult:
    """Results of one run. `evaluations` has columns tokens, seconds and score; `series` has the columns `SERIES`."""

    lag: int
    correction: str
    seed: int
    evaluations: dict[str, list[float]]
    series: dict[str, list[float | None]]
    tokens: int
    seconds: float
    lag_mean: float
    effective_sample_size: float | None
    mismatch_kl: float | None
    clipped: float | None

    def final(self) -> float:
        """Held-out accuracy at the end."""
        return self.evaluations["score"][-1]

    def reached_at(self, target: float) -> tuple[float, float] | None:
        """Trained tokens and seconds at which held-out accuracy first reaches `target`, interpolated, or None."""
        tokens, seconds, scores = (self.evaluations[k] for k in ("tokens", "seconds", "score"))
        at = next((i for i, score in enumerate(scores) if score >= target), None)
        if at is None:
            return None
        around = slice(max(0, at - 1), at + 1)
        at_tokens, at_seconds = (float(np.interp(target, scores[around], x[around])) for x in (tokens, seconds))
        return at_tokens, at_seconds


@dataclass(frozen=True)
class Study:
    """The results of all runs that ended, and the settings of the study."""

    results: tuple[RunResult, ...]
    corrections: dict[str, list[str]]
    tokens: int
    target: float | None
    command: str

    def lags(self) -> list[int]:
        return sorted({r.lag for r in self.results})

    def cells(self) -> list[tuple[int, str]]:
        """Lag and correction of all results: corrections in the study's order, then by lag."""
        return [(lag, c) for c in self.corrections for lag in self.lags() if self.results_of(lag, c)]

    def results_of(self, lag: int, correction: str) -> list[RunResult]:
        return [r for r in self.results if (r.lag, r.correction) == (lag, correction)]

    def reached(self, results: Sequence[RunResult]) -> dict[int, tuple[float, float]]:
        """Tokens and seconds to the target by seed, for the runs that reach it."""
        target = self.target
        return {r.seed: at for r in results if (at := r.reached_at(target))} if target is not None else {}


def default_target(results: Sequence[RunResult]) -> float | None:
    """The accuracy at `TARGET_SHARE` of the mean gain of the smallest lag's runs; None without a gain."""
    reference = [r for r in results if r.lag == min(r.lag for r in results)]
    first, last = mean([r.evaluations["score"][0] for r in reference]), mean([r.final() for r in reference])
    return first + TARGET_SHARE * (last - first) if last > first else None


def read_result(run: Run) -> RunResult:
    records = load_run(run.path)
    metrics, evaluations, summary = records.metrics, records.evaluations, records.summary
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
    series = {name: list(map(_mean, np.split(columns[name], cuts), np.split(weights[name], cuts))) for name in SERIES}
    return RunResult(
        lag=run.lag, correction=run.correction, seed=run.seed, evaluations=_scores(metrics, evaluations), series=series,
        tokens=summary["tokens_trained"], seconds=metrics[-1]["time/window_s"], lag_mean=summary["lag"]["mean"],
        **{name: _mean(columns[name], weights[name]) for name in OFF_POLICY},
    )  # fmt: skip


def markdown(study: Study) -> str:
    """The table, and the notes that explain it."""
    reference = study.lags()[0]
    rows = [[text.format(reference=reference) for text in HEAD], ["---"] * len(HEAD)]
    rows += [_row(study, *cell) for cell in study.cells()]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    target = NO_TARGET.format(reference) if study.target is None else TARGET.format(study.target)
    notes = NOTES.format(tokens=study.tokens, reference=reference, target=target)
    changed = "; ".join(
        f"`{name}` is {', '.join(f'`{f}`' for f in flags)}" for name, flags in study.corrections.items() if flags
    )
    last = f"\nCorrections: {changed}.\n" if changed else ""
    return f"# Learning from stale data\n\n`{study.command}`\n\n{table}\n{notes}{last}"


def _row(study: Study, lag: int, correction: str) -> list[str]:
    reference, results = study.lags()[0], study.results_of(lag, correction)
    base = study.results_of(reference, correction)
    reached, base_reached = study.reached(results), study.reached(base)
    tokens = seconds = "–" if study.target is None else "never"
    against = gained = "–"
    if reached:
        some = _fraction(len(reached), len(results))
        tokens = number(mean([t for t, _ in reached.values()])) + some
        seconds = number(mean([s for _, s in reached.values()]), 1) + some
    if base and lag != reference:
        against = f"{100 * (mean([r.final() for r in results]) - mean([r.final() for r in base])):+.1f} points"
        if both := reached.keys() & base_reached.keys():
            ratio = sum(base_reached[seed][1] for seed in both) / max(1e-9, sum(reached[seed][1] for seed in both))
            gained = f"{ratio:.2f}x{_fraction(len(both), len(results))}"
    return [
        str(lag), correction, str(len(results)), _mean_and_range([100 * r.final() for r in results], ".1f", " %"),
        against, tokens, seconds, gained, number(mean([r.tokens for r in results])),
        _mean_and_range([r.seconds for r in results], ".0f"), f"{mean([r.lag_mean for r in results]):.2f}",
        _format_mean([r.effective_sample_size for r in results], ".3f"),
        _format_mean([r.mismatch_kl for r in results], ".2g"), _format_mean([r.clipped for r in results], ".1%"),
    ]  # fmt: skip


def _fraction(some: int, all_of_them: int) -> str:
    """How many of all, in brackets; "" if all."""
    return f" ({some}/{all_of_them})" if some < all_of_them else ""


def _format_mean(values: Sequence[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    return format(mean(known), form) if known else "–"


def _mean_and_range(values: Sequence[float], form: str, unit: str = "") -> str:
    """The mean, with minimum and maximum in brackets."""
    return f"{mean(values):{form}}{unit} ({min(values):{form}} – {max(values):{form}})"


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
