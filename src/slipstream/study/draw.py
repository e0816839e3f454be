"""The answer as a picture: a column for each correction, a line for each lag with the band of its seeds.

Held-out accuracy and reward are above, and below them the effective sample size and the mismatch KL that explain them.
Needs matplotlib, which is an extra.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.study.plan import Cell
from slipstream.study.records import Course
from slipstream.study.table import Study

# Okabe and Ito's palette, which colour-blind readers can tell apart (jfly.uni-koeln.de/color); black is synchronous.
COLOURS = ("#000000", "#0072B2", "#E69F00", "#D55E00", "#009E73", "#CC79A7", "#56B4E9")
MARKERS = "osD^vPX"
PANELS = (
    ("score", "held-out accuracy (%)", 100.0),
    ("reward", "training reward", 1.0),
    ("effective_sample_size", "effective sample size\n(share of tokens)", 1.0),
    ("mismatch_kl", "mismatch KL\n(nats a token)", 1.0),
)
AXES = {"tokens": ("trained tokens (thousands)", 1e-3), "seconds": ("wall time (s)", 1.0)}
LEAST_KL = 1e-5  # what is below, as in a synchronous run, is rounding, and has no place on a logarithmic axis
GRID = 200


def draw(study: Study, path: Path, by: str) -> None:
    """Draw all cells against "tokens" or "seconds". Raises `ImportError` without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    corrections = [c for c in study.corrections if any(course.correction == c for course in study.courses)]
    lags = sorted({c.lag for c in study.courses})
    label, scale = AXES[by]
    style = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
             "grid.color": "#e6e6e6", "axes.titlesize": 12, "axes.titleweight": "bold"}  # fmt: skip
    with pyplot.rc_context(style):
        figure, axes = pyplot.subplots(
            len(PANELS), len(corrections), sharex=True, sharey="row", squeeze=False, layout="constrained",
            figsize=(2.2 + 4.6 * len(corrections), 10.5), gridspec_kw={"height_ratios": (1.6, 1.6, 1, 1)},
        )  # fmt: skip
        for column, correction in enumerate(corrections):
            for panel, (name, title, unit) in zip(axes[:, column], PANELS, strict=True):
                for i, lag in enumerate(lags):
                    _line(panel, study.of(Cell(lag, correction)), by, scale, name, unit, i)
                if name == "score" and study.target is not None:
                    panel.axhline(100 * study.target, color="#999999", linewidth=1, linestyle=(0, (4, 3)), zorder=1)
                if column == 0:
                    panel.set_ylabel(title)
            axes[0, column].set_title(f"correction: {correction}")
            axes[-1, column].set_xlabel(label)
            axes[-1, column].set_xlim(left=0)
        axes[-1, 0].set_yscale("log")  # for the row, once all of it is drawn
        axes[-1, 0].set_ylim(LEAST_KL, max(axes[-1, 0].get_ylim()[1], 100 * LEAST_KL))
        figure.align_ylabels(axes[:, 0])
        handles = _handles(lags, study.target)
        figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False)
        seeds = max(len(study.of(cell)) for cell in study.cells())
        note = f"mean of {seeds} seeds, band from the least to the most" if seeds > 1 else "one seed"
        busy = f"; {study.jobs} runs at once" if by == "seconds" and study.jobs > 1 else ""
        figure.supxlabel(
            f"{note}; every run trains on {study.tokens:,} tokens; KL below {LEAST_KL:.0e} is not drawn{busy}",
            fontsize=9,
            color="#666666",
        )
        figure.savefig(path, dpi=150)
        pyplot.close(figure)


def _line(panel: Any, courses: Sequence[Course], by: str, scale: float, name: str, unit: float, index: int) -> None:
    """One lag in one panel: the mean over its seeds, and the band that they span where all of them are."""
    curves = [curve for c in courses if len((curve := _curve(c, by, name))[0]) > 1]
    if not curves:
        return
    grid = np.linspace(max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves), GRID)
    mask: Any = np.ma.masked_invalid  # without types in some releases of numpy
    values = mask([unit * np.interp(grid, x, y) for x, y in curves])
    if name == "mismatch_kl":
        values = np.ma.maximum(values, LEAST_KL / 10)
    colour, every = COLOURS[index % len(COLOURS)], GRID // 8
    marker = {"marker": MARKERS[index % len(MARKERS)], "markersize": 4.5, "markevery": (5 * index % every, every)}
    panel.plot(scale * grid, values.mean(0), color=colour, linewidth=1.8, zorder=3, **marker)
    panel.fill_between(scale * grid, values.min(0), values.max(0), color=colour, alpha=0.16, linewidth=0, zorder=2)


def _curve(course: Course, by: str, name: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Points of one run in ascending order; NaN where there is no value, which leaves a gap."""
    columns: dict[str, Any] = course.evaluations if name == "score" else course.series
    x, y = (np.array(columns[key], dtype=np.float64) for key in (by, name))
    order = np.argsort(x, kind="stable")
    return x[order], y[order]


def _handles(lags: Sequence[int], target: float | None) -> list[Any]:
    """The legend: a line for each lag, and the target."""
    from matplotlib.lines import Line2D

    lines = [
        Line2D([], [], color=COLOURS[i % len(COLOURS)], marker=MARKERS[i % len(MARKERS)], markersize=5, linewidth=2,
               label=f"lag {lag}" + (" (synchronous)" if lag == 0 else ""))
        for i, lag in enumerate(lags)
    ]  # fmt: skip
    if target is None:
        return lines
    return [*lines, Line2D([], [], color="#999999", linestyle=(0, (4, 3)), label=f"target, {target:.1%}")]
