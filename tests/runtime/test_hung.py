"""A stopped worker process is detected, named with its pending call, and terminated with its child processes."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest

from slipstream.config.schema import RuntimeConfig, ScoringConfig
from slipstream.environments.base import Task
from slipstream.environments.reward_workers import RewardWorkerPool, ScoringError
from slipstream.rollout import Rollout
from slipstream.runtime.worker import WorkerDied
from slipstream.scoring.model import RewardModel
from slipstream.scoring.stage import ScoringStage
from slipstream.scoring.teacher import Teacher
from tests.processes import lives
from tests.runtime.test_faults import pid_of, started
from tests.scoring.test_model import COMPLETIONS, save
from tests.scoring.test_teacher import config
from tests.trainers.test_trainer import random_batch


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process is detected within 2 to 3 seconds."""
    monkeypatch.setattr("slipstream.runtime.worker_process.HEARTBEAT_S", 0.1)
    monkeypatch.setattr("slipstream.runtime.worker_process.HEARTBEAT_TIMEOUT_S", 2.0)
    monkeypatch.setattr("slipstream.runtime.process.TERMINATION_GRACE_S", 0.5)


async def death_of(process: Any, call: Awaitable[Any]) -> str:
    """The error of a call to a stopped process. Asserts that the process ends soon after."""
    with pytest.raises((WorkerDied, ScoringError)) as died:
        await call
    while lives(pid_of(process)):
        await asyncio.sleep(0.01)
    return str(died.value)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_trainer_stopped_in_a_step_is_terminated(ranks: int, tiny: Path, tmp_path: Path) -> None:
    """Also if the other rank is stopped, for which this rank would wait without end."""

    async def main() -> str:
        async with started(tiny, tmp_path, "shared", f"--trainer.ranks={ranks}", close=8.0) as pools:
            process: Any = getattr(pools.trainer_process, "processes", [pools.trainer_process])[-1]
            os.kill(pid_of(process), signal.SIGSTOP)
            return await death_of(process, pools.trainer.step(random_batch(38)))

    name = "trainer rank 1" if ranks == 2 else "trainer"
    said = rf"^{name} has been silent for [\d.]+ s, .*, with pending calls: step for [\d.]+ s \(log: .*trainer"
    assert re.match(said, asyncio.run(main()))


def test_a_stopped_teacher_or_reward_model_is_terminated(tiny: Path, tmp_path: Path) -> None:
    async def main() -> list[str]:
        save(tmp_path, "SequenceClassification")
        teacher = Teacher(config(tiny, tiny, "--runtime.max_restarts=0"), tmp_path / "teacher.log")
        reward = RewardModel({"path": str(tmp_path), "threads": 1}, str(tiny), None, RuntimeConfig(max_restarts=0))
        stages = ScoringStage(ScoringConfig(), None, teacher), ScoringStage(ScoringConfig(), reward)
        await asyncio.gather(teacher.start(), reward.start())
        for one in (teacher, reward):
            os.kill(pid_of(one.process), signal.SIGSTOP)
        asked = [stage(Task("t", ""), Rollout(tuple(COMPLETIONS[:1]), 0.0)) for stage in stages]
        found = await asyncio.gather(death_of(teacher.process, asked[0]), death_of(reward.process, asked[1]))
        for stage in stages:
            assert "has been silent" in str(stage.dead), "a run ends by this"
            await stage.close()
        return list(found)

    said = r"has been silent for [\d.]+ s, as if it were stopped, with pending calls: score for [\d.]+ s"
    teacher, reward = asyncio.run(main())
    assert re.match(rf"teacher {said} \(log: .*teacher.log\)", teacher) and re.match(rf"reward model {said}", reward)


def test_a_stopped_reward_worker_is_replaced(tmp_path: Path) -> None:
    """Its time limit is that of the reward, and a new worker replaces it."""
    (tmp_path / "rewards.py").write_text("def reward(task, completion):\n    return 1.0\n")

    async def main() -> None:
        pool = RewardWorkerPool(f"{tmp_path / 'rewards.py'}:reward", 1, 3.0)
        assert await pool.score(Task("t", ""), COMPLETIONS[0]) == 1.0
        (worker,) = pool._workers
        os.kill(pid_of(worker), signal.SIGSTOP)
        assert "longer than 3 s" in await death_of(worker, pool.score(Task("t", ""), COMPLETIONS[0]))
        assert await pool.score(Task("t", ""), COMPLETIONS[0]) == 1.0
        await pool.close()

    asyncio.run(main())
