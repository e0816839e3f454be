"""The command `slipstream study lag`: execute the runs as processes, then write their data, a table and plots.

A crash fails one run. After Ctrl-C active runs finish their step. The same command continues the study: it skips runs
that have ended, and resumes interrupted ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from slipstream.config.schema import ConfigError
from slipstream.observe.formatting import duration, number
from slipstream.runtime.run_directory import lock, write_atomically
from slipstream.runtime.run_files import read_summary
from slipstream.tools.lag_study.plan import Plan, Run
from slipstream.tools.lag_study.plots import AXES, draw
from slipstream.tools.lag_study.results import RunResult, Study, default_target, markdown, read_result

DATA = "lag.json"
MAX_RUNS = 1000  # at once, or of a lag and a correction


def study_lag(plan: Plan, *, jobs: int, target: float | None, command: Sequence[str]) -> list[str]:
    """Run or resume the runs that have not ended, `jobs` at a time, then write the results, with `command`.

    `target` is the accuracy to reach, by default that of `default_target`. Returns a line for each failed run, or one
    if runs are left after an interrupt. Raises `ConfigError` before any run starts.
    """
    if not (1 <= jobs <= MAX_RUNS and 1 <= plan.seeds <= MAX_RUNS):
        raise ConfigError(f"--jobs {jobs} --seeds {plan.seeds}: give at least 1 of each, and at most {MAX_RUNS}")
    if target is not None and not math.isfinite(target):
        raise ConfigError(f"--target {target}: give a finite number")
    plan.check()
    try:
        plan.directory.mkdir(parents=True, exist_ok=True)
        held = lock(plan.directory / "lock")
    except BlockingIOError:
        raise ConfigError(f"{plan.directory} is in use by another study; stop that one first") from None
    except OSError as error:
        raise ConfigError(f"--dir {plan.directory}: {error.strerror}; name another directory") from None
    with held:
        runner = Runner(plan, jobs)
        asyncio.run(runner.run())
    results = [asdict(read_result(run)) for run in plan.runs() if ended(run)]
    if results:
        data = {"command": shlex.join(command), "tokens": plan.tokens, "corrections": plan.corrections}
        write_atomically(plan.directory / DATA, json.dumps(data | {"courses": results}) + "\n")
        present(plan.directory, target)
    missing = len(plan.runs()) - len(results)
    return runner.failed or ([f"{missing} runs are left; the same command continues with them"] if missing else [])


def present(directory: Path, target: float | None) -> None:
    """Write table and plots from the data of a study. Raises `ConfigError` if `directory` has no such data."""
    path = directory / DATA
    try:
        data, known = json.loads(path.read_text(encoding="utf-8")), [field.name for field in fields(RunResult)]
        results = tuple(RunResult(*(result[name] for name in known)) for result in data["courses"])
        target = default_target(results) if target is None else target
        study = Study(results, data["corrections"], data["tokens"], target, data["command"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} holds no study ({error}); run `slipstream study lag CONFIG.toml --dir {directory}`"
        ) from None
    write_atomically(directory / "lag.md", markdown(study))
    print(markdown(study))
    plots = {by: directory / f"lag_{by}.png" for by in AXES}
    try:
        for by, plot in plots.items():
            draw(study, plot, by)
    except ImportError:
        print(
            "slipstream: no plots, since matplotlib is missing: pip install 'slipstream-rl[study]', here or where "
            f"you copy {path} to, then: slipstream study lag --draw --dir {directory}",
            file=sys.stderr,
        )
        return
    print("drawn in", " and ".join(map(str, plots.values())))


class Runner:
    """Executes the runs of a plan that have not ended, `jobs` at a time. `failed`: one line for each failed run."""

    def __init__(self, plan: Plan, jobs: int) -> None:
        self.plan, self.jobs = plan, jobs
        self.failed: list[str] = []
        self._left = [run for run in plan.runs() if not ended(run)]
        self._total = len(plan.runs())
        self._done = self._done_before = self._total - len(self._left)
        self._processes: set[asyncio.subprocess.Process] = set()
        self._started, self._stopped = time.monotonic(), False

    async def run(self) -> None:
        """Execute the runs. After SIGINT or SIGTERM no run starts, and active runs stop after their step."""
        (self.plan.directory / "logs").mkdir(parents=True, exist_ok=True)
        _print(
            f"{self._total} runs in {self.plan.directory}, {self._done} of them done, {self.jobs} at a time; see "
            f"`slipstream runs --dir {self.plan.directory}`"
        )
        loop = asyncio.get_running_loop()
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(each, self._stop, each)
        await asyncio.gather(*map(self._work, cores_of_jobs(self.jobs)))

    async def _work(self, cores: set[int]) -> None:
        """Finish runs one after the other on these cores."""
        while self._left and not self._stopped:
            run, started = self._left.pop(0), time.monotonic()
            status = await self._finish(run, cores)
            self._report(run, status, time.monotonic() - started)

    async def _finish(self, run: Run, cores: set[int]) -> int:
        """Start or resume the run and wait for its end. Returns the exit status."""
        what = ["--resume", str(run.path)] if (run.path / "config.toml").exists() else [str(self.plan.file), *run.flags]
        with self.plan.log(run).open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "slipstream", "train", "--quiet", *what, stdin=asyncio.subprocess.DEVNULL,
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        if cores:
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(process.pid, cores)  # before the process starts threads or processes
        self._processes.add(process)
        status = await process.wait()
        self._processes.discard(process)
        return status

    def _report(self, run: Run, status: int, seconds: float) -> None:
        """Print a line for a run that ended, was stopped, or failed."""
        if ended(run):
            self._done += 1
            score = read_summary(run.path)["eval"]["final"]
            pace = (time.monotonic() - self._started) / (self._done - self._done_before)
            times = f"{duration(seconds)}, {duration(pace * (self._total - self._done))} left"
            _print(f"[{self._done}/{self._total}] {run.name}: {number(score, 3)} in {times}")
        elif self._stopped:
            _print(f"{run.name}: stopped; the study resumes it")
        else:
            lines = self.plan.log(run).read_text("utf-8", "replace").strip().splitlines()
            self.failed.append(f"{run.name} failed (status {status}): {lines[-1] if lines else 'no output'}")
            _print(f"{self.failed[-1]}; see {self.plan.log(run)}")

    def _stop(self, number: int) -> None:
        """Pass a signal on to the runs: the first stops them after a step, the second at once."""
        self._stopped = True
        _print(f"{signal.Signals(number).name}: runs stop after their step; a second signal stops them at once")
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def ended(run: Run) -> bool:
    """Whether the run reached its end."""
    return read_summary(run.path).get("stopped", "") is None


def cores_of_jobs(jobs: int) -> list[set[int]]:
    """The CPU cores of each job: equal shares, or all cores for each job if there are fewer cores than jobs."""
    if not hasattr(os, "sched_getaffinity"):
        return [set()] * jobs
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // jobs
    return [set(cores[i * share : (i + 1) * share] or cores) for i in range(jobs)]
