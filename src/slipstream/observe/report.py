"""The report printed at the end of a run: changed metrics, sample completions, and commands to continue with."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from slipstream.observe.formatting import duration, is_finite, number

REASONS = 5  # most frequent reasons of failures
SHOWN = 300  # characters of a completion
PIPED_WIDTH = 100  # columns where there is no terminal


def report(summary: Mapping[str, Any], console: Console | None = None) -> None:
    """Print changed metrics, held-out tasks with changed outcomes, and the next commands.

    Values that are missing or None in the summary are shown as "–" or left out.
    """
    console = piped_console(console)
    changes = Table.grid(padding=(0, 2))
    changes.add_column(style="dim", no_wrap=True)
    for name, text in _changes(summary):
        changes.add_row(name, Text(text))
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


def _changes(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    score, reward, lag, busy, sync, fates = (
        summary.get(key) or {} for key in ("eval", "reward", "lag", "busy", "sync", "rollouts")
    )
    seconds = summary.get("window_s") or summary.get("wall_s")
    if is_finite(score.get("initial")) or is_finite(score.get("final")):
        yield "held-out score", _arrow(score.get("initial"), score.get("final"))
    yield "training reward", f"{_arrow(reward.get('first'), reward.get('last'))}, first and last tenth of the steps"
    stopped = f", stopped by {summary['stopped']}" if summary.get("stopped") else ""
    yield "steps", f"{number(summary.get('steps'))} in {duration(summary.get('wall_s'))}{stopped}"
    for verb, key, part in (
        ("generated", "tokens_generated", "generator"),
        ("trained on", "tokens_trained", "trainer"),
    ):
        rate = number(summary[key] / seconds) if is_finite(summary.get(key)) and seconds else "–"
        yield verb, f"{number(summary.get(key))} tokens, {rate} tokens/s, {part} busy {_percent(busy.get(part))}"
    yield "lag", f"mean {number(lag.get('mean'), 2)}, max {number(lag.get('max'))} versions"
    ends = (("trained", "trained on"), ("filtered", "filtered"), ("dropped_stale", "stale"), ("failed", "failed"))
    counts = [f"{number(fates[fate])} {label}" for fate, label in (*ends, ("ready", "left over")) if fates.get(fate)]
    yield "rollouts", ", ".join(counts) or "–"
    for reason, count in Counter(summary.get("failures") or {}).most_common(REASONS):
        yield "", f"{number(count)} failed with {shorten(reason, 120)}"
    if (scoring := summary.get("scoring") or {}).get("scored"):
        took = f"{number(scoring.get('mean_s'), 2)} s each, queued {number(scoring.get('mean_wait_s'), 2)} s"
        longest = number(scoring.get("max_queued"))
        yield "scoring", f"{number(scoring['scored'])} rollouts, {took}, longest queue {longest}"
    pause = sync.get("pause_ms") or {}
    paused = f"engines paused {number(pause.get('median'), 2)} ms each, {number(pause.get('max'), 2)} ms at most"
    yield "publishes", f"{number(sync.get('publishes'))}, {paused}"


def _side_by_side(old: Mapping[str, Any], new: Mapping[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, expand=True, title_justify="left")
    table.title = Text(shorten(old.get("prompt") or ""), style="italic")
    for when, sample in (("before", old), ("after", new)):
        how = "failed" if "failed" in sample else f"reward {_plain(sample.get('reward'))}"
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


def shorten(text: str, length: int = SHOWN) -> str:
    """Text on one line that is safe to print: line breaks as ↵, control characters as ·, a long middle left out."""
    half = length // 2
    if len(text) > 4 * length:  # before the work on single characters
        text = f"{text[: 2 * length]}{text[-2 * length :]}"
    text = re.sub(r"\s*\n\s*", " ↵ ", text.strip()).replace("\t", " ")
    text = "".join(c if c.isprintable() else "·" for c in text)  # also marks that reverse text, and lone surrogates
    return text if len(text) <= length else f"{text[:half]} … {text[-half:]}"


def _arrow(first: Any, last: Any) -> str:
    gain = f" ({last - first:+.3f})" if is_finite(first) and is_finite(last) else ""
    return f"{number(first, 3)} → {number(last, 3)}{gain}"


def _percent(fraction: Any) -> str:
    return f"{fraction:.0%}" if is_finite(fraction) else "–"


def _plain(value: Any) -> str:
    return f"{value:g}" if is_finite(value) else "–"
