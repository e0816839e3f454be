"""Reward workers: imports, start, end, and the errors of failed scores."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import pytest

from slipstream.config.schema import ScoringConfig
from slipstream.environments.base import Task
from slipstream.environments.reward_workers import (
    CURRENT_EPISODE,
    EpisodeContext,
    RewardFunction,
    RewardWorkerPool,
    ScoringError,
    cores,
)
from slipstream.generators.pausable_clock import Clock
from slipstream.rollout import Rollout
from slipstream.runtime.worker_process import THREAD_STARTER
from slipstream.scoring.load import FunctionScorer
from slipstream.scoring.stage import ScoringStage
from tests.environments.test_environments import completion

TASK = Task("t1", "1+1=")
REWARDS = """
import os, sys, time

def reward(task, completion):
    if completion.text == "pid":
        return os.getpid()
    if completion.text == "hang":
        time.sleep(600)
    return float("torch" in sys.modules or "transformers" in sys.modules)
"""

SLOW = """
import os, pathlib, time

here = pathlib.Path(__file__).parent
with (here / "started").open("a") as file:
    print(os.getpid(), file=file)
while not (here / "gate").exists():
    time.sleep(0.01)

def reward(task, completion):
    return 1.0
"""


@pytest.fixture
def slow(tmp_path: Path) -> str:
    """A reward whose module is imported once `gate` is there, and writes its processes into `started`."""
    (tmp_path / "slow.py").write_text(SLOW)
    return f"{tmp_path / 'slow.py'}:reward"


def started(folder: Path) -> list[int]:
    file = folder / "started"
    return [int(line) for line in file.read_text().splitlines()] if file.exists() else []


async def until_started(folder: Path) -> None:
    async with asyncio.timeout(30):
        while not started(folder):
            await asyncio.sleep(0.01)


@pytest.fixture
def rewards(tmp_path: Path) -> str:
    (tmp_path / "rewards.py").write_text(REWARDS)
    return f"{tmp_path / 'rewards.py'}:reward"


def test_reward_workers_do_not_import_torch(rewards: str) -> None:
    async def main() -> float:
        pool = RewardWorkerPool(rewards, 1, 10.0)
        try:
            return await pool.score(TASK, completion("2"))
        finally:
            await pool.close()

    assert asyncio.run(main()) == 0.0


def test_prints_of_a_reward_function_are_in_the_log_of_the_episode(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text("def reward(task, completion):\n    print('scored', task.id)\n    return 0.5\n")
    log = tmp_path / "logs" / "rewards.log"

    async def main() -> None:
        pool = RewardWorkerPool(f"{tmp_path / 'loud.py'}:reward", 1, 10.0)
        CURRENT_EPISODE.set(EpisodeContext(Clock(), None, log))
        try:
            await pool.score(TASK, completion("2"))
        finally:
            await pool.close()  # kills the process

    asyncio.run(main())
    assert log.read_text() == f"scored {TASK.id}\n"


def test_workers_default_to_one_per_core_and_start_on_demand(rewards: str) -> None:
    async def main() -> set[int]:
        pool = RewardWorkerPool(rewards, 0, 10.0)
        assert pool.processes == cores() > 0
        try:
            return {await pool.score(TASK, completion("pid")) for _ in range(3)}
        finally:
            await pool.close()

    assert len(asyncio.run(main())) == 1


def test_load_errors_of_rewards_are_reported(tmp_path: Path) -> None:
    async def main() -> None:
        pool = RewardWorkerPool(f"{tmp_path / 'gone.py'}:reward", 1, 10.0)
        for _ in range(2):
            with pytest.raises(ScoringError, match=r"there is no file .*gone.py") as failure:
                await pool.score(TASK, completion("2"))
            assert failure.value.reason == "LoadError"
        await pool.close()

    asyncio.run(main())


def test_a_worker_that_died_between_two_scores_costs_one_at_most(rewards: str) -> None:
    async def main() -> None:
        pool = RewardWorkerPool(rewards, 1, 10.0)
        os.kill(int(await pool.score(TASK, completion("pid"))), signal.SIGKILL)
        with pytest.raises(ScoringError) as failure:
            await pool.score(TASK, completion("2"))
        assert failure.value.reason == "reward process died"
        assert "its process down: reward worker died (it has no log): It was killed by SIGKILL" in str(failure.value)
        assert await pool.score(TASK, completion("2")) == 0.0
        await pool.close()

    asyncio.run(main())


def test_close_cancels_a_running_score(rewards: str) -> None:
    async def main() -> None:
        pool = RewardWorkerPool(rewards, 1, 600.0)
        await pool.score(TASK, completion("2"))
        hung = asyncio.ensure_future(pool.score(TASK, completion("hang")))
        await asyncio.sleep(0)
        await pool.close()
        with pytest.raises(ScoringError):
            await asyncio.wait_for(hung, 10.0)

    asyncio.run(main())


def test_a_scores_timeout_excludes_a_slow_start(slow: str, tmp_path: Path) -> None:
    async def main() -> None:
        function = RewardFunction(lambda task, completion: 0.0, slow, 1, 1.0)  # called in the worker, from its file
        stage = ScoringStage(ScoringConfig(timeout=1.0), FunctionScorer(function, takes_rollout=False))
        asyncio.get_running_loop().call_later(1.5, (tmp_path / "gate").touch)
        assert (await stage(TASK, Rollout((completion("2"),), 0.0))).reward == 1.0
        await stage.close()

    asyncio.run(main())


def test_a_start_continues_when_its_score_is_cancelled(slow: str, tmp_path: Path) -> None:
    async def main() -> None:
        pool = RewardWorkerPool(slow, 1, 10.0)
        for _ in range(3):
            waiting = asyncio.ensure_future(pool.score(TASK, completion("2")))
            await until_started(tmp_path)
            waiting.cancel()
            await asyncio.wait([waiting])
            assert waiting.cancelled()
        (tmp_path / "gate").touch()
        assert await pool.score(TASK, completion("2")) == 1.0
        assert len(started(tmp_path)) == 1
        await pool.close()

    asyncio.run(main())


@pytest.mark.parametrize("how", ["closed", "too slow", "loop ends"])
def test_an_aborted_start_leaves_no_process(
    slow: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    async def main() -> None:
        pool = RewardWorkerPool(slow, 1, 10.0)
        waiting = asyncio.ensure_future(pool.score(TASK, completion("2")))
        await until_started(tmp_path)
        if how == "closed":
            await pool.close()
        if how != "loop ends":
            with pytest.raises(ScoringError):
                await asyncio.wait_for(waiting, 30)

    if how == "too slow":
        monkeypatch.setattr("slipstream.environments.reward_workers.START_TIMEOUT_S", 5.0)
    asyncio.run(main())
    THREAD_STARTER.submit(lambda: None).result()  # all threads before have begun
    for thread in threading.enumerate():
        if thread.name.startswith("end of"):
            thread.join()
    [pid] = started(tmp_path)
    last = time.monotonic() + 5
    with pytest.raises(ProcessLookupError):  # what is killed is gone a little later
        while time.monotonic() < last:
            os.kill(pid, 0)


def test_a_worker_killed_between_scores_costs_no_score(
    slow: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        pool = RewardWorkerPool(slow, 1, 10.0)
        waiting = asyncio.ensure_future(pool.score(TASK, completion("2")))
        await until_started(tmp_path)
        (worker,) = pool._workers
        waiting.cancel()
        await asyncio.wait((waiting,))
        for _ in range(2):  # while it starts, and afterwards
            assert worker.process
            os.kill(worker.process.pid, signal.SIGKILL)
            while not worker.dead:
                await asyncio.sleep(0.01)
            (tmp_path / "gate").touch()
            assert await pool.score(TASK, completion("2")) == 1.0
            (worker,) = (w for w in pool._workers if not w.dead)
        await pool.close()

    asyncio.run(main())
    gc.collect()
    assert not caplog.records, "asyncio logs exceptions that nobody has seen"


def test_a_hung_worker_ends_after_its_controller_was_killed(rewards: str) -> None:
    program = (
        "import asyncio, sys\n"
        "from slipstream.environments.base import Task\n"
        "from slipstream.environments.reward_workers import RewardWorker\n"
        "from slipstream.rollout import Completion\n"
        "completion = Completion((), (), (), (), 'stop', text='hang')\n"
        "asyncio.run(RewardWorker(sys.argv[1], 0.1).score(Task('t', '?'), completion))\n"
    )
    command = [sys.executable, "-c", program, rewards]
    ended = subprocess.run(command, check=False, timeout=30, capture_output=True, text=True)
    assert ended.returncode != 0
    assert "Timeout" in ended.stderr


def test_an_error_of_several_lines_keeps_its_type_and_its_first_line() -> None:
    try:
        raise ValueError("strange answer\nsecond line")
    except ValueError:
        detail = traceback.format_exc()
    found = ScoringError("raised", detail).one_line
    assert re.fullmatch(rf"ValueError: strange answer second line \({re.escape(__file__)}:\d+\)", found)
    assert ScoringError("raised", "").one_line == "raised"
