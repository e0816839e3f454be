"""Trackers follow a run: each record once, over resumes; one that raises, hangs or loses its controller is reported."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli import main
from slipstream.config.loading import load_config
from slipstream.config.schema import ConfigError
from slipstream.controller import trackers
from slipstream.controller.trackers import TrackerProcess
from slipstream.observe.trackers import BATCH, MAX_TEXT, Follower, _shorten, check_installed, numbers
from tests.observe.tracker_doubles import Records
from tests.processes import descendants, lives

DOUBLES = f"{Path(__file__).with_name('tracker_doubles.py')}:"
REQUIRED = ["--model.path=m", "--environment.name=addition"]


def follow(records: Records, name: str = "Writes", project: str = "") -> Follower:
    """Send all that is recorded, to the end."""
    follower = Follower(records.path, DOUBLES + name, project)
    asyncio.run(follower.follow(lambda: True))
    return follower


def steps(records: Records, kind: str = "metrics") -> list[int]:
    return [call[1] for call in records.calls(kind)]


def test_each_record_is_sent_once_and_the_id_is_kept(tmp_path: Path) -> None:
    records = Records(tmp_path / "run", 2)
    records.evaluate(2)
    follow(records, project="p")
    assert records.calls("start", "finish") == [["start", "p", ""], ["finish", None, False]]
    assert steps(records) == [0, 1, 2, 2]  # evaluations at 0 and 2
    assert records.calls("metrics")[1] == ["metrics", 1, {"version": 1, "time/wall_s": 1.5, "reward/mean": 1.0}]
    assert records.calls("metrics")[3][2] == {"eval/score": 0.25, "eval/failures/timeout": 1}
    assert steps(records, "eval/samples") == [0, 2] and steps(records, "rollouts") == [1, 2]
    rows = records.calls("rollouts")[0][2]
    assert [row["task_id"] for row in rows] == ["0", "2", "5", "7", "10", "12", "15", "17"]
    assert rows[2]["prompt"] == "1+5=" and rows[2]["reward"] == 0.25
    records.step(3)
    records.end(3)
    assert follow(records).step == 3
    assert records.calls("start", "finish")[2:] == [["start", "", "an id"], ["finish", "report.html", True]]
    assert steps(records) == [0, 1, 2, 2, 3]


def test_a_tracker_continues_after_the_one_that_it_waited_for(tmp_path: Path) -> None:
    records = Records(tmp_path / "run", 2)
    waiting = Follower(records.path, f"{DOUBLES}Writes", "")
    follow(records)
    asyncio.run(waiting.follow(lambda: True))
    assert steps(records) == [0, 1, 2] and records.calls("start")[1] == ["start", "", "an id"]


@pytest.mark.parametrize(("name", "then"), [("Writes", [2, 3, 4]), ("Keeps", [4])])
def test_lost_steps_are_replaced_or_skipped(tmp_path: Path, name: str, then: list[int]) -> None:
    records = Records(tmp_path / "run", 3)
    records.evaluate(3)
    follow(records, name)
    assert steps(records) == [0, 1, 2, 3, 3]
    records.truncate(1)
    follow(records, name)
    for step in (2, 3, 4):
        records.step(step, reward=9.0)
    follow(records, name)
    assert steps(records)[5:] == then
    assert records.calls("rewind") == ([["rewind", 1]] if name == "Writes" else [])


def test_a_long_run_is_sent_in_order_with_fewer_tables(tmp_path: Path) -> None:
    records, last = Records(tmp_path / "run"), 2 * BATCH + 30
    for step in range(1, last + 1):
        records.step(step)
        if step % 50 == 0:
            records.evaluate(step)
    follow(records)
    sent = steps(records)
    assert sent == sorted(sent) and len(sent) == last + 1 + last // 50
    assert steps(records, "rollouts") == [*range(1, 100), *range(100, last + 1, 10)]


def test_numbers_and_texts() -> None:
    record = {"step": 3, "a/b": 1, "c": None, "d": True, "e": [1], "f": {"g": 2, "h": {"i": 0.5}}, "j": "k"}
    assert dict(numbers(record)) == {"a/b": 1, "f/g": 2, "f/h/i": 0.5}
    assert _shorten("\ud800") == "?" and _shorten("x" * MAX_TEXT) == "x" * MAX_TEXT
    assert _shorten("x" * (MAX_TEXT + 5)).endswith("x … (5 characters more)")


def run_with(
    records: Records, *names: str, during: Callable[[list[TrackerProcess]], Any] = lambda _: None
) -> tuple[list[str], set[int]]:
    """Start trackers, write a step, and end. Returns the warnings, and the processes that are left."""
    warnings: list[str] = []
    others = descendants(os.getpid())

    async def main() -> set[int]:
        running = [TrackerProcess(DOUBLES + name, "", records.path, warnings.append) for name in names]
        records.step(1)
        if waits := during(running):
            await waits
        records.step(2)
        records.end(2)
        await asyncio.gather(*(tracker.close() for tracker in running))
        return {pid for pid in descendants(os.getpid()) - others if lives(pid)}

    return warnings, asyncio.run(main())


def test_a_tracker_that_raises_is_reported_and_the_others_are_complete(tmp_path: Path) -> None:
    records = Records(tmp_path / "run")
    warnings, left = run_with(records, "Writes", "Raises", "Missing")
    assert len(warnings) == 2 and not left
    raised, missing = sorted(warnings, key=lambda line: "Missing" in line)
    log = records.path / "logs" / "tracker_Raises.log"
    assert "tracker Raises failed: ConnectionError: no route to the tracker." in raised and str(log) in raised
    assert f"slipstream track {records.path} --to {DOUBLES}Raises" in raised
    assert "no route to the tracker" in log.read_text() and "in metrics" in log.read_text()
    assert "has no attribute 'Missing'" in missing and "Traceback" not in "".join(warnings)
    assert steps(records) == [0, 1, 2] and records.calls("finish") == [["finish", "report.html", True]]


def test_a_tracker_that_hangs_is_reported_and_killed_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "HANG_S", 0.5)
    monkeypatch.setattr(trackers, "DRAIN_S", 1.0)
    records = Records(tmp_path / "run")
    reported = asyncio.Event()
    warnings, left = run_with(records, "Hangs", during=lambda running: wait_for_warning(running, reported))
    assert not left and len(warnings) == 2
    assert "tracker Hangs has made no progress for 0.5 s; its log has its stack" in warnings[0]
    assert "tracker Hangs did not finish within 1 s and was killed" in warnings[1]


async def wait_for_warning(running: list[TrackerProcess], reported: asyncio.Event) -> None:
    warn = running[0]._warn
    running[0]._warn = lambda text: (warn(text), reported.set())[0]
    await reported.wait()


def test_a_tracker_ends_with_a_controller_that_is_killed(tmp_path: Path) -> None:
    """Ctrl-C and SIGTERM don't reach it; when its controller is killed, it sends what is recorded and ends."""
    records = Records(tmp_path / "run", 1)
    code = (
        "import asyncio, pathlib, sys\nfrom slipstream.controller.trackers import TrackerProcess\n"
        "async def main():\n"
        "    tracker = TrackerProcess(sys.argv[1], '', pathlib.Path(sys.argv[2]), print)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())"
    )
    controller = subprocess.Popen(
        [sys.executable, "-c", code, DOUBLES + "Writes", str(records.path)], start_new_session=True
    )
    until(lambda: (records.path / "calls.jsonl").exists() and 1 in steps(records))
    [tracker] = descendants(controller.pid)
    os.kill(tracker, signal.SIGINT)
    os.kill(tracker, signal.SIGTERM)
    records.step(2)
    until(lambda: 2 in steps(records))
    records.step(3)
    controller.kill()
    controller.wait()
    until(lambda: not lives(tracker))
    assert steps(records) == [0, 1, 2, 3] and records.calls("finish") == [["finish", None, False]]


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    last = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < last
        time.sleep(0.01)


