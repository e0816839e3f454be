"""The results of a lag study as a Markdown table: one row per correction and lag, with statistics over the seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.observe.formatting import number
from slipstream.rollout import mean
from slipstream.tools.lag_study.records import RunResult

TARGET_SHARE = 0.9  # of the reference's gain: the default target
HEAD = (
    "lag", "correction", "seeds", "final accuracy", "against lag {reference}", "tokens to target", "seconds to target",
    "speed-up", "tokens trained", "seconds", "mean lag", "ESS", "mismatch KL", "clipped",
)  # fmt: skip


@dataclass(frozen=True)
class Study:
    """The results of all runs that ended, and the settings of the study."""

    results: tuple[RunResult, ...]
    corrections: dict[str, tuple[str, ...]]
    tokens: int
    target: float | None
    command: str

    def lags(self) -> list[int]:
        return sorted({r.lag for r in self.results})

    def cells(self) -> list[tuple[int, str]]:
        """Lag and correction of all results: corrections in the study's order, then by lag."""
        return [(lag, c) for c in self.corrections for lag in self.lags() if self.of(lag, c)]

    def of(self, lag: int, correction: str) -> list[RunResult]:
        return [r for r in self.results if (r.lag, r.correction) == (lag, correction)]

    def reached(self, results: Sequence[RunResult]) -> dict[int, tuple[float, float]]:
        """Tokens and seconds to the target by seed, for the runs that reach it."""
        target = self.target
        return {r.seed: at for r in results if (at := r.reaches(target))} if target is not None else {}

    @property
    def jobs(self) -> int:
        """The largest number of parallel runs."""
        return max(r.jobs for r in self.results)


def default_target(results: Sequence[RunResult]) -> float | None:
    """The accuracy at `TARGET_SHARE` of the mean gain of the smallest lag's runs; None without a gain."""
    reference = [r for r in results if r.lag == min(r.lag for r in results)]
    first, last = mean([r.evaluations["score"][0] for r in reference]), mean([r.final() for r in reference])
    return first + TARGET_SHARE * (last - first) if last > first else None


NOTES = """
Means over seeds; in brackets minimum and maximum. Every run ended at {tokens:,} trained tokens, within one step.
{target} The speed-up is the time that lag {reference} took to the target with the same correction, divided by this
row's, over the seeds that reach it in both. Time is from the first rollout on, without the evaluations for which a
synchronous run pauses. {alone}

Lag is in versions, by token. ESS is the effective sample size as a share of the tokens, mismatch KL is
KL(behaviour ‖ policy) in nats a token, clipped the share of tokens whose gradient the clip removes: means over
steps, each by its share of groups with signal.
"""
TARGET = """The target is a held-out accuracy of {:.1%}, reached where the line between two evaluations first
crosses it; a fraction says how many seeds reached it, and the mean is over those."""
NO_TARGET = "There is no target, since lag {} gained nothing; give one with --target."
SHARED = """**{} runs were concurrent**, with {} cores each: they shared memory bandwidth and
caches, so judge times by a study with --jobs 1."""


def markdown(study: Study) -> str:
    """The table, and the notes that explain it."""
    reference, cores = study.lags()[0], min(r.cores for r in study.results)
    rows = [[text.format(reference=reference) for text in HEAD], ["---"] * len(HEAD)]
    rows += [_row(study, *cell) for cell in study.cells()]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    notes = NOTES.format(
        tokens=study.tokens,
        reference=reference,
        target=NO_TARGET.format(reference) if study.target is None else TARGET.format(study.target),
        alone="Each run was alone." if study.jobs == 1 else SHARED.format(study.jobs, cores),
    )
    changed = "; ".join(
        f"`{name}` is {', '.join(f'`{f}`' for f in flags)}" for name, flags in study.corrections.items() if flags
    )
    last = f"\nCorrections: {changed}.\n" if changed else ""
    return f"# Learning from stale data\n\n`{study.command}`\n\n{table}\n{notes}{last}"


def _row(study: Study, lag: int, correction: str) -> list[str]:
    reference, results = study.lags()[0], study.of(lag, correction)
    base = study.of(reference, correction)
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
        str(lag), correction, str(len(results)), _spread([100 * r.final() for r in results], ".1f", " %"), against,
        tokens, seconds, gained, number(mean([r.tokens for r in results])),
        _spread([r.seconds for r in results], ".0f"), f"{mean([r.lag_mean for r in results]):.2f}",
        _mean([r.effective_sample_size for r in results], ".3f"), _mean([r.mismatch_kl for r in results], ".2g"),
        _mean([r.clipped for r in results], ".1%"),
    ]  # fmt: skip


def _fraction(some: int, all_of_them: int) -> str:
    return f" ({some}/{all_of_them})" if some < all_of_them else ""


def _mean(values: Sequence[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    return format(mean(known), form) if known else "–"


def _spread(values: Sequence[float], form: str, unit: str = "") -> str:
    """The mean, with minimum and maximum in brackets."""
    return f"{mean(values):{form}}{unit} ({min(values):{form}} – {max(values):{form}})"
