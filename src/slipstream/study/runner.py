"""Runs of a study, each in a process of its own, so that a crash costs one run and a stop none.

A run that has ended is not run again, and one that was cut short is resumed from its last checkpoint. Each of the runs
that go on at once has cores of its own, as far as there are any and the system lets a process be bound to them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from slipstream.directory import lock
from slipstream.observe.figures import duration, number
from slipstream.study.plan import Plan, Run

LOG = "runs.jsonl"
POLL = 1.0  # seconds between two looks at a run's records


def ended(run: Run) -> bool:
    """Whether the run has come to its own end."""
    summary = run.path / "summary.json"
    return summary.exists() and json.loads(summary.read_text(encoding="utf-8"))["stopped"] is None


def cores_of_jobs(jobs: int) -> list[set[int]]:
    """The cores of each job: equal shares of those of this process, or all for everyone where they don't suffice."""
    if not hasattr(os, "sched_getaffinity"):
        return [set()] * jobs
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // jobs
    return [set(cores[i * share : (i + 1) * share]) for i in range(jobs)] if share else [set(cores)] * jobs


class Runner:
    """Runs what is left of a plan, `jobs` at a time. `failed` has a line for each run that could not be ended."""

    def __init__(self, plan: Plan, jobs: int) -> None:
        runs = plan.runs()
        self.plan, self.jobs = plan, jobs
        self.left = deque(run for run in runs if not ended(run))
        self.failed: list[str] = []
        self.stopped = False
        self._total, self._done = len(runs), len(runs) - len(self.left)
        self._processes: set[asyncio.subprocess.Process] = set()
        self._console = Console(stderr=True)
        self._began = time.monotonic()
        self._began_with = len(self.left)

    async def run(self) -> None:
        """Run all that is left. After a signal the runs that go on stop at their next step, and no other starts."""
        (self.plan.directory / "logs").mkdir(parents=True, exist_ok=True)
        self._say(f"{self._total} runs in {self.plan.directory}, {self._done} of them done, {self.jobs} at a time")
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
        bars = Progress(*columns, TimeElapsedColumn(), console=self._console, transient=True,
                        disable=not self._console.is_interactive)  # fmt: skip
        with self._signals(), bars:
            whole = bars.add_task("study", total=self._total, completed=self._done)
            await asyncio.gather(*(self._work(cores, bars, whole) for cores in cores_of_jobs(self.jobs)))

    async def _work(self, cores: set[int], bars: Progress, whole: TaskID) -> None:
        while self.left and not self.stopped:
            run = self.left.popleft()
            bar = bars.add_task(run.name, total=self.plan.tokens)
            began = time.monotonic()
            status = await self._finish(run, cores, bars, bar)
            bars.remove_task(bar)
            seconds = round(time.monotonic() - began, 1)
            record = {
                "run": run.path.name,
                "status": status,
                "jobs": self.jobs,
                "cores": len(cores),
                "seconds": seconds,
            }
            with (self.plan.directory / LOG).open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            self._tell(run, status, seconds)
            bars.update(whole, completed=self._done)

    async def _finish(self, run: Run, cores: set[int], bars: Progress, bar: TaskID) -> int:
        """Start or resume the run and see it to its end. Returns its exit status."""
        if held(run.path):
            self._say(f"{run.name}: another process runs it; waiting for that one")
        while held(run.path) and not self.stopped:
            await asyncio.sleep(POLL)
        if self.stopped or ended(run):
            return 0
        what = ["--resume", str(run.path)] if (run.path / "config.toml").exists() else [str(self.plan.file), *run.flags]
        with self._log(run).open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "slipstream", "train", "--quiet", *what, stdin=asyncio.subprocess.DEVNULL,
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
            if cores:
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(process.pid, cores)  # before it has started a thread or a process
        self._processes.add(process)
        waiting = asyncio.ensure_future(process.wait())
        while not (await asyncio.wait((waiting,), timeout=POLL))[0]:
            bars.update(bar, completed=tokens_trained(run.path))
        self._processes.discard(process)
        return waiting.result()

    def _tell(self, run: Run, status: int, seconds: float) -> None:
        """A line for the run that has just ended, one way or another."""
        if ended(run):
            self._done += 1
            score = json.loads((run.path / "summary.json").read_text(encoding="utf-8"))["eval"]["final"]
            pace = (time.monotonic() - self._began) / (self._began_with - self._total + self._done)
            left = duration(pace * (self._total - self._done))
            self._say(
                f"[{self._done}/{self._total}] {run.name}: {number(score, 3)} in {duration(seconds)}, {left} left"
            )
        elif self.stopped:
            self._say(f"{run.name}: stopped, goes on with the study")
        else:
            lines = self._log(run).read_text("utf-8", "replace").strip().splitlines()
            self.failed.append(f"{run.name} failed (status {status}): {lines[-1] if lines else 'no word'}")
            self._say(f"{self.failed[-1]}; see {self._log(run)}")

    def _log(self, run: Run) -> Path:
        return self.plan.directory / "logs" / f"{run.path.name}.log"

    def _say(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM go on to the runs: the first stops them after a step, a second at once."""
        loop, numbers = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)

        def stop(number: int) -> None:
            self.stopped = True
            self._say(f"{signal.Signals(number).name}: runs stop after their step; once more stops them at once")
            for process in self._processes:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(number)

        for each in numbers:
            loop.add_signal_handler(each, stop, each)
        try:
            yield
        finally:
            for each in numbers:
                loop.remove_signal_handler(each)


def held(path: Path) -> bool:
    """Whether a process has this run's directory, as the run of a study that was killed with -9 still may."""
    try:
        lock(path / "lock", "r").close()
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def tokens_trained(path: Path) -> int:
    """Tokens that the run in `path` has trained on, from the last whole line of its metrics."""
    try:
        with (path / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            lines = file.read().split(b"\n")[:-1]
        return int(json.loads(lines[-1])["tokens_trained"])
    except (OSError, ValueError, IndexError, KeyError):
        return 0
