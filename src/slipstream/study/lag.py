"""`slipstream study lag`: what does it cost in learning, and gain in time, to train on stale data?

The same task at several lags and corrections over several seeds, each run on equally many tokens: first all runs, then
what their records say, then a table and two pictures. Files of a study: a run directory each, `runs.jsonl` (a line for
each time that a run was started), `lag.json` (all that the table and the pictures are made from), `lag.md`,
`lag_tokens.png`, `lag_seconds.png`.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slipstream.config import ConfigError
from slipstream.directory import lock, write_atomically
from slipstream.study.draw import AXES, draw
from slipstream.study.plan import Plan
from slipstream.study.records import Course, read_course
from slipstream.study.runner import LOG, Runner, ended
from slipstream.study.table import Study, default_target, markdown

DATA = "lag.json"


def study_lag(plan: Plan, *, jobs: int, target: float | None, command: Sequence[str]) -> list[str]:
    """Run what is left of the study, then write its data, table and pictures. Returns a line for each failed run.

    Raises `ConfigError` before any run is started if one of them can't be.
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
    courses = _courses(plan)
    if courses:
        data = {
            "command": shlex.join(command), "tokens": plan.tokens, "corrections": plan.corrections,
            "courses": [asdict(course) for course in courses],
        }  # fmt: skip
        write_atomically(plan.directory / DATA, json.dumps(data) + "\n")
        present(plan.directory, target)
    missing = len(plan.runs()) - len(courses)
    if missing and not runner.failed:
        runner.failed.append(f"{missing} runs are left; the same command goes on with them")
    return runner.failed


def present(directory: Path, target: float | None) -> None:
    """Write table and pictures from the data of a study. Raises `ConfigError` where there is none."""
    path = directory / DATA
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        courses = tuple(Course(**course) for course in data.pop("courses"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} holds no study ({error}); run `slipstream study lag CONFIG.toml --dir {directory}`"
        ) from None
    study = Study(courses, target=default_target(courses) if target is None else target, **data)
    write_atomically(directory / "lag.md", markdown(study))
    print(markdown(study))
    pictures = [(directory / f"lag_{by}.png", by) for by in AXES]
    try:
        for picture, by in pictures:
            draw(study, picture, by)
    except ImportError:
        print(
            "slipstream: no pictures, since matplotlib is missing: pip install 'slipstream-rl[study]', here or where "
            f"you copy {path} to, then: slipstream study lag --draw --dir {directory}",
            file=sys.stderr,
        )
        return
    print("drawn in", " and ".join(str(picture) for picture, _ in pictures))


def _courses(plan: Plan) -> list[Course]:
    """The courses of all runs that have ended."""
    log = plan.directory / LOG
    started: list[dict[str, Any]] = []
    if log.exists():
        started = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    found = []
    for run in filter(ended, plan.runs()):
        times = [line for line in started if line["run"] == run.path.name] or [{"jobs": 1, "cores": 0}]
        found.append(read_course(run, max(t["jobs"] for t in times), min(t["cores"] for t in times)))
    return found
