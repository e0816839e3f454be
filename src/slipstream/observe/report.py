"""Runs as text in the terminal: the report at the end of a run, `slipstream compare` and `slipstream rollouts`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from slipstream.config.schema import ConfigError
from slipstream.observe.advice import describe_advice
from slipstream.observe.figures import figures
from slipstream.observe.formatting import SHOWN, is_finite, number, short, shorten
from slipstream.observe.page.data import describe_options
from slipstream.observe.run_data import Record, Run, group_turns_by_rollout

PIPED_WIDTH = 100  # columns where there is no terminal
UNCOMPARED = ("run.dir",)  # differs between all runs
COLUMNS = (
    "step", "visit_id", "task_id", "rollout", "role", "turn", "prompt", "completion", "reward", "advantage",
    "finish_reason", "spans", "metrics",
)  # fmt: skip
ENDS = 3  # best rollouts, and worst ones, that are shown by default
MAX_PROMPT, MAX_COMPLETION = 300, 1000  # characters

Rollout = Sequence[Record]  # its completions, one a turn


def report(run: Run, console: Console | None = None) -> None:
    """Print what a run reached, held-out tasks with changed outcomes, advice, and the next commands."""
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
    if advice := describe_advice(run):
        console.print(Text(f"Advice: {advice}."), "", sep="\n")
    for line in _next_commands(summary, [each["name"] for each in run.config.get("policies", ())]):
        console.print(Text(line), soft_wrap=True)


def _side_by_side(old: Mapping[str, Any], new: Mapping[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, expand=True, title_justify="left")
    table.title = Text(shorten(old.get("prompt") or ""), style="italic")
    for when, sample in (("before", old), ("after", new)):
        table.add_column(f"{when}, {_result(sample)}", ratio=1, overflow="fold")
    texts = (sample.get("failed") or sample.get("completion") or "" for sample in (old, new))
    table.add_row(*(Text(shorten(text) or "(nothing)") for text in texts))
    return table


def _result(sample: Mapping[str, Any]) -> str:
    """The reward of an episode, after its score if that is another value; or that the episode failed."""
    if "failed" in sample:
        return "failed"
    score, reward = sample.get("score"), sample.get("reward")
    return f"score {short(score)}, " * (score not in (None, reward)) + f"reward {short(reward)}"


def _next_commands(summary: Mapping[str, Any], policies: Sequence[str]) -> Iterator[str]:
    directory, policy = (str(summary.get(key) or "–") for key in ("directory", "policy"))
    yield f"policy   {policy}"
    yield f"records  {directory}"
    yield ""
    if summary.get("stopped"):
        yield f"resume   slipstream train --resume {shlex.quote(directory)}"
    yield f"measure  slipstream eval {shlex.quote(directory)}"
    for path in [f"{policy}/{name}" for name in policies] or [policy]:
        yield f'ask      slipstream generate {shlex.quote(path)} --prompt "..."'


def piped_console(console: Console | None = None) -> Console:
    """The console, by default standard output, `PIPED_WIDTH` columns wide unless it is a terminal."""
    console = console or Console()
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    return console


def differences(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Options whose values differ between the runs that have a configuration, by "section.option".

    A run without a value has the default, and one without a configuration None.
    """
    defaults = {option["name"]: option.get("default") for option in describe_options()}
    options = [run.options for run in runs]
    names = dict.fromkeys(name for own in options for name in own if name not in UNCOMPARED)
    rows = {name: [o.get(name, defaults.get(name)) if o else None for o in options] for name in names}
    known = [place for place, own in enumerate(options) if own]
    return {name: row for name, row in rows.items() if any(row[place] != row[known[0]] for place in known)}


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
    if options:
        console.print(_table(runs, shown))
    elif len(runs) > 1 and all(run.config for run in runs):
        console.print("The configurations are equal.")
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


def print_rollouts(run: Run, step: int | None, group: int | None, as_json: bool) -> None:
    """Print the rollouts of a step (default: the last), of a group or the best and the worst. Raises `ConfigError`."""
    found = read_rollouts(run, step, group)
    if as_json:
        print(json.dumps([turn for rollout in found for turn in rollout]))
        return
    console = piped_console()
    chosen = found if group is not None or len(found) <= 2 * ENDS else [*found[:ENDS], *found[-ENDS:]]
    shown = f"group {group}" if group is not None else f"the best and the worst {len(chosen)} of {len(found)} rollouts"
    console.print(Text(f"{run.name}, step {found[0][0]['step']}, {shown}", style="bold"))
    for rollout in chosen:
        console.print()
        for line in _lines(rollout):
            console.print(line, soft_wrap=not console.is_terminal)


def read_rollouts(run: Run, step: int | None, group: int | None) -> list[Rollout]:
    """The rollouts of a step (None: the last), the highest reward first; `group` None: of all groups.

    Raises `ConfigError` if the run has no rollouts there.
    """
    steps = run.rollout_steps
    if not steps:
        raise ConfigError(f"{run.path} has no rollouts yet: rollouts/ has no step_N.parquet")
    step = steps[-1] if step is None else step
    if step not in steps:
        raise ConfigError(f"--step {step}: {run.path} has rollouts of steps {steps[0]} to {steps[-1]}")
    table = run.table(step, COLUMNS)
    if table is None:
        raise ConfigError(f"{run.path}: {run.problems[-1]}; give another --step of {steps[0]} to {steps[-1]}")
    rows = table.to_pylist()
    groups = sorted({row["visit_id"] for row in rows})
    if group is not None and group not in groups:
        raise ConfigError(f"--group {group}: step {step} has {len(groups)} groups, {groups[0]} to {groups[-1]}")
    chosen = [row for row in rows if group is None or row["visit_id"] == group]
    return sorted(
        group_turns_by_rollout(chosen),
        key=lambda turns: -(turns[0]["reward"] if is_finite(turns[0]["reward"]) else 0.0),
    )


def _lines(rollout: Rollout) -> Iterator[Text]:
    """A rollout: its figures, then prompt and completion of each turn. Control characters are removed."""
    first = rollout[0]
    versions = sorted({span["version"] for turn in rollout for span in turn["spans"] or ()})
    role = f", {first['role']}" if first["role"] else ""
    metrics = "".join(f", {name} {value:g}" for name, value in first["metrics"] or ())
    yield Text(
        f"reward {short(first['reward'])}, advantage {short(first['advantage'])}: group {first['visit_id']} (task "
        f"{shorten(first['task_id'], 60)}), rollout {first['rollout']}{role}, versions {_range(versions)}, "
        f"ends by {first['finish_reason']}{metrics}",
        style="cyan",
    )
    for turn in rollout:
        yield Text(f"  {shorten(turn['prompt'] or '', MAX_PROMPT)}", style="dim")
        yield Text(f"  {shorten(turn['completion'] or '', MAX_COMPLETION) or '(nothing)'}")


def _range(versions: Sequence[int]) -> str:
    return f"{versions[0]} to {versions[-1]}" if len(versions) > 1 else "".join(map(str, versions)) or "–"
