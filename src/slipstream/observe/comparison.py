"""Runs side by side as text: the command `slipstream compare`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from slipstream.observe.formatting import number
from slipstream.observe.page.data import describe_options, facts, faults, warnings
from slipstream.observe.page.score import compare_scores
from slipstream.observe.report import shorten
from slipstream.observe.run_data import Run

SKIPPED = ("run.dir",)  # differs between all runs


def figures(run: Run) -> dict[str, str]:
    """What a run reached, in words, from its records; "–" for what is not recorded."""
    score, warned = compare_scores(run.evaluations) or {}, warnings(run)
    scores = [_interval(score[when]) for when in ("before", "after") if score.get(when)]
    return {
        "State": run.state,
        "Score": " → ".join(scores) or "–",
        **{label: f"{value} ({note})" for label, value, note in facts(run)},
        "Faults": "; ".join(faults(run, warned)) or "none",
        "Warnings": ", ".join(sorted({str(warning.get("rule")) for warning in warned})) or "none",
    }


def differences(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Options whose values differ between the runs, by "section.option"; a run without a value has the default."""
    defaults = {option["name"]: option.get("default") for option in describe_options()}
    flat = [
        {f"{section}.{name}": value for section, part in run.config.items() if isinstance(part, Mapping)
         for name, value in part.items()}
        for run in runs
    ]  # fmt: skip
    values = {name: [o.get(name, defaults.get(name)) for o in flat] for options in flat for name in options}
    return {name: row for name, row in values.items() if name not in SKIPPED and any(v != row[0] for v in row)}


def print_comparison(runs: Sequence[Run], as_json: bool, console: Console) -> None:
    """Print what the runs reached, and the options in which they differ."""
    reached, options = [figures(run) for run in runs], differences(runs)
    if as_json:
        print(json.dumps({"runs": [str(run.path) for run in runs], "figures": reached, "options": options}))
        return
    console.print(_table(runs, {name: [run[name] for run in reached] for name in reached[0]}))
    shown = {name: ["–" if v is None else v if isinstance(v, str) else json.dumps(v) for v in row]
             for name, row in options.items()}  # fmt: skip
    console.print(_table(runs, shown) if options else "The configurations are equal.")
    for run in runs:
        for problem in run.problems:
            console.print(Text(f"{run.name}: {problem}", style="yellow"))


def _table(runs: Sequence[Run], rows: Mapping[str, Iterable[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    table.add_column("", style="dim", overflow="fold")
    named = len({run.name for run in runs}) == len(runs)
    for run in runs:
        table.add_column(Text(run.name if named else str(run.path)), overflow="fold")
    for name, values in rows.items():
        table.add_row(Text(name), *(Text(shorten(value)) for value in values))
    return table


def _interval(score: Sequence[float | None]) -> str:
    value, low, high = score
    return number(value, 3) + (f" [{low:.3f}, {high:.3f}]" if low is not None and high is not None else "")
