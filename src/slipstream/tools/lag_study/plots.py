"""The plots of a lag study: one column of panels per correction, one line per lag with the range of its seeds.

Panels: held-out accuracy, reward, effective sample size, mismatch KL. Needs matplotlib, an optional dependency.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from slipstream.tools.lag_study.results import RunResult, Study

# Okabe and Ito's palette, for colour-blind readers (jfly.uni-koeln.de/color); black is the first lag, synchronous.
COLOURS = ("#000000", "#0072B2", "#E69F00", "#D55E00", "#009E73", "#CC79A7", "#56B4E9")
STYLES = [{"color": colour, "marker": marker} for colour, marker in zip(COLOURS, "osD^vPX", strict=True)]
TARGET_STYLE = {"color": "#999999", "linestyle": (0, (4, 3))}
PANELS = (
    ("score", "held-out accuracy (%)", 100.0),
    ("reward", "training reward", 1.0),
    ("effective_sample_size", "effective sample size\n(share of tokens)", 1.0),
    ("mismatch_kl", "mismatch KL\n(nats a token)", 1.0),
)
AXES = {"tokens": ("trained tokens (thousands)", 1e-3), "seconds": ("wall time (s)", 1.0)}
MIN_KL = 1e-5  # smaller values, as in a synchronous run, are rounding errors
GRID = 200
RC = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
      "grid.color": "#e6e6e6", "axes.titlesize": 12, "axes.titleweight": "bold"}  # fmt: skip


def draw(study: Study, path: Path, by: str) -> None:
    """Write the plot of all runs over `by`, "tokens" or "seconds". Raises `ImportError` without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    corrections = list(dict.fromkeys(correction for _, correction in study.cells()))
    with pyplot.rc_context(RC):
        figure, axes = pyplot.subplots(
            len(PANELS), len(corrections), sharex=True, sharey="row", squeeze=False, layout="constrained",
            figsize=(2.2 + 4.6 * len(corrections), 10.5), gridspec_kw={"height_ratios": (1.6, 1.6, 1, 1)},
        )  # fmt: skip
        for column, correction in zip(axes.T, corrections, strict=True):
            _draw_column(column, study, correction, by)
        for panel, (_, title, _) in zip(axes[:, 0], PANELS, strict=True):
            panel.set_ylabel(title)
        kl = axes[-1, 0]
        kl.set_yscale("log")  # applies to the row; after plotting, for the limits
        kl.set_ylim(MIN_KL, max(kl.get_ylim()[1], 100 * MIN_KL))
        figure.align_ylabels(axes[:, 0])
        lines = {line.get_label(): line for panel in axes.flat for line in panel.get_legend_handles_labels()[0]}
        figure.legend(handles=lines.values(), loc="outside upper center", ncols=len(lines), frameon=False)
        figure.supxlabel(_note(study), fontsize=9, color="#666666")
        figure.savefig(path, dpi=150)
        pyplot.close(figure)


def _draw_column(panels: Any, study: Study, correction: str, by: str) -> None:
    """Plot all `PANELS` of one correction."""
    title, scale = AXES[by]
    for panel, (name, _, unit) in zip(panels, PANELS, strict=True):
        for i, lag in enumerate(study.lags()):
            curves = [curve for r in study.results_of(lag, correction) if len((curve := _curve(r, by, name))[0]) > 1]
            if not curves:
                continue
            grid = np.linspace(max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves), GRID)
            mask: Any = np.ma.masked_invalid  # has no types in some releases of numpy
            values = mask([unit * np.interp(grid, x, y) for x, y in curves])
            if name == "mismatch_kl":
                values = np.ma.maximum(values, MIN_KL / 10)
            style, every, label = STYLES[i % len(STYLES)], GRID // 8, f"lag {lag}" + " (synchronous)" * (lag == 0)
            line = {"markersize": 4.5, "markevery": (5 * i % every, every), "linewidth": 1.8, "label": label} | style
            panel.plot(scale * grid, values.mean(0), zorder=3, **line)
            low, high = values.min(0), values.max(0)
            panel.fill_between(scale * grid, low, high, color=style["color"], alpha=0.16, linewidth=0, zorder=2)
    if study.target is not None:
        line = {"label": f"target, {study.target:.1%}", "linewidth": 1} | TARGET_STYLE
        panels[0].axhline(100 * study.target, zorder=1, **line)
    panels[0].set_title(f"correction: {correction}")
    panels[-1].set_xlabel(title)
    panels[-1].set_xlim(left=0)


def _curve(result: RunResult, by: str, name: str) -> tuple[Any, Any]:
    """The points of one run in ascending order; NaN for a missing value, which leaves a gap."""
    columns: dict[str, Any] = result.evaluations if name == "score" else result.series
    x, y = (np.array(columns[key], dtype=np.float64) for key in (by, name))
    order = np.argsort(x, kind="stable")
    return x[order], y[order]


def _note(study: Study) -> str:
    """The line below the plot: seeds and tokens."""
    seeds = max(len(study.results_of(*cell)) for cell in study.cells())
    note = f"mean of {seeds} seeds, band from the lowest to the highest seed" if seeds > 1 else "one seed"
    return f"{note}; every run trains on {study.tokens:,} tokens; KL below {MIN_KL:.0e} is not plotted"
