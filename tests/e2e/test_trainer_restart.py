"""A trainer rank that dies or hangs costs the steps since the last checkpoint, and the run continues to its end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.observe.run_data import load_run
from slipstream.observe.timeline import length, timeline
from tests import warm
from tests.e2e.test_runs import end, kill, model
from tests.processes import descendants, output

pytestmark = pytest.mark.e2e
__all__ = ["model"]  # the fixture
STEPS = 10
PIPES: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
IMPATIENT = """
import sys
from slipstream.runtime import process, worker_process
worker_process.HEARTBEAT_S, worker_process.HEARTBEAT_TIMEOUT_S, process.TERMINATION_GRACE_S = 0.1, 2.0, 0.5
from slipstream.cli import main
sys.exit(main())
"""


SLOW_LINKS = """
import time
from pathlib import Path
from slipstream.sync.nccl import NcclReceiver, NcclSender
from slipstream.sync.shared import SharedReceiver, SharedSender

HERE = Path(__file__).parent

def wait_at(phase):
    while (HERE / f"hold {phase}").exists():
        (HERE / f"reached {phase}").touch()
        time.sleep(0.01)

def slow(base):
    class Slow(base):
        def send(self, handle):
            wait_at("send")
            super().send(handle)
        def release(self, handle):
            wait_at("release")
            super().release(handle)
    return Slow

class Shared: Sender, Receiver = slow(SharedSender), SharedReceiver
class Nccl: Sender, Receiver = slow(NcclSender), NcclReceiver
"""


def start(model: Path, directory: Path, max_lag: int, *flags: str, path: Path | None = None) -> subprocess.Popen[str]:
    """Start a run whose processes count as hung after two seconds of silence. Processes import from `path`, too."""
    common = kill.arguments(model, directory, max_lag)[len(kill.MODULE) :]
    own = [f"--loop.steps={STEPS}", "--checkpoint.every=2", "--evaluation.every=4", "--runtime.max_restarts=3", *flags]
    command = [sys.executable, "-c", IMPATIENT, *common, *own]
    paths = os.pathsep.join(p or "." for p in (*([str(path)] if path else []), *sys.path))
    environment = os.environ | {"PYTHONPATH": paths}
    return warm.Command(command, env=environment, **PIPES)


def processes(run: subprocess.Popen[str], log: str) -> list[int]:
    """Processes of a run that write this log."""
    return [process for process in descendants(run.pid) if Path(output(process)).name == log]


def when(condition: Callable[[], Any], run: subprocess.Popen[str], seconds: float = 100.0) -> Any:
    """Wait until the condition holds, while the run lives. Returns its value."""
    last = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < last and run.poll() is None, run.communicate(timeout=20)
        time.sleep(0.003)
    return found


def end_trainer(
    run: subprocess.Popen[str], how: signal.Signals = signal.SIGKILL, log: str = "trainer.log"
) -> list[int]:
    """Send a signal to the trainer's processes, and return them."""
    ended: list[int] = when(lambda: processes(run, log), run)
    for process in ended:
        os.kill(process, how)
    return ended


