"""Runs side by side as text: the command `slipstream compare`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from slipstream.observe.figures import figures
from slipstream.observe.formatting import shorten
from slipstream.observe.page.data import describe_options
from slipstream.observe.report import piped_console
from slipstream.observe.run_data import Run

SKIPPED = ("run.dir",)  # differs between all runs


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


def print_comparison(runs: Sequence[Run], as_json: bool) -> None:
    """Print what the runs reached, and the options in which they differ."""
    reached, options = [figures(run) for run in runs], differences(runs)
    if as_json:
        print(json.dumps({"runs": [str(run.path) for run in runs], "figures": reached, "options": options}))
        return
    console = piped_console()
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
