"""A run in a notebook: its summary as HTML, and plots of its metrics."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from slipstream.config.schema import ConfigError
from slipstream.observe.figures import figures
from slipstream.observe.formatting import is_finite

if TYPE_CHECKING:
    from slipstream.observe.run_data import Run

WIDTH, HEIGHT = 240, 48  # pixels of a sparkline
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito, for colour-blind readers
SPARKLINES = ("reward/mean", "policy/entropy", "gen/tokens_per_s")
RC = {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#e6e6e6"}
SMOOTHING = 0.9  # weight of the earlier mean at each step


def card(run: Run) -> str:
    """The run as HTML: state, score, reward, time, curves and warnings. All texts are escaped."""
    rows = figures(run) | {"Missing": "; ".join(run.problems)}
    cells = "".join(f"<tr><th>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in rows.items() if v)
    curves = "".join(
        f"<figure style='display:inline-block;margin:0 1em 0 0'><figcaption>{escape(name)}</figcaption>"
        f"{sparkline_svg(run.values(name))}</figure>"
        for name in SPARKLINES
    )
    return f"<div><b>{escape(run.name)}</b><table>{cells}</table>{curves}</div>"


def sparkline_svg(values: Sequence[float]) -> str:
    """A curve as inline SVG, of at most `WIDTH` points."""
    if len(values) < 2:
        return "–"
    points = min(WIDTH, len(values))
    picked = [values[round(i * (len(values) - 1) / (points - 1))] for i in range(points)]
    low, span = min(picked), (max(picked) - min(picked)) or 1.0
    line = " ".join(
        f"{i * WIDTH / (points - 1):.1f},{HEIGHT - 2 - (v - low) / span * (HEIGHT - 4):.1f}"
        for i, v in enumerate(picked)
    )
    title = f"{values[0]:.4g} to {values[-1]:.4g}"
    return (
        f"<svg width='{WIDTH}' height='{HEIGHT}' role='img'><title>{title}</title><polyline points='{line}' "
        f"fill='none' stroke='{COLOURS[0]}' stroke-width='1.5'/></svg>"
    )


def plot(run: Run, names: Sequence[str], by: str = "step") -> Any:
    """A figure of matplotlib: a panel for each metric, with a smoothed line. Raises `ConfigError`."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.style import context
    except ImportError:
        raise ConfigError("plots need matplotlib: pip install 'slipstream-rl[study]'") from None
    known = {name for record in run.metrics for name, value in record.items() if is_finite(value)}
    if unknown := [name for name in (*names, by) if name not in known]:
        raise ConfigError(f"{run.path} has no metric {unknown[0]!r} with finite values; docs/metrics.md lists them")
    with context(RC):
        figure = Figure(figsize=(7, 2.4 * len(names)), layout="constrained")
        for index, name in enumerate(names):
            axes, colour = figure.add_subplot(len(names), 1, index + 1), COLOURS[index % len(COLOURS)]
            points = [(m[by], m[name]) for m in run.metrics if is_finite(m.get(name)) and is_finite(m.get(by))]
            x, y = [p[0] for p in points], [p[1] for p in points]
            axes.plot(x, y, color=colour, alpha=0.3, linewidth=1)
            axes.plot(x, smooth(y), color=colour, linewidth=1.8)
            axes.set_title(name, loc="left")
        axes.set_xlabel(by)
    return figure


def smooth(values: Sequence[float]) -> list[float]:
    """Exponential moving average without bias at the start."""
    total, weight, found = 0.0, 0.0, []
    for value in values:
        total, weight = SMOOTHING * total + (1 - SMOOTHING) * value, SMOOTHING * weight + (1 - SMOOTHING)
        found.append(total / weight)
    return found
