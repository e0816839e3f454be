"""The report printed at the end of a run: its figures, sample completions, and commands to continue with."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from slipstream.observe.figures import figures
from slipstream.observe.formatting import SHOWN, number, short, shorten
from slipstream.observe.run_data import Run

PIPED_WIDTH = 100  # columns where there is no terminal


def report(run: Run, console: Console | None = None) -> None:
    """Print what a run reached, held-out tasks with changed outcomes, and the next commands."""
    console, summary = piped_console(console), run.summary
    changes = Table.grid(padding=(0, 2))
    changes.add_column(style="dim", no_wrap=True)
    for name, text in figures(run).items():
        changes.add_row(name, Text(shorten(text, 2 * SHOWN)))
    console.print(Text("What changed", style="bold"), changes, "", sep="\n")
    samples = summary.get("samples") or {}
    pairs = list(zip(samples.get("before") or (), samples.get("after") or (), strict=False))
    if pairs:
        counts = f"{number(samples.get('better'))} better, {number(samples.get('worse'))} worse"
        console.print(Text(f"The same held-out tasks, before and after: {counts}", style="bold"))
    elif compared := samples.get("compared"):
        found = f"The same {number(compared)} held-out tasks, before and after: no answer changed"
        console.print(Text(found, style="bold"), "", sep="\n")
    for old, new in pairs:
        console.print(_side_by_side(old, new), "", sep="\n")
    for line in _next_commands(summary):
        console.print(Text(line), soft_wrap=True)


def _side_by_side(old: Mapping[str, Any], new: Mapping[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, expand=True, title_justify="left")
    table.title = Text(shorten(old.get("prompt") or ""), style="italic")
    for when, sample in (("before", old), ("after", new)):
        how = "failed" if "failed" in sample else f"reward {short(sample.get('reward'))}"
        table.add_column(f"{when}, {how}", ratio=1, overflow="fold")
    texts = (sample.get("failed") or sample.get("completion") or "" for sample in (old, new))
    table.add_row(*(Text(shorten(text) or "(nothing)") for text in texts))
    return table


def _next_commands(summary: Mapping[str, Any]) -> Iterator[str]:
    directory, policy = (str(summary.get(key) or "–") for key in ("directory", "policy"))
    yield f"policy   {policy}"
    yield f"records  {directory}"
    yield ""
    if summary.get("stopped"):
        yield f"resume   slipstream train --resume {shlex.quote(directory)}"
    yield f"measure  slipstream eval {shlex.quote(directory)}"
    yield f'ask      slipstream generate {shlex.quote(policy)} --prompt "..."'


def piped_console(console: Console | None = None) -> Console:
    """The console, by default standard output, `PIPED_WIDTH` columns wide unless it is a terminal."""
    console = console or Console()
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    return console
