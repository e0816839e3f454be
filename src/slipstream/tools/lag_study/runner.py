"""Executes the runs of a study as processes, several in parallel. A crash fails one run.

After Ctrl-C active runs finish their step and `Runner.run` returns; the same command continues the study.

Runs that have ended are skipped, and interrupted runs are resumed. Parallel runs get separate CPU cores if the host has
enough of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn
from rich.text import Text

from slipstream.observe.formatting import duration, number
from slipstream.runtime.run_directory import lock
from slipstream.tools.lag_study.plan import Plan, Run

LOG = "runs.jsonl"
POLL_S = 1.0


class Runner:
    """Executes the runs of a plan that have not ended, `jobs` at a time. `failed`: one line for each failed run."""

    def __init__(self, plan: Plan, jobs: int) -> None:
        self.plan, self.jobs = plan, jobs
        self.failed: list[str] = []
        self.stopped = False
        self._left = [run for run in plan.runs() if not ended(run)]
        self._total = len(plan.runs())
        self._done = self._done_before = self._total - len(self._left)
        self._processes: set[asyncio.subprocess.Process] = set()
        self._started = time.monotonic()
        columns, console = (*Progress.get_default_columns()[:3], TimeElapsedColumn()), Console(stderr=True)
        self._bars = Progress(*columns, console=console, transient=True, disable=not console.is_interactive)
        self._bar = self._bars.add_task("study", total=self._total, completed=self._done)

    async def run(self) -> None:
        """Execute the runs. After SIGINT or SIGTERM no run starts, and active runs stop after their step."""
        (self.plan.directory / "logs").mkdir(parents=True, exist_ok=True)
        self._print(f"{self._total} runs in {self.plan.directory}, {self._done} of them done, {self.jobs} at a time")
        loop = asyncio.get_running_loop()
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(each, self._stop, each)
        try:
            with self._bars:
                await asyncio.gather(*map(self._work, cores_of_jobs(self.jobs)))
        finally:
            for each in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(each)

    async def _work(self, cores: set[int]) -> None:
        """Finish runs one after the other on these cores."""
        while self._left and not self.stopped:
            run, started = self._left.pop(0), time.monotonic()
            status = await self._finish(run, cores)
            seconds = round(time.monotonic() - started, 1)
            line = {"run": run.path.name, "status": status, "jobs": self.jobs, "cores": len(cores), "seconds": seconds}
            with (self.plan.directory / LOG).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            self._report(run, status, seconds)
            self._bars.update(self._bar, completed=self._done)

    async def _finish(self, run: Run, cores: set[int]) -> int:
        """Start or resume the run and wait for its end. Returns the exit status."""
        if locked(run.path):
            self._print(f"{run.name}: another process runs it; waiting for that one")
        while locked(run.path) and not self.stopped:
            await asyncio.sleep(POLL_S)
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
                os.sched_setaffinity(process.pid, cores)  # before the process starts threads or processes
        self._processes.add(process)
        bar, waiting = self._bars.add_task(run.name, total=self.plan.tokens), asyncio.ensure_future(process.wait())
        while not (await asyncio.wait((waiting,), timeout=POLL_S))[0]:
            self._bars.update(bar, completed=tokens_trained(run.path))
        self._bars.remove_task(bar)
        self._processes.discard(process)
        return waiting.result()

    def _report(self, run: Run, status: int, seconds: float) -> None:
        """Print a line for a run that ended, was stopped, or failed."""
        if ended(run):
            self._done += 1
            score = json.loads((run.path / "summary.json").read_text(encoding="utf-8"))["eval"]["final"]
            pace = (time.monotonic() - self._started) / (self._done - self._done_before)
            times = f"{duration(seconds)}, {duration(pace * (self._total - self._done))} left"
            self._print(f"[{self._done}/{self._total}] {run.name}: {number(score, 3)} in {times}")
        elif self.stopped:
            self._print(f"{run.name}: stopped; the study resumes it")
        else:
            lines = self._log(run).read_text("utf-8", "replace").strip().splitlines()
            self.failed.append(f"{run.name} failed (status {status}): {lines[-1] if lines else 'no output'}")
            self._print(f"{self.failed[-1]}; see {self._log(run)}")

    def _stop(self, number: int) -> None:
        """Pass a signal on to the runs: the first stops them after a step, the second at once."""
        self.stopped = True
        self._print(f"{signal.Signals(number).name}: runs stop after their step; a second signal stops them at once")
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    def _log(self, run: Run) -> Path:
        return self.plan.directory / "logs" / f"{run.path.name}.log"

    def _print(self, text: str) -> None:
        self._bars.console.print(Text(text), soft_wrap=True)


def ended(run: Run) -> bool:
    """Whether the run reached its end."""
    summary = run.path / "summary.json"
    return summary.exists() and json.loads(summary.read_text(encoding="utf-8"))["stopped"] is None


def cores_of_jobs(jobs: int) -> list[set[int]]:
    """The CPU cores of each job: equal shares, or all cores for each job if there are fewer cores than jobs."""
    if not hasattr(os, "sched_getaffinity"):
        return [set()] * jobs
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // jobs
    return [set(cores[i * share : (i + 1) * share] or cores) for i in range(jobs)]


def locked(path: Path) -> bool:
    """Whether a process holds this run directory: for example a run that outlived its study, killed with SIGKILL."""
    try:
        lock(path / "lock", "r").close()
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def tokens_trained(path: Path) -> int:
    """Trained tokens of the run in `path`, from the last complete line of its metrics."""
    try:
        with (path / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            return int(json.loads(file.read().split(b"\n")[-2])["train/total_tokens"])
    except (OSError, ValueError, IndexError, KeyError):
        return 0
