"""Progress of a run in the terminal: a live display, or plain lines if standard error is not a terminal.

While the processes of a run start, which takes minutes for large engines, the ends of their logs are shown.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from slipstream.observe.formatting import by_label, counts, duration, is_finite, number, shorten, sparkline
from slipstream.rollout import Group as RolloutGroup

FIELDS = {
    "step": "{step}/{steps}",
    "reward": "{reward/mean} (mean {mean})",
    "lag": "{lag/mean} (max {lag/max})",
    "gen": "{gen/tokens_per_s} tok/s",
    "train": "{train/tokens_per_s} tok/s",
    "buffer": "{buffer/groups_ready}/{buffer/capacity} (+{buffer/groups_in_flight})",
    "eta": "{left}",
    "trend": "{trend}",
    "score": "{score}",
    "publish": "version {version}, paused {sync/pause_ms} ms",
    "rollouts": "{rollout/failed} failed, {rollout/dropped_stale} stale",
    "scoring": "{scoring/in_flight} now, {scoring/queued} queued, {scoring/mean_s} s each",
}
LINE = "  ".join(f"{label} {FIELDS[label]}" for label in ("step", "reward", "lag", "gen", "train", "buffer", "eta"))
BLOCK = (("reward", "trend"), ("gen", "train"), ("buffer", "lag"), ("publish", "rollouts"), ("score",))
DIGITS = {"reward/mean": 3, "lag/mean": 2, "sync/pause_ms": 2, "scoring/mean_s": 2}
LINE_INTERVAL_S = 2.0
RECENT_STEPS = 20  # for the mean reward, rates of engines and the estimated time left
SHOWN_ENGINES = 4
PROMPT_TOKENS, TEXT = 100, 200  # of a prompt's end, and characters of a text
FIRST_REPORT_S = 60.0  # of a start; the next report follows when this time has doubled
LOG_LINE = 160  # characters

Result = TypeVar("Result")


class EngineState(NamedTuple):
    name: str
    state: str
    version: int
    pending_requests: int


class PoolState(NamedTuple):
    """The engines at present, and what the trainer does."""

    engines: Sequence[EngineState]
    trainer: str


class Progress:
    """Shows steps as they end, on standard error: standard output is for the report. `quiet` prints warnings only."""

    def __init__(self, steps: int, quiet: bool = False, console: Console | None = None) -> None:
        self._steps, self._quiet = steps, quiet
        self._console = console or Console(stderr=True)
        self._began = time.monotonic()
        self.latest: Mapping[str, Any] = {}  # record of the last step
        self._score = "–"
        self._scores: Mapping[str, float] = {}  # by environment, if there are several
        self._records: deque[Mapping[str, Any]] = deque(maxlen=RECENT_STEPS)
        self._ends: deque[tuple[int, float]] = deque(maxlen=RECENT_STEPS)  # step and time
        self._rewards: deque[float] = deque(maxlen=RECENT_STEPS)
        self._trend: list[float] = []
        self._last_line = -math.inf
        self._unprinted = False  # the last step is not in a plain line yet
        self._live: Live | None = None
        self._pools: Callable[[], PoolState] | None = None
        self._warning = ""  # the last
        self._rollouts: list[tuple[str, Text, Text]] = []  # reward, prompt and completion

    def __enter__(self) -> Progress:
        if self._console.is_interactive and not self._quiet:
            self._live = Live(
                get_renderable=self._block, console=self._console, refresh_per_second=4, transient=True,
                redirect_stdout=sys.stdout.isatty(),  # output redirected to a file stays there
            )  # fmt: skip
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()
        if self._unprinted:
            self._print_step()

    def watch(self, pools: Callable[[], PoolState]) -> None:
        """Show the state of both pools in the live display, which calls `pools` in a thread, 4 times a second."""
        self._pools = pools

    def rollouts(self, group: RolloutGroup, decode: Callable[[Sequence[int]], str]) -> None:
        """Show rollouts of a group in the live display: the best, the worst, and one between them."""
        if not self._live:
            return  # plain lines show none
        ranked = sorted(group.rollouts, key=lambda rollout: -rollout.reward)
        self._rollouts = []
        for rollout in (ranked[i] for i in sorted({0, len(ranked) // 2, len(ranked) - 1})):
            last = rollout.completions[-1]
            prompt = Text(shorten(decode(last.prompt_ids[-PROMPT_TOKENS:]), TEXT), style="dim")
            self._rollouts.append((f"r = {rollout.reward:.2g}", prompt, Text(shorten(last.text, TEXT))))

    def step(self, record: Mapping[str, Any]) -> None:
        self._records.append(record)
        self.latest, self._unprinted, now = record, True, time.monotonic()
        self._ends.append((record.get("step") or 0, now))
        if is_finite(record.get("reward/mean")):
            self._rewards.append(record["reward/mean"])
            self._trend.append(sum(self._rewards) / len(self._rewards))
        if not self._live and (now - self._last_line >= LINE_INTERVAL_S or record.get("step") == self._steps):
            self._last_line = now
            self._print_step()

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """Print an evaluation in one line, and keep its scores for the live display."""
        low, high = record.get("versions") or (None, None)
        versions = f"version {number(low)}" if low == high else f"versions {number(low)} to {number(high)}"
        reasons = f" ({counts(record['eval/failures'])})" if record.get("eval/failures") else ""
        failed = f", {number(record['eval/failed'])} failed{reasons}" if record.get("eval/failed") else ""
        score, tasks = number(record.get("eval/score"), 3), f"{number(record.get('eval/tasks'))} tasks"
        tasks += f", {number(k)} samples each" if (k := record.get("eval/samples_per_task", 1)) > 1 else ""
        self._scores = by_label(record, "eval/score")
        counts_of = by_label(record, "eval/tasks")
        own = ", ".join(f"{label} {number(each, 3)} on {counts_of[label]}" for label, each in self._scores.items())
        against = by_label(record, "eval/against_start", "policies")
        for name, reward in by_label(record, "eval/reward", "policies").items():
            found = "" if against[name] is None else f" ({number(against[name], 3)} against the start)"
            own += f"{', ' * bool(own)}{name} {number(reward, 3)}{found}"
        self._score = f"{score} on {tasks}{failed} ({versions})" + f": {own}" * bool(own)
        self.note(f"evaluation after step {number(record.get('step'))}: {self._score}")

    def resumed(self) -> None:
        """Print that a pause has ended. The estimated time left excludes it."""
        self._ends.clear()
        self.note("resumed")

    def note(self, text: str) -> None:
        """Print a line, unless `quiet`."""
        if not self._quiet:
            self._print(Text(text))

    def warn(self, text: str) -> None:
        """Print a warning, even if `quiet`."""
        self._warning = shorten(text.partition("\n")[0], 2 * TEXT)
        self._print(Text(f"warning: {text}", style="yellow"))

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds until the last step; None before the second step."""
        (first, began), (last, ended) = (self._ends[0], self._ends[-1]) if self._ends else ((0, 0.0), (0, 0.0))
        return (ended - began) / (last - first) * (self._steps - last) if last > first else None

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=not self._console.is_terminal)

    def _print_step(self) -> None:
        self._unprinted = False
        rewards = [*by_label(self.latest, "reward").items(), *by_label(self.latest, "reward", "policies").items()]
        own = "".join(f"  {label} {number(reward, 3)}" for label, reward in rewards)
        self.note(LINE.format_map(self._texts()) + own)

    def _block(self) -> Group:
        """The live display: position in the run, rewards, throughput and lag."""
        texts = self._texts()
        bar = ProgressBar(total=self._steps, completed=self.latest.get("step") or 0)
        parts = [_grid((9, None, 0), [("step", bar, "{step}/{steps}  {elapsed}  eta {left}".format_map(texts))])]
        for labels in (*BLOCK, ("scoring",)) if "scoring/scored" in self.latest else BLOCK:
            cells = [Text(part) for label in labels for part in (label, FIELDS[label].format_map(texts))]
            parts.append(_grid((9, None) * len(labels), [cells]))
        parts.append(_grid((9, None, None, None), self._environment_rows()))
        if self._pools:
            state = self._pools()
            parts.append(_grid((9, None), [("trainer", Text(state.trainer))]))
            parts.append(_grid((9, None, None, None, None), self._engine_rows(state.engines)))
        if self._rollouts:
            parts.append(_grid((9, None, None), self._rollouts))
        if self._warning:
            parts.append(_grid((9, None), [("warning", Text(self._warning, style="yellow"))]))
        return Group(*parts)

    def _environment_rows(self) -> Iterator[Sequence[str]]:
        """Reward, score and tasks of each environment, if there are several."""
        for label, reward in by_label(self.latest, "reward").items():
            active, dropped = (
                self.latest.get(f"environments/{label}/tasks_{state}") for state in ("active", "dropped")
            )
            tasks = f"{number(active)} tasks" + f", {number(dropped)} dropped" * bool(dropped)
            yield label[:9], f"reward {number(reward, 3)}", f"score {number(self._scores.get(label), 3)}", tasks

    def _engine_rows(self, engines: Sequence[EngineState]) -> Iterator[Sequence[str]]:
        """State, version, pending requests and recent tokens/s of the first engines; the number of the others."""
        for index, engine in enumerate(engines[:SHOWN_ENGINES]):
            yield (
                f"engine {engine.name.rpartition(' ')[2]}"[:9], engine.state, f"version {engine.version}",
                f"{engine.pending_requests} requests", f"{number(self._engine_rate(index))} tok/s",
            )  # fmt: skip
        if others := engines[SHOWN_ENGINES:]:
            serving = sum(engine.state == "serving" for engine in others)
            yield "", f"{len(others)} more", f"{serving} serving"

    def _engine_rate(self, engine: int) -> float | None:
        """Tokens per second of an engine over the last `RECENT_STEPS` steps."""
        names = f"engines/tokens/{engine}", "time/wall_s"
        points = [tuple(r[name] for name in names) for r in self._records if all(is_finite(r.get(n)) for n in names)]
        (tokens, began), (total, ended) = (points[0], points[-1]) if points else ((0, 0), (0, 0))
        return (total - tokens) / (ended - began) if ended > began and total >= tokens else None

    def _texts(self) -> Mapping[str, str]:
        """Values of the templates above; "–" for values missing in the latest record."""
        own = {
            "steps": number(self._steps), "elapsed": duration(time.monotonic() - self._began),
            "left": duration(self.seconds_left), "mean": number(self._trend[-1] if self._trend else None, 3),
            "trend": sparkline(self._trend, 24), "score": self._score,
        }  # fmt: skip
        return defaultdict(lambda: "–", {k: number(v, DIGITS.get(k, 0)) for k, v in self.latest.items()} | own)


