"""The answer in numbers: a Markdown table with a row for every lag and correction, over the seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from slipstream.observe.figures import number
from slipstream.rollout import mean
from slipstream.study.plan import Cell
from slipstream.study.records import Course

SHARE = 0.9  # of what the reference gains: the target, unless one is given
HEAD = (
    "lag", "correction", "seeds", "final accuracy", "against lag {reference}", "tokens to target", "seconds to target",
    "speed-up", "tokens trained", "seconds", "mean lag", "ESS", "mismatch KL", "clipped",
)  # fmt: skip


@dataclass(frozen=True)
class Study:
    """The courses of all runs that ended, and what they were meant to be."""

    courses: tuple[Course, ...]
    corrections: dict[str, tuple[str, ...]]
    tokens: int
    target: float | None
    command: str

    def cells(self) -> list[Cell]:
        """Every lag and correction that a run ended for, corrections in their order, then by lag."""
        found = {Cell(c.lag, c.correction) for c in self.courses}
        return sorted(found, key=lambda cell: (list(self.corrections).index(cell.correction), cell.lag))

    def of(self, cell: Cell) -> list[Course]:
        return [c for c in self.courses if Cell(c.lag, c.correction) == cell]

    def reference(self) -> int:
        """The smallest lag, which the others are compared with."""
        return min(c.lag for c in self.courses)

    def reached(self, courses: Sequence[Course]) -> dict[int, tuple[float, float]]:
        """Tokens and seconds to the target by seed, of the runs that reach it."""
        target = self.target
        return {c.seed: at for c in courses if (at := c.reaches(target))} if target is not None else {}

    @property
    def jobs(self) -> int:
        """The most runs that went on at once."""
        return max(c.jobs for c in self.courses)


def default_target(courses: Sequence[Course]) -> float | None:
    """The accuracy at nine tenths of what the runs of the smallest lag gain; None if they gain nothing."""
    reference = [c for c in courses if c.lag == min(c.lag for c in courses)]
    first, last = mean([c.evaluations["score"][0] for c in reference]), mean([c.final() for c in reference])
    return first + SHARE * (last - first) if last > first else None


NOTES = """
Means over seeds; in brackets the least and the most. Every run ended at {tokens:,} trained tokens, within one step.
{target} The speed-up is the time that lag {reference} took to the target with the same correction, divided by this
row's, over the seeds that reach it in both. Time is from the first rollout on, without the evaluations that a
synchronous run stands still for. {alone}

Lag is in versions, by token. ESS is the effective sample size as a share of the tokens, mismatch KL is
KL(behaviour ‖ policy) in nats a token, clipped the share of tokens whose gradient the clip removes: means over
steps, each by its share of groups with signal.
"""
TARGET = """The target is a held-out accuracy of {:.1%}, reached where the line between two evaluations first
crosses it; a fraction says how many seeds reached it, and the mean is over those."""
NO_TARGET = "There is no target, since lag {} gained nothing; give one with --target."
SHARED = """**{} runs went on at once**, with {} cores each: they shared memory bandwidth and
caches, so judge times by a study with --jobs 1."""


def markdown(study: Study) -> str:
    """The table, with what is needed to read it."""
    reference = study.reference()
    rows = [[text.format(reference=reference) for text in HEAD], ["---"] * len(HEAD)]
    rows += [_row(study, cell) for cell in study.cells()]
    lines = ["# Learning from stale data", "", f"`{study.command}`", ""]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    changed = [
        f"`{name}` is {', '.join(f'`{f}`' for f in flags)}" for name, flags in study.corrections.items() if flags
    ]
    cores = min(c.cores for c in study.courses)
    lines.append(
        NOTES.format(
            tokens=study.tokens,
            reference=reference,
            target=NO_TARGET.format(reference) if study.target is None else TARGET.format(study.target),
            alone="Each run was alone." if study.jobs == 1 else SHARED.format(study.jobs, cores),
        )
    )
    if changed:
        lines.append(f"Corrections: {'; '.join(changed)}.")
    return "\n".join(lines).rstrip() + "\n"


def _row(study: Study, cell: Cell) -> list[str]:
    courses = study.of(cell)
    base = study.of(Cell(study.reference(), cell.correction))
    reached, base_reached = study.reached(courses), study.reached(base)
    tokens = seconds = "–" if study.target is None else "never"
    gained = "–"
    if reached:
        some = _fraction(len(reached), len(courses))
        tokens = number(mean([t for t, _ in reached.values()])) + some
        seconds = number(mean([s for _, s in reached.values()]), 1) + some
    if (both := reached.keys() & base_reached.keys()) and cell.lag != study.reference():
        ratio = sum(base_reached[seed][1] for seed in both) / max(1e-9, sum(reached[seed][1] for seed in both))
        gained = f"{ratio:.2f}x{_fraction(len(both), len(courses))}"
    points = 100 * (mean([c.final() for c in courses]) - mean([c.final() for c in base])) if base else None
    return [
        str(cell.lag), cell.correction, str(len(courses)), _spread((100 * c.final() for c in courses), ".1f", " %"),
        "–" if points is None or cell.lag == study.reference() else f"{points:+.1f} points",
        tokens, seconds, gained, number(mean([c.tokens for c in courses])),
        _spread((c.seconds for c in courses), ".0f"), f"{mean([c.lag_mean for c in courses]):.2f}",
        _each(courses, lambda c: c.effective_sample_size, ".3f"), _each(courses, lambda c: c.mismatch_kl, ".2g"),
        _each(courses, lambda c: c.clipped, ".1%"),
    ]  # fmt: skip


def _fraction(some: int, all_of_them: int) -> str:
    return f" ({some}/{all_of_them})" if some < all_of_them else ""


def _each(courses: Sequence[Course], value: Callable[[Course], float | None], form: str) -> str:
    values = [v for c in courses if (v := value(c)) is not None]
    return format(mean(values), form) if values else "–"


def _spread(values: Iterable[float], form: str, unit: str = "") -> str:
    """The mean, and the least and the most in brackets."""
    known = list(values)
    return f"{mean(known):{form}}{unit} ({min(known):{form}} – {max(known):{form}})"
