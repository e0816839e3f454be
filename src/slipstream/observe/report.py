"""What a run prints when it is over: what changed, what the policy says now, and where it lies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

SHOWN = 300  # characters of a completion


def report(
    summary: Mapping[str, Any],
    before: Sequence[Mapping[str, Any]],
    after: Sequence[Mapping[str, Any]],
    console: Console,
) -> None:
    """Print the summary, completions of the same held-out tasks before and after, and what to type next."""
    console.print(_changes(summary))
    if before and after:
        console.print(_completions(before, after))
    directory = summary["directory"]
    lines = [f"policy      {summary['policy']}", f"records     {directory}"]
    if summary.get("stopped"):
        lines.append(f"stopped by {summary['stopped']}; go on with: slipstream train --resume {directory}")
    lines += [f"measure it  slipstream eval {directory}", f'ask it      slipstream generate {directory} --prompt "..."']
    console.print(Text("\n".join(lines)), soft_wrap=True)


def _changes(summary: Mapping[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="What changed", title_justify="left", show_header=False)
    rows, fates, busy = summary["reward"], summary["rollouts"], summary["busy"]
    table.add_row("held-out score", _arrow(summary["eval"]["initial"], summary["eval"]["final"]))
    table.add_row("training reward", _arrow(rows["first"], rows["last"]) + "  (first and last tenth of the steps)")
    table.add_row("steps", f"{summary['steps']:,} in {summary['wall_seconds']:,.0f} s, version {summary['version']}")
    table.add_row("tokens", f"{summary['tokens_generated']:,} generated, {summary['tokens_trained']:,} trained on")
    table.add_row(
        "rollouts",
        f"{fates['generated']:,} generated: {fates['trained']:,} trained on, {fates['filtered']:,} filtered, "
        f"{fates['dropped_stale']:,} stale, {fates['failed']:,} failed, {fates['ready']:,} ready",
    )
    for reason, count in summary.get("failures", {}).items():
        table.add_row("", Text(f"{count:,} failed: {reason}"))
    table.add_row("lag", f"mean {summary['lag']['mean']:.2f}, max {summary['lag']['max']} versions")
    table.add_row("busy", f"generator {busy['generator']:.0%}, trainer {busy['trainer']:.0%}")
    hold = summary["publish"]["hold_ms"]
    table.add_row(
        "publishes", f"{summary['publish']['count']:,}, generator held {hold['median']:.2f} ms (max {hold['max']:.2f})"
    )
    return table


def _completions(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="The same held-out tasks, before and after", title_justify="left")
    for heading in ("task", "before", "after"):
        table.add_column(heading, ratio=1, overflow="fold")
    for old, new in zip(before, after, strict=False):
        table.add_row(Text(shorten(old["prompt"])), *(Text(_scored(sample)) for sample in (old, new)))
    return table


def _scored(sample: Mapping[str, Any]) -> str:
    return f"{shorten(sample['completion']) or '(nothing)'}\n→ reward {sample['reward']:g}"


def shorten(text: str, length: int = SHOWN) -> str:
    """The text without surrounding blanks, its middle left out if it is long."""
    text = text.strip()
    half = length // 2
    return text if len(text) <= length else f"{text[:half]} … {text[-half:]}"


def _arrow(first: float | None, last: float | None) -> str:
    return " → ".join("–" if value is None else f"{value:.3f}" for value in (first, last))