def _grid(widths: Sequence[int | None], rows: Iterable[Sequence[RenderableType]]) -> Table:
    """A table without lines. Widths are in characters; None takes the rest, 0 fits the content."""
    table = Table.grid(padding=(0, 2), expand=True)
    for width in widths:
        rest = 1 if width is None else None
        table.add_column(style="dim" if width else "", width=width or None, ratio=rest, no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


async def report_startup(starting: Coroutine[Any, Any, Result], note: Callable[[str], None], logs: Path) -> Result:
    """Await `starting` and return its result. Until then, `note` the last line of each log at growing intervals."""
    started, began, wait = asyncio.ensure_future(starting), time.monotonic(), FIRST_REPORT_S
    try:
        while not (await asyncio.wait((started,), timeout=wait))[0]:
            wait = time.monotonic() - began
            note(f"still starting after {duration(wait)}, with this at the end of the logs in {logs}:")
            for log in sorted(logs.glob("*.log")):
                note(f"  {log.name}: {_last_line(log)}")
        return started.result()
    except asyncio.CancelledError:
        started.cancel()
        await asyncio.wait((started,))  # until its child processes have ended
        raise


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").replace("\r", "\n").split("\n")
    return next((line.strip()[:LOG_LINE] for line in reversed(lines) if line.strip()), "(nothing)")
