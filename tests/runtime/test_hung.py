"""A worker that is stopped is found, named with what it owes, and ended with all that it has started."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest

from slipstream.actor import ActorDied
from slipstream.config import ScoringConfig
from slipstream.environments.base import Task
from slipstream.environments.scoring import ScorerPool, ScoringError
from slipstream.rollout import Rollout
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
    """A stopped process is found in 2 to 3 seconds."""
    monkeypatch.setattr("slipstream.actor.HEARTBEAT_S", 0.1)
    monkeypatch.setattr("slipstream.actor.HEARTBEAT_TIMEOUT_S", 2.0)
    monkeypatch.setattr("slipstream.actor.ENDS", 0.5)


async def death_of(actor: Any, call: Awaitable[Any]) -> str:
    """Why a call fails of a process that is stopped; the process is gone soon after."""
    with pytest.raises((ActorDied, ScoringError)) as died:
        await call
    while lives(pid_of(actor)):
        await asyncio.sleep(0.01)
    return str(died.value)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_trainer_that_is_stopped_in_a_step(ranks: int, tiny: Path, tmp_path: Path) -> None:
    """And one whose other rank is, for which it would wait for ever."""

    async def main() -> str:
        async with started(tiny, tmp_path, "shared", f"--trainer.ranks={ranks}", close=8.0) as pools:
            actor: Any = getattr(pools.trainer.actor, "actors", [pools.trainer.actor])[-1]
            os.kill(pid_of(actor), signal.SIGSTOP)
            return await death_of(actor, pools.trainer.step(random_batch(38)))

    name = "trainer rank 1" if ranks == 2 else "trainer"
    said = (
        rf"^{name} has been silent for [\d.]+ s, as if it were stopped, and has owed step for [\d.]+ s \(log: .*trainer"
    )
    assert re.match(said, asyncio.run(main()))


def test_a_teacher_and_a_reward_model_that_are_stopped(tiny: Path, tmp_path: Path) -> None:
    async def main() -> list[str]:
        save(tmp_path, "SequenceClassification")
        teacher = Teacher(config(tiny, tiny), tmp_path / "teacher.log")
        reward = RewardModel({"path": str(tmp_path), "threads": 1}, str(tiny), None, 600.0)
        await asyncio.gather(teacher.start(), reward.start())
        for one in (teacher, reward):
            os.kill(pid_of(one._actor), signal.SIGSTOP)
        asked = (teacher.score(COMPLETIONS), reward.score(Task("t", ""), Rollout(tuple(COMPLETIONS[:1]), 0.0)))
        found = await asyncio.gather(death_of(teacher._actor, asked[0]), death_of(reward._actor, asked[1]))
        for stage in (ScoringStage(ScoringConfig(), None, teacher), ScoringStage(ScoringConfig(), reward)):
            assert "has been silent" in str(stage.dead), "a run ends by this"
        return list(found)

    said = r"has been silent for [\d.]+ s, as if it were stopped, and has owed score for [\d.]+ s"
    teacher, reward = asyncio.run(main())
    assert re.match(rf"teacher {said} \(log: .*teacher.log\)", teacher) and re.match(rf"reward model {said}", reward)


def test_a_reward_worker_that_is_stopped(tmp_path: Path) -> None:
    """Its time limit is the reward's, and another takes its place."""
    (tmp_path / "rewards.py").write_text("def reward(task, completion):\n    return 1.0\n")

    async def main() -> None:
        pool = ScorerPool(f"{tmp_path / 'rewards.py'}:reward", 1, 3.0)
        assert await pool.score(Task("t", ""), COMPLETIONS[0]) == 1.0
        (worker,) = pool._workers
        os.kill(pid_of(worker), signal.SIGSTOP)
        assert "longer than 3 s" in await death_of(worker, pool.score(Task("t", ""), COMPLETIONS[0]))
        assert await pool.score(Task("t", ""), COMPLETIONS[0]) == 1.0
        await pool.close()

    asyncio.run(main())
