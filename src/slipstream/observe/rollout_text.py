"""Rollouts of a recorded step as text: the command `slipstream rollouts`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.text import Text

from slipstream.config.schema import ConfigError
from slipstream.observe.formatting import is_finite, short, shorten
from slipstream.observe.report import piped_console
from slipstream.observe.run_data import Record, Run

COLUMNS = (
    "step", "visit_id", "task_id", "rollout", "role", "turn", "prompt", "completion", "reward", "advantage",
    "finish_reason", "spans", "metrics",
)  # fmt: skip
ENDS = 3  # best and worst rollouts that are shown by default
PROMPT, COMPLETION = 300, 1000  # characters

Rollout = tuple[Record, ...]  # its completions, one a turn


def print_rollouts(run: Run, step: int | None, group: int | None, as_json: bool) -> None:
    """Print the rollouts of a step (default: the last), of a group or the best and the worst. Raises `ConfigError`."""
    found = read_rollouts(run, step, group)
    if as_json:
        print(json.dumps([dict(turn) for rollout in found for turn in rollout]))
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

    Raises `ConfigError` if there are none.
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
    parts = [tuple(turns) for _, turns in groupby(chosen, key=lambda r: (r["visit_id"], r["role"], r["rollout"]))]
    return sorted(parts, key=lambda turns: -(turns[0]["reward"] if is_finite(turns[0]["reward"]) else 0.0))


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
        yield Text(f"  {shorten(turn['prompt'] or '', PROMPT)}", style="dim")
        yield Text(f"  {shorten(turn['completion'] or '', COMPLETION) or '(nothing)'}")


def _range(versions: Sequence[int]) -> str:
    return f"{versions[0]} to {versions[-1]}" if len(versions) > 1 else "".join(map(str, versions)) or "–"
