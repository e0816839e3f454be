"""Control of a running run from other processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import slipstream as package
from slipstream.client import RunHandle, attach
from slipstream.config.schema import ConfigError
from tests import warm
from tests.e2e.test_runs import end, lines, model, options, refused, slipstream, start  # noqa: F401

pytestmark = pytest.mark.e2e


def begin(model: Path, directory: Path, **more: Any) -> subprocess.Popen[str]:  # noqa: F811
    """Start a run that does not end by itself."""
    config = directory.parent / "empty.toml"
    config.write_text("")
    changes = {
        "loop__steps": 100_000,
        "evaluation__every": 0,
        "evaluation__tasks": 0,
        "checkpoint__every": 1000,
        **more,
    }
    return start("train", config, *options(model, directory, **changes), cwd=directory.parent)


def wait_until(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """The first true value of `condition`, which may raise `ConfigError` meanwhile."""
    last = time.monotonic() + seconds
    while True:
        try:
            if value := condition():
                return value
        except ConfigError:
            pass
        assert time.monotonic() < last, "it did not happen"
        time.sleep(0.05)


def step(run: RunHandle) -> int:
    return int(run.status()["step"])


@pytest.fixture
def running(model: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], RunHandle]]:  # noqa: F811
    process = begin(model, tmp_path / "run")
    run = wait_until(lambda: attach(tmp_path / "run"))
    wait_until(lambda: run.status()["state"] == "running" and step(run) >= 2)
    yield process, run
    if process.poll() is None:
        process.kill()
        process.communicate()


def test_a_run_is_controlled_from_another_process(
    running: tuple[subprocess.Popen[str], RunHandle], capfd: pytest.CaptureFixture[str]
) -> None:
    process, run = running
    status = run.status()
    assert status["pid"] == process.pid and status["steps"] == 100_000 and status["name"] == "run"
    assert [engine["alive"] for engine in status["engines"]] == [True]
    assert {worker["name"] for worker in status["workers"]} == {"generator 0", "trainer"}
    records = wait_until(lambda: len(found := run.metrics(last=2)) == 2 and found)
    assert [record["step"] for record in records] == [records[-1]["step"] - 1, records[-1]["step"]]

    completion = run.generate("w1 w2", max_tokens=3, temperature=0)
    assert list(completion.prompt_ids) == [1, 2] and len(completion.token_ids) == 3 == completion.spans[-1].end
    # an engine serves the trainer's version once it is published
    assert completion.versions[0] >= status["version"] - 1 and completion.text.count("w") == 3
    for wrong, said in (
        (lambda: run.generate("w1", bogus=1), "generate has no option 'bogus'; it takes temperature"),
        (lambda: run.generate("w1 " * 20_000), "share a context of"),
        (lambda: run.generate("w1" * 2**20), "the request is longer than 1048576 bytes"),
        (lambda: run.generate(5), "give text, token ids, or messages"),  # type: ignore[arg-type]
        (lambda: run.generate("w1", temperature="hot"), "temperature = 'hot' must be"),
        (lambda: run.scale(0), "engines = 0 must be a whole number from 1 to 4096"),
        (lambda: run.scale(10**6), "engines = 1000000 must be a whole number from 1 to 4096"),
        (lambda: run.metrics(last=0), "last = 0 must be a whole number from 1 to 1000"),
        (lambda: run._ask("dance"), "there is no command 'dance'; there are status, metrics"),
        (lambda: run._ask("pause", why="so"), "pause: got an unexpected keyword argument 'why'"),
    ):
        with pytest.raises(ConfigError, match=said):
            wrong()

    assert run.pause() == run.pause() == "paused"
    wait_until(lambda: not run.status()["groups_in_flight"] and "step" not in str(run.status()["workers"]))
    paused = step(run)
    time.sleep(0.5)
    assert step(run) == paused and run.status()["state"] == "paused"
    assert run.generate("w1", max_tokens=1).text, "engines serve a paused run"
    written = run.checkpoint()
    assert written.name == f"step_{paused}" and (written / "manifest.json").exists()
    assert slipstream("resume", run.run).stdout == f"{run.run}: running\n"
    wait_until(lambda: step(run) > paused)
    assert int(run.checkpoint().name.removeprefix("step_")) > paused

    said = slipstream("status", run.run).stdout
    assert said.startswith("run: running, step ") and "generator 0" in said and "process" in said
    listed = json.loads(slipstream("runs", "--dir", Path(run.run).parent, "--json").stdout)
    assert [row["state"] for row in listed] == ["running"]
    assert "engines = 0" in refused(capfd, "scale", run.run, "0")
    assert slipstream("scale", run.run, "1").stdout == f"{run.run}: running; engines: 1 before, 1 now\n"
    assert "'two' is not a number of engines" in refused(capfd, "scale", run.run, "two")
    assert "--loop.steps=3 is no option of this command" in refused(capfd, "pause", run.run, "--loop.steps=3")

    assert run.pause() == "paused" and run.stop() == run.stop() == "stopping"
    end(process)
    pauses = [event for event in lines(Path(run.run) / "events.jsonl") if event["kind"] == "paused"]
    assert len(pauses) == 2 and all(event["end"] > event["start"] for event in pauses), "a stop ends the last one"
    summary = json.loads((Path(run.run) / "summary.json").read_text())
    assert summary["stopped"] == "slipstream stop" and not (Path(run.run) / "control").exists()
    assert summary["steps"] == len(lines(Path(run.run) / "metrics.jsonl"))
    for command in ("status", "pause", "stop"):
        assert "continue it with `slipstream train --resume" in refused(capfd, command, run.run)
    with pytest.raises(ConfigError, match="the run is over"):
        run.status()
    assert "stopped" in slipstream("runs", "--dir", Path(run.run).parent).stdout


def test_a_killed_controller_is_named_and_its_run_resumed(
    running: tuple[subprocess.Popen[str], RunHandle], capfd: pytest.CaptureFixture[str]
) -> None:
    process, run = running
    run.pause()
    checkpoint = run.checkpoint()
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(ConfigError, match="did not answer within"):
        attach(run.run, timeout=0.3)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    host = Path(run.run) / "control" / "host"
    here = host.read_text()
    host.write_text("elsewhere")
    assert "its controller is on host elsewhere; give the command there" in refused(capfd, "status", run.run)
    host.write_text(here)
    said = refused(capfd, "status", run.run)
    assert "the run was killed or failed; continue it with" in said and said.count("\n") == 1
    assert "dead" in slipstream("runs", "--dir", Path(run.run).parent).stdout
    first = int(checkpoint.name.removeprefix("step_"))
    again = start("train", "--resume", run.run, f"--loop.steps={first + 2}")
    assert wait_until(lambda: run.status()["state"])
    end(again)


def test_many_clients_at_once(running: tuple[subprocess.Popen[str], RunHandle]) -> None:
    process, run = running
    client = (
        "import sys, slipstream\n"
        "run = slipstream.attach(sys.argv[1])\n"
        "assert all(run.status()['step'] and run.generate('w1', max_tokens=2).text for _ in range(20))\n"
        "assert run.checkpoint().name.startswith('step_')\n"
        "assert 'torch' not in sys.modules\n"
    )
    before = step(run)
    clients = [subprocess.Popen([sys.executable, "-c", client, run.run]) for _ in range(3)]
    assert [one.wait(60) for one in clients] == [0, 0, 0]
    assert step(run) > before, "the run goes on meanwhile"
    run.stop()
    end(process)


STALLED = """
import sys
from slipstream.scheduling.loop_state import LoopState
ready = LoopState.startable
LoopState.startable = lambda self: 0 if self.step >= 2 else ready(self)
from slipstream.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_run_without_progress_ends_and_names_the_waiting_calls(model: Path, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "empty.toml").write_text("")
    flags = options(model, tmp_path / "run", runtime__progress_timeout=3, evaluation__tasks=0, evaluation__every=0)
    command = [sys.executable, "-c", STALLED, "train", str(tmp_path / "empty.toml"), *flags]
    process = warm.Command(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    said = end(process, status=1).stderr
    assert "the run has made no progress for 5.25 s (runtime.progress_timeout = 3): after step 3 of 6" in said
    assert "the loop: waits in training_loop (run.py, line" in said and "next_batch (run.py, line" in said
    assert "trainer: no pending call, last progress" in said and "slipstream train --resume" in said


HANGS = """
import time

class Engine:
    def __init__(self, *arguments):
        print("loading weights", flush=True)
        time.sleep(600)
"""


@pytest.mark.parametrize("by", ["SIGINT", "SIGTERM", "slipstream stop", "the limit"])
def test_a_run_that_hangs_in_its_start_ends_at_once(by: str, model: Path, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "engine.py").write_text(HANGS)
    directory, limit = tmp_path / "run", 5 if by == "the limit" else 600
    engine = f"{tmp_path / 'engine.py'}:Engine"
    process = begin(model, directory, generator__engine=engine, runtime__start_timeout=limit)
    log = directory / "logs" / "generator_0.log"
    wait_until(lambda: log.exists() and "loading" in log.read_text() and attach(directory))
    if by == "the limit":
        said = end(process, status=1).stderr
        assert "slipstream: generator 0 has not started within runtime.start_timeout = 5 s; raise that if" in said
        assert said.endswith(f"(log: {log})\nloading weights\n")
        return
    if by == "slipstream stop":
        assert attach(directory).stop() == "stopping"
    else:
        process.send_signal(signal.Signals[by])
    said = end(process, status=130, seconds=20).stderr
    assert said.endswith(f"{by}: stopping at once, before the first step\nslipstream: stopped at once\n")


SLOW = """
import asyncio
from slipstream.environments.base import Task

class Slow:
    train = [Task(str(i), "w1") for i in range(9)]
    test = ()

    async def rollout(self, task, policy):
        await policy.sample(task.prompt)
        await asyncio.sleep(6)
        return int(task.id) % 2
"""


def test_episodes_in_flight_have_their_own_time_limit(model: Path, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "empty.toml").write_text("")
    flags = options(
        model, tmp_path / "run", environment__name=tmp_path / "slow.py:Slow", environment__options="{}", loop__steps=1,
        loop__groups_per_step=1, loop__group_size=2, runtime__progress_timeout=2, evaluation__tasks=0,
        evaluation__every=0,
    )  # fmt: skip
    slipstream("train", tmp_path / "empty.toml", *flags)


def test_a_directory_without_a_run_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "it is no directory; give that of a run" in refused(capfd, "status", tmp_path / "gone")
    assert "it is no run directory" in refused(capfd, "stop", tmp_path)
    assert slipstream("runs", "--dir", tmp_path).stdout.startswith("no runs in")
    with pytest.raises(package.ConfigError, match="no run directory"):
        package.attach(tmp_path)
