"""What a person at the terminal sees while a run goes on: a live display, or plain lines where nobody can see one."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

BLOCKS = "▁▂▃▄▅▆▇█"
LINE_EVERY = 2.0  # seconds between two plain lines


class Progress:
    """Shows steps as they end. On a terminal it redraws itself; else it prints a line now and then; `quiet` warns only.

    Everything goes to standard error, so that standard output holds the report alone.
    """

    def __init__(self, steps: int, quiet: bool = False, console: Console | None = None) -> None:
        self._steps = steps
        self._quiet = quiet
        self._console = console or Console(stderr=True)
        self._rewards: deque[float] = deque(maxlen=20)
        self._trend: list[float] = []
        self._record: Mapping[str, Any] = {}
        self._evaluation = "–"
        self._first: tuple[int, float] | None = None
        self._last_line = -LINE_EVERY
        self._live: Live | None = None
        self._bar = Bar(
            TextColumn("[bold]step[/]"), BarColumn(None), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("ETA {task.fields[eta]}"), console=self._console, expand=True,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=steps, eta="–")

    def __enter__(self) -> Progress:
        if self._console.is_terminal and not self._quiet:
            self._live = Live(console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def step(self, record: Mapping[str, Any]) -> None:
        """A step has ended."""
        self._record = record
        now, step = time.monotonic(), record["step"]
        self._first = self._first or (step, now)
        self._rewards.append(record.get("reward") or 0.0)
        self._trend.append(sum(self._rewards) / len(self._rewards))
        if self._live:
            self._bar.update(self._task, completed=step, eta=self._eta(now))
            self._live.update(Group(self._bar, self._table()))
        elif not self._quiet and (now - self._last_line >= LINE_EVERY or step == self._steps):
            self._last_line = now
            self._print(self._line(now))

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """An evaluation has ended."""
        low, high = record["versions"]
        version = f"version {low}" if low == high else f"versions {low} to {high}"
        self._evaluation = f"{record['score']:.3f} ({version})"
        failed = f", {record['failed']} failed" if record.get("failed") else ""
        self.note(f"evaluation after step {record['step']}: {record['score']:.3f} on {record['tasks']} held-out tasks"
                  f"{failed}, {version}")  # fmt: skip

    def note(self, text: str) -> None:
        """Something worth a line."""
        if not self._quiet:
            self._print(text)

    def warn(self, text: str) -> None:
        """Something to know even when quiet."""
        self._print(f"warning: {text}")

    def _print(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)

    def _eta(self, now: float) -> str:
        assert self._first is not None
        first, began = self._first
        step = self._record["step"]
        return _duration((now - began) / (step - first) * (self._steps - step)) if step > first else "–"

    def _line(self, now: float) -> str:
        r = self._record
        return (
            f"step {r['step']}/{self._steps}  reward {_number(self._trend[-1], 3)}  "
            f"lag {_number(r.get('lag_mean'), 1)}/{_number(r.get('lag_max'))}  "
            f"gen {_number(r.get('generator_tokens_per_second'))} tok/s  "
            f"train {_number(r.get('trainer_tokens_per_second'))} tok/s  "
            f"buffer {_number(r.get('ready'))}/{_number(r.get('capacity'))} (+{_number(r.get('running'))})  "
            f"ETA {self._eta(now)}"
        )

    def _table(self) -> Table:
        r, fates = self._record, self._record.get("rollouts") or {}
        cells = [
            ("reward", f"{_number(self._trend[-1], 3)} {sparkline(self._trend, 16)}"),
            ("evaluation", self._evaluation),
            ("lag", f"mean {_number(r.get('lag_mean'), 2)}, max {_number(r.get('lag_max'))}"),
            (
                "buffer",
                f"{_number(r.get('ready'))} of {_number(r.get('capacity'))}, {_number(r.get('running'))} running",
            ),
            ("generator", f"{_number(r.get('generator_tokens_per_second'))} tokens/s"),
            ("trainer", f"{_number(r.get('trainer_tokens_per_second'))} tokens/s"),
            ("publish", f"version {_number(r.get('version'))}, held {_number(r.get('hold_ms'), 2)} ms"),
            ("rollouts", f"{_number(fates.get('failed'))} failed, {_number(fates.get('dropped_stale'))} stale"),
        ]
        table = Table.grid(padding=(0, 2), expand=True)
        for style in ("dim", "", "dim", ""):
            table.add_column(style=style, ratio=None if style else 1, no_wrap=True)
        for (a, b), (c, d) in zip(cells[::2], cells[1::2], strict=True):
            table.add_row(a, b, c, d)
        return table


def sparkline(values: list[float], width: int) -> str:
    """The course of `values` in `width` block characters."""
    if len(values) < 2:
        return ""
    picked = [values[round(i * (len(values) - 1) / (width - 1))] for i in range(width)]
    low, high = min(values), max(values)
    return "".join(BLOCKS[round((v - low) / ((high - low) or 1) * (len(BLOCKS) - 1))] for v in picked)


def _number(value: Any, digits: int = 0) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
