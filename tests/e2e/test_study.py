"""`slipstream study lag` from the command line: interrupted, resumed, and drawn again from its data."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from slipstream.client import attach
from tests.e2e.test_runs import end, kill, lines, model, options, slipstream, start  # noqa: F401

pytestmark = pytest.mark.e2e
OURS = ("--run.dir", "--loop.max_lag", "--loop.steps")
TOKENS, STEP = 4500, 3 * 4 * 6
SELDOM = {"checkpoint__every": 10, "evaluation__every": 15}


def test_an_interrupted_study_resumes(model: Path, tmp_path: Path) -> None:  # noqa: F811
    """SIGTERM in the second run, then SIGKILL in its rest: that run outlives the study and keeps its lock."""
    directory, config = tmp_path / "study", tmp_path / "task.toml"
    config.write_text("")
    flags = [f for f in options(model, directory, loop__max_tokens=TOKENS, **SELDOM) if not f.startswith(OURS)]
    command = ["study", "lag", config, "--lags=0,3", "--corrections=default", "--seeds=1", "--dir", directory, *flags]
    second = directory / "lag3-default-seed0"
    summaries = []
    for number, status in ((signal.SIGTERM, 1), (signal.SIGKILL, -signal.SIGKILL)):
        before = kill.steps_done(second)
        process = start(*command)
        last = time.monotonic() + 100
        while kill.steps_done(second) < before + 3 and time.monotonic() < last:
            time.sleep(0.02)
        if number == signal.SIGKILL:
            run = attach(second).status()["pid"]
            os.kill(run, signal.SIGSTOP)
        process.send_signal(number)
        process.communicate(timeout=60)
        assert process.returncode == status
        summaries.append((directory / "lag0-default-seed0" / "summary.json").read_bytes())

    refused = slipstream(*command, status=1)
    assert "2 runs" in refused.stderr and "1 of them done" in refused.stderr
    assert f"{second} is in use by another process; stop that run first" in refused.stderr
    os.kill(run, signal.SIGKILL)
    end(start(*command))
    assert set(summaries) == {(directory / "lag0-default-seed0" / "summary.json").read_bytes()}
    assert [line["step"] for line in lines(second / "metrics.jsonl")] == list(range(1, -(-TOKENS // STEP) + 1))
    courses = json.loads((directory / "lag.json").read_text())["courses"]
    for found in courses:
        assert TOKENS <= found["tokens"] < TOKENS + STEP
        assert found["evaluations"]["tokens"][0] == 0 and len(found["evaluations"]["tokens"]) > 2
    histogram = json.loads((second / "summary.json").read_text())["lag"]["histogram"]
    # Version 0 samples the first fill of the buffer; later tokens have a lag of the bound or one less.
    assert sum(n for lag, n in histogram.items() if int(lag) < 2) <= 2 * STEP and "4" not in histogram
    assert courses[0]["lag_mean"] == 0 and courses[1]["lag_mean"] > 2
    table = (directory / "lag.md").read_text()
    assert "| 0 | default | 1 |" in table and "| 3 | default | 1 |" in table

    (directory / "lag.md").unlink()
    again = slipstream("study", "lag", "--draw", "--dir", directory, "--target", "0.5")
    assert "held-out accuracy of 50.0%" in (directory / "lag.md").read_text()
    pictures = [(directory / f"lag_{by}.png").exists() for by in ("tokens", "seconds")]
    assert all(pictures) or "matplotlib is missing: pip install 'slipstream-rl[study]'" in again.stderr


def test_a_failed_run_leaves_the_others_unaffected(model: Path, tmp_path: Path) -> None:  # noqa: F811
    """Each run reports the missing model; the study prints these errors and ends with status 1."""
    config = tmp_path / "task.toml"
    config.write_text("")
    flags = [f for f in options(tmp_path / "gone", tmp_path) if not f.startswith(OURS)]
    command = ["study", "lag", config, "--lags=0,1", "--corrections=default", "--seeds=1", "--loop.max_tokens=500"]
    failed = slipstream(*command, "--dir", tmp_path / "study", "--jobs=2", *flags, status=1)
    for lag in (0, 1):
        assert f"lag {lag}, default, seed 0 failed (status 2): slipstream: model.path" in failed.stderr
    assert "--draw" in slipstream("study", "lag", "--dir", tmp_path, status=2).stderr
