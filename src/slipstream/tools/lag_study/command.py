"""The command `slipstream study lag`: run the study, then write its data, table and plots."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from slipstream.config.schema import ConfigError
from slipstream.runtime.run_directory import lock, write_atomically
from slipstream.tools.lag_study.plan import Plan
from slipstream.tools.lag_study.plots import AXES, draw
from slipstream.tools.lag_study.results import RunResult, Study, default_target, markdown, read_result
from slipstream.tools.lag_study.runner import Runner, ended

DATA = "lag.json"


def study_lag(plan: Plan, *, jobs: int, target: float | None, command: Sequence[str]) -> list[str]:
    """Run or resume the runs that have not ended, `jobs` at a time, then write the results.

    Returns a line for each failed run, or one if runs are left after an interrupt. `command` is recorded with the
    results. `target` is the accuracy to reach; None: 0.9 of the mean gain at the smallest lag.

    Raises `ConfigError` before the first run starts if an argument or the configuration of any run is invalid, or
    another study uses the directory.
    """
    if jobs < 1 or plan.seeds < 1:
        raise ConfigError(f"--jobs {jobs} --seeds {plan.seeds}: give at least 1 of each")
    plan.check()
    plan.directory.mkdir(parents=True, exist_ok=True)
    try:
        held = lock(plan.directory / "lock")
    except BlockingIOError:
        raise ConfigError(f"{plan.directory} is in use by another study; stop that one first") from None
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