@pytest.fixture(scope="module")
def undisturbed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The weights of a synchronous run without a fault."""
    directory = tmp_path_factory.mktemp("undisturbed") / "run"
    end(start(model, directory, 0))
    return kill.weights(directory)


def check(directory: Path, said: str, restarts: int, wanted: dict[str, Any] | None = None) -> int:
    """Check that the run conserved its work, and its final weights if known. Returns the lost steps."""
    summary = kill.audit(directory, STEPS)
    found = re.findall(
        r"restarts? \((\d) of runtime.max_restarts = 3\) and the run continues from step \d+: (\d+) step", said
    )
    assert [number for number, _ in found] == [str(i + 1) for i in range(restarts)]
    lost = sum(int(steps) for _, steps in found)
    assert (summary["trainer_restarts"], summary["steps_lost"]) == (restarts, lost)
    metrics = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    if f"continues from step {STEPS}:" not in said:  # else no step follows the last restart
        assert (metrics[-1]["train/restarts"], metrics[-1]["train/steps_lost"]) == (restarts, lost)
    run = load_run(directory)
    faults, recoveries = ([e for e in run.events if e["kind"] == kind] for kind in ("fault", "recovery"))
    assert sum(e["steps_lost"] for e in recoveries) == lost and len(faults) == len(recoveries) <= restarts
    assert all(e["rewound_to"] < e["start"] < e["end"] for e in recoveries)
    found = timeline(run)
    for name, value in (("time/window_s", found.window_s), ("train/busy_s", length(found.trainer.busy))):
        assert value == pytest.approx(metrics[-1][name], rel=0.01), name
    if wanted:
        assert kill.same_bits(kill.weights(directory), wanted)
    return lost


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("max_lag", [0, 2])
def test_a_run_continues_after_the_death_of_its_trainer(
    how: signal.Signals, max_lag: int, model: Path, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    """Twice, before the first checkpoint and after it. The engine stays up."""
    run = start(model, tmp_path / "run", max_lag)
    engines = when(lambda: processes(run, "generator_0.log"), run)
    for step in (1, 5):
        when(lambda step=step: kill.steps_done(tmp_path / "run") >= step, run)
        ended_trainers = end_trainer(run, how)
        when(lambda ended=ended_trainers: not set(processes(run, "trainer.log")) <= set(ended), run)
        assert processes(run, "generator_0.log") == engines
    ended = end(run)
    check(tmp_path / "run", ended.stderr, 2, undisturbed if max_lag == 0 else None)


def test_the_death_of_another_rank_restarts_all_ranks(model: Path, tmp_path: Path) -> None:
    run = start(model, tmp_path / "run", 2, "--trainer.ranks=2")
    when(lambda: kill.steps_done(tmp_path / "run") >= 3, run)
    end_trainer(run, log="trainer_1.log")
    ended = end(run)
    assert re.search(r"trainer rank 1 died \(log: .*trainer_1.log\): It was killed by SIGKILL", ended.stderr)
    check(tmp_path / "run", ended.stderr, 1)


@pytest.mark.parametrize("step", [4, STEPS])
def test_a_trainer_that_dies_while_it_writes_a_checkpoint(
    step: int, model: Path, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    """The checkpoint before is used, or this one if it is whole."""
    run = start(model, tmp_path / "run", 0)
    partial = tmp_path / "run" / "checkpoints" / f"step_{step}.partial"
    when(lambda: kill.steps_done(tmp_path / "run") >= step - 2, run)
    when(lambda: partial.exists() or (run.poll() is None and partial.with_suffix("").exists()), run)
    end_trainer(run)
    check(tmp_path / "run", end(run).stderr, 1, undisturbed)


@pytest.mark.parametrize("phase", ["send", "release"])
@pytest.mark.parametrize(("link", "max_lag", "replicas"), [("Shared", 0, 1), ("Nccl", 2, 2)])
def test_a_trainer_that_dies_in_a_publish(
    phase: str, link: str, max_lag: int, replicas: int, model: Path, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    """Before and after engines serve the version. Engines stay up, and load the version of the checkpoint."""
    (tmp_path / "slow_links.py").write_text(SLOW_LINKS)
    flags = [f"--sync.link=slow_links:{link}", f"--generator.replicas={replicas}"]
    run = start(model, tmp_path / "run", max_lag, *flags, path=tmp_path)
    engines = when(lambda: processes(run, "generator_0.log"), run)
    when(lambda: kill.steps_done(tmp_path / "run") >= 4, run)
    (tmp_path / f"hold {phase}").touch()
    when((tmp_path / f"reached {phase}").exists, run)
    time.sleep(0.2)  # until engines wait for the trainer
    (tmp_path / f"hold {phase}").unlink()
    end_trainer(run)
    when(lambda: kill.steps_done(tmp_path / "run") >= 6, run)
    assert processes(run, "generator_0.log") == engines
    check(tmp_path / "run", end(run).stderr, 1, undisturbed if max_lag == 0 else None)


def test_the_last_restart_ends_the_run_with_the_command_that_resumes_it(
    model: Path, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    """The second trainer is killed while it starts."""
    run = start(model, tmp_path / "run", 0, "--runtime.max_restarts=1")
    when(lambda: kill.steps_done(tmp_path / "run") >= 3, run)
    (first,) = processes(run, "trainer.log")
    os.kill(first, signal.SIGKILL)
    (second,) = when(lambda: [p for p in processes(run, "trainer.log") if p != first], run)
    os.kill(second, signal.SIGKILL)
    ended = end(run, status=1)
    assert re.search(r"^slipstream: trainer died \(log: .*\)\nIt was killed by SIGKILL", ended.stderr, re.M)
    assert "The trainer was restarted 1 times before (runtime.max_restarts)" in ended.stderr
    assert f"slipstream train --resume {tmp_path / 'run'}" in ended.stderr
    end(warm.Command([*kill.MODULE, "train", "--resume", str(tmp_path / "run")], **PIPES))
    kill.audit(tmp_path / "run", STEPS)
    assert kill.same_bits(kill.weights(tmp_path / "run"), undisturbed)


def test_engines_restart_with_a_trainer_that_they_share_processors_with(model: Path, tmp_path: Path) -> None:
    """They sleep when the trainer dies in its step."""
    run = start(model, tmp_path / "run", 2, "--sync.placement=colocated", "--sync.in_flight=retry")
    when(lambda: kill.steps_done(tmp_path / "run") >= 3, run)
    end_trainer(run)
    ended = end(run)
    assert "trainer and engines restart (1 of" in ended.stderr
    check(tmp_path / "run", ended.stderr, 1)
