"""A ranked plan as one HTML page without scripts: throughput against lag, a step's timeline, and memory by GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from slipstream.plan.hardware import GIB
from slipstream.plan.ranking import WARM_UP, distinct
from slipstream.plan.splits import Plan
from slipstream.tools.plan_report import explain, to_config

WIDTH, HEIGHT, LEFT, RIGHT = 860, 300, 130, 20
COLORS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#a463f2")
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>body{{font:15px/1.5 system-ui;max-width:900px;margin:2em auto;padding:0 1em}}svg{{width:100%}}
text{{font:12px system-ui;fill:currentColor}}pre{{background:#8881;padding:1em}}</style>
<h1>{title}</h1><p>{why}</p>
<h2>Throughput against lag</h2><p>Each point is a split; the line joins the best of each max_lag.
The ring is the first of the table. {lags}</p>{front}
<h2>Steps of the first split</h2><p>Simulated, after the start of the run.</p>{timeline}
<h2>Memory of each GPU</h2><p>The frame is its {total} GiB.</p>{memory}
<h2>Configuration</h2><pre>{config}</pre></html>"""


def page(plans: Sequence[Plan]) -> str:
    """The page of plans, best first."""
    best = plans[0]
    cluster, fitting = best.problem.cluster, distinct([plan for plan in plans if not plan.missing])
    title = f"{best.problem.shape.name} on {cluster.gpus} x {cluster.gpu.name}"
    return PAGE.format(
        title=escape(title), why=escape(explain(fitting)), lags=_lags(fitting), front=_front(fitting),
        timeline=_timeline(best), total=f"{cluster.gpu.memory / GIB:,.1f}", memory=_memory(best),
        config=escape(to_config(best)),
    )  # fmt: skip


def _lags(plans: Sequence[Plan]) -> str:
    lags = sorted({plan.split.max_lag for plan in plans})
    return _legend((f"max_lag {lag}", COLORS[lag % 6]) for lag in lags)


def _front(plans: Sequence[Plan]) -> str:
    """Trained tokens/s of each split over its mean lag."""
    most_lag = max(1.0, *(plan.lag_mean for plan in plans))
    most_rate = max(plan.tokens_per_s for plan in plans)

    def point(plan: Plan) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - RIGHT) * plan.lag_mean / most_lag
        return x, HEIGHT - 30 - (HEIGHT - 50) * plan.tokens_per_s / most_rate

    best: dict[int, Plan] = {}
    for plan in plans:
        best.setdefault(plan.split.max_lag, plan)
    front = " ".join("{:.1f},{:.1f}".format(*point(plan)) for plan in sorted(best.values(), key=lambda p: p.lag_mean))
    dots = (
        f'<circle cx="{point(p)[0]:.1f}" cy="{point(p)[1]:.1f}" r="5" fill="{COLORS[p.split.max_lag % 6]}" '
        f'fill-opacity=".7"><title>{escape(str(p.split))}, max_lag {p.split.max_lag}: {p.tokens_per_s:,.0f} tokens/s, '
        f"lag {p.lag_mean:.1f}</title></circle>"
        for p in plans
    )
    lags = (
        _text(LEFT - 14 + (WIDTH - LEFT - RIGHT) * i / 4, HEIGHT - 8, f"lag {most_lag * i / 4:.2g}") for i in range(5)
    )
    rates = (_text(0, HEIGHT - 26 - (HEIGHT - 50) * i / 4, f"{most_rate * i / 4:,.0f} tokens/s") for i in range(5))
    ring = '<circle cx="{:.1f}" cy="{:.1f}" r="9" fill="none" stroke="currentColor"/>'.format(*point(plans[0]))
    return _svg(HEIGHT, [f'<polyline points="{front}" fill="none" stroke="#888"/>', *dots, ring, *lags, *rates])


def _timeline(plan: Plan) -> str:
    """Steps of the trainer, publishes, and the engines' share of busy time, of a few steps."""
    records = plan.records[WARM_UP : WARM_UP + 6] or plan.records[-6:]
    if not records:
        return _svg(40, [_text(LEFT, 24, "not simulated")])
    start, end = records[0].start, max(record.end for record in records)
    scale = (WIDTH - LEFT - RIGHT) / max(end - start, 1e-9)
    bars = [_text(0, 24, "trainer"), _text(0, 64, "publish"), _text(0, 104, "engines busy")]
    for before, record in zip([None, *records[:-1]], records, strict=True):
        bars.append(_bar(LEFT + (record.start - start) * scale, 10, (record.end - record.start) * scale, 0))
        low, high = record.publish
        bars.append(_bar(LEFT + (low - start) * scale, 50, max(1.0, min(high - low, end - low) * scale), 1))
        if before:
            share = (record.engine_busy - before.engine_busy) / (record.end - before.end) / plan.split.engines
            left = LEFT + (before.end - start) * scale
            bars.append(_bar(left, 90, (record.end - before.end) * scale, 3, min(1.0, share)))
    return _svg(140, [*bars, _text(LEFT, 135, f"{end - start:,.1f} s in all")])


def _memory(plan: Plan) -> str:
    """One stacked bar for each role, to the scale of a GPU's memory, with a legend."""
    total, rows = plan.problem.cluster.gpu.memory, list[str]()
    for role, parts in plan.memory.items():
        x, bars = float(LEFT), [_text(0, 22, role)]
        for color, (part, size) in enumerate(parts.items()):
            width = (WIDTH - LEFT - RIGHT) * size / total
            bars.append(_bar(x, 5, width, color, title=f"{part}: {size / GIB:,.1f} GiB"))
            x += width
        frame = f'<rect x="{LEFT}" y="5" width="{WIDTH - LEFT - RIGHT}" height="24" fill="none" stroke="currentColor"/>'
        sizes = ((f"{part} {size / GIB:,.1f} GiB", COLORS[i % 6]) for i, (part, size) in enumerate(parts.items()))
        rows.append(f"{_svg(34, [*bars, frame])}<p>{_legend(sizes)}</p>")
    return "".join(rows)


def _legend(entries: Iterable[tuple[str, str]]) -> str:
    """Texts, each after a square of its colour."""
    return " ".join(
        f'<span style="white-space:nowrap"><span style="color:{color}">&#9632;</span> {escape(text)}</span>'
        for text, color in entries
    )


def _bar(x: float, y: float, width: float, color: int, opacity: float = 1.0, title: str = "") -> str:
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{max(0.0, width):.1f}" height="24" fill="{COLORS[color % 6]}" '
        f'fill-opacity="{opacity:.2f}"><title>{escape(title)}</title></rect>'
    )


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y}">{escape(text)}</text>'


def _svg(height: int, parts: Iterable[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img">{"".join(parts)}</svg>'