def test_a_tracker_loads_no_tensor_library() -> None:
    modules = "slipstream.runtime.worker_main, slipstream.observe.trackers, slipstream.observe.tracker_backends"
    code = f"import {modules}, sys; sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'pandas')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_mistakes_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r'"Wandb" is unknown \(did you mean "wandb"\?\); give "wandb", "trackio"'):
        load_config(None, [*REQUIRED, '--observe.trackers=["Wandb"]'])
    with pytest.raises(ConfigError, match="names a tracker twice"):
        load_config(None, [*REQUIRED, '--observe.trackers=["a:T", "b:T"]'])
    with pytest.raises(ConfigError, match=r"does nothing without observe\.trackers"):
        load_config(None, [*REQUIRED, "--observe.project=p"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"wandb is not installed; pip install 'slipstream-rl\[wandb\]'"):
        check_installed(["a:T", "wandb"])


def test_a_run_is_uploaded_afterwards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = Records(tmp_path / "run", 2)
    assert main(["track", str(records.path), "--to", DOUBLES + "Writes", "--project", "p"]) == 0
    assert "up to step 2" in capsys.readouterr().out and steps(records) == [0, 1, 2]
    assert main(["track", str(tmp_path), "--to", "wandb"]) == 2 and "holds no run" in capsys.readouterr().err
    assert main(["track", str(records.path), "--to", "x"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
