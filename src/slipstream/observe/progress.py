"""What a person at the terminal sees while a run goes on: a live display, or plain lines where nobody can see one."""

from __future__ import annotations

import math
import sys
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from slipstream.observe.figures import counts, duration, known, number, sparkline

FIELDS = {
    "step": "{step}/{steps}",
    "reward": "{reward} (mean {mean})",
    "lag": "{lag_mean} (max {lag_max})",
    "gen": "{generator_tokens_per_second} tok/s",
    "train": "{trainer_tokens_per_second} tok/s",
    "buffer": "{ready}/{capacity} (+{running})",
    "eta": "{left}",
    "trend": "{trend}",
    "score": "{score}",
    "publish": "version {version}, held {hold_ms} ms",
    "rollouts": "{failed} failed, {dropped_stale} stale",
    "scoring": "{scoring} now, {scoring_queue} queued, {scoring_seconds} s each",
}
LINE = "  ".join(f"{label} {FIELDS[label]}" for label in ("step", "reward", "lag", "gen", "train", "buffer", "eta"))
BLOCK = (("reward", "trend"), ("gen", "train"), ("buffer", "lag"), ("publish", "rollouts"), ("score",))
DIGITS = {"reward": 3, "lag_mean": 2, "hold_ms": 2, "scoring_seconds": 2}
LINE_EVERY = 2.0  # seconds between two plain lines
RECENT = 20  # steps in the recent mean of the reward and in the estimate of what is left


class Progress:
    """Shows steps as they end. On a terminal it redraws itself; else it prints a line now and then; `quiet` warns only.

    Everything goes to standard error, so that standard output holds the report alone.
    """

    def __init__(self, steps: int, quiet: bool = False, console: Console | None = None) -> None:
        self._steps = steps
        self._quiet = quiet
        self._console = console or Console(stderr=True)
        self._began = time.monotonic()
        self._record: Mapping[str, Any] = {}
        self._score = "–"
        self._rewards: deque[float] = deque(maxlen=RECENT)
        self._trend: list[float] = []
        self._ends: deque[tuple[int, float]] = deque(maxlen=RECENT)
        self._last_line = -math.inf
        self._unsaid = False  # a step has ended that no plain line has told of
        self._live: Live | None = None

    def __enter__(self) -> Progress:
        if self._console.is_interactive and not self._quiet:
            self._live = Live(
                get_renderable=self._block, console=self._console, refresh_per_second=4, transient=True,
                redirect_stdout=sys.stdout.isatty(),  # what an environment prints into a file stays there
            )  # fmt: skip
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()
        if self._unsaid:
            self._say_step()

    def step(self, record: Mapping[str, Any]) -> None:
        """A step has ended."""
        self._record, self._unsaid, now = record, True, time.monotonic()
        self._ends.append((record.get("step") or 0, now))
        if known(record.get("reward")):
            self._rewards.append(record["reward"])
            self._trend.append(sum(self._rewards) / len(self._rewards))
        if not self._live and (now - self._last_line >= LINE_EVERY or record.get("step") == self._steps):
            self._last_line = now
            self._say_step()

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """An evaluation has ended."""
        low, high = record.get("versions") or (None, None)
        versions = f"version {number(low)}" if low == high else f"versions {number(low)} to {number(high)}"
        reasons = f" ({counts(record['failures'])})" if record.get("failures") else ""
        failed = f", {number(record['failed'])} failed{reasons}" if record.get("failed") else ""
        score, tasks = number(record.get("score"), 3), number(record.get("tasks"))
        self._score = f"{score} on {tasks} tasks{failed} ({versions})"
        self.note(f"evaluation after step {number(record.get('step'))}: {self._score}")

    def note(self, text: str) -> None:
        """Something worth a line, once."""
        if not self._quiet:
            self._print(Text(text))

    def warn(self, text: str) -> None:
        """Something to know even when quiet."""
        self._print(Text(f"warning: {text}", style="yellow"))

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=not self._console.is_terminal)

    def _say_step(self) -> None:
        self._unsaid = False
        self.note(LINE.format_map(self._texts()))

    def _block(self) -> Group:
        """The live display: how far the run is, how well the policy does, and how well the line flows."""
        texts = self._texts()
        way = _grid(9, None, 0)
        bar = ProgressBar(total=self._steps, completed=self._record.get("step") or 0)
        way.add_row("step", bar, "{step}/{steps}  {elapsed}  eta {left}".format_map(texts))
        block = (*BLOCK, ("scoring",)) if "scored" in self._record else BLOCK
        rows = [_grid(*(9, None) * len(labels)) for labels in block]
        for row, labels in zip(rows, block, strict=True):
            row.add_row(*(Text(part) for label in labels for part in (label, FIELDS[label].format_map(texts))))
        return Group(way, *rows)

    def _texts(self) -> Mapping[str, str]:
        """What the templates above name; "–" for all that the latest record does not have."""
        numbers = {**(self._record.get("rollouts") or {}), **self._record}
        (first, began), (last, ended) = (self._ends[0], self._ends[-1]) if self._ends else ((0, 0.0), (0, 0.0))
        left = duration((ended - began) / (last - first) * (self._steps - last)) if last > first else "–"
        own = {
            "steps": number(self._steps), "elapsed": duration(time.monotonic() - self._began), "left": left,
            "mean": number(self._trend[-1] if self._trend else None, 3), "trend": sparkline(self._trend, 24),
            "score": self._score,
        }  # fmt: skip
        return defaultdict(lambda: "–", {k: number(v, DIGITS.get(k, 0)) for k, v in numbers.items()} | own)


def _grid(*widths: int | None) -> Table:
    """A table without lines: labels of a given width, None for a column that takes what is left, 0 for its content."""
    table = Table.grid(padding=(0, 2), expand=True)
    for width in widths:
        rest = 1 if width is None else None
        table.add_column(style="dim" if width else "", width=width or None, ratio=rest, no_wrap=True)
    return table
