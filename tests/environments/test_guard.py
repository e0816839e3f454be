"""Whatever a user's code does costs one rollout, with its reason, and the next one works."""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.environments.base import Policy, Task
from slipstream.environments.guard import LoopWatch, RolloutFailed, _sound, attempt
from slipstream.environments.scoring import ScorerPool, ScoringError
from slipstream.rollout import Rollout, StepReward
from tests.environments.test_environments import completion, policy

TASK = Task("t1", "1+1=")
LIMIT = 0.4


class Episode:
    """An environment with the given body."""

    train: tuple[Task, ...] = (TASK,)
    test: tuple[Task, ...] = ()

    def __init__(self, body: Any) -> None:
        self._body = body

    async def rollout(self, task: Task, policy: Policy) -> Any:
        await policy.sample(task.prompt)
        outcome = self._body()
        return await outcome if asyncio.iscoroutine(outcome) else outcome


def outcome(body: Any) -> Rollout | RolloutFailed:
    async def main() -> Rollout | RolloutFailed:
        with LoopWatch(LIMIT / 2):  # as in a run, long before the time limit
            try:
                [rollout] = await attempt(Episode(body), TASK, policy("2"), LIMIT)
                return rollout
            except RolloutFailed as failure:
                return failure

    return asyncio.run(main())


def busy() -> float:
    while True:
        pass


def swallows() -> float:
    try:
        time.sleep(60)
    except Exception:
        return 1.0
    return 1.0


async def nested() -> float:
    async def child() -> float:
        time.sleep(60)
        return 1.0

    return sum(await asyncio.gather(child(), asyncio.sleep(0, 1.0)))


async def cancels() -> float:
    child = asyncio.ensure_future(asyncio.sleep(60))
    child.cancel()
    await child
    return 1.0


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (lambda: 1 / 0, "ZeroDivisionError"),
        (lambda: asyncio.sleep(60), "time limit"),
        (lambda: time.sleep(60), "blocked the event loop"),
        (busy, "blocked the event loop"),
        (swallows, "blocked the event loop"),
        (nested, "blocked the event loop"),
        (lambda: math.nan, "reward is nan"),
        (lambda: math.inf, "reward is inf"),
        (lambda: asyncio.wait_for(asyncio.sleep(60), 0.01), "TimeoutError"),
        (cancels, "CancelledError"),
        (lambda: sys.exit(2), "SystemExit"),
        (lambda: "good", "reward is no number"),
        (lambda: "1.5", "reward is no number"),
        (lambda: None, "reward is no number"),
    ],
)
def test_a_broken_episode_costs_one_rollout(body: Any, reason: str) -> None:
    began = time.monotonic()
    failure = outcome(body)
    assert isinstance(failure, RolloutFailed)
    assert failure.reason == reason
    assert failure.detail
    assert time.monotonic() - began < 10 * LIMIT


@pytest.mark.parametrize("reward", [1, True, 0.5, -2])
def test_any_number_is_a_reward(reward: float) -> None:
    rollout = outcome(lambda: reward)
    assert isinstance(rollout, Rollout) and rollout.reward == float(reward)


def test_an_episode_that_never_sampled_fails() -> None:
    class Silent(Episode):
        async def rollout(self, task: Task, policy: Policy) -> float:
            return 1.0

    with pytest.raises(RolloutFailed, match="no completion"):
        asyncio.run(attempt(Silent(None), TASK, policy(), LIMIT))


def test_rewards_and_metrics_become_plain_numbers() -> None:
    class Odd(Episode):
        async def rollout(self, task: Task, policy: Policy) -> Rollout:
            drawn = await policy.sample(task.prompt)
            return Rollout((drawn,), np.float32(0.5), {"turns": self._body})  # type: ignore[arg-type]

    [rollout] = asyncio.run(attempt(Odd(np.int64(2)), TASK, policy("2"), 5.0))
    assert (type(rollout.reward), rollout.reward) == (float, 0.5)
    assert (type(rollout.metrics["turns"]), rollout.metrics) == (float, {"turns": 2.0})
    with pytest.raises(RolloutFailed) as failure:
        asyncio.run(attempt(Odd("two"), TASK, policy("2"), 5.0))
    assert failure.value.reason == "ValueError"


def test_blocking_outside_of_an_episode_is_left_alone() -> None:
    async def main() -> str:
        with LoopWatch(0.1):
            end = time.monotonic() + 0.4
            while time.monotonic() < end:
                pass
            return "ended"

    assert asyncio.run(main()) == "ended"


def test_a_stop_of_the_run_passes_through() -> None:
    async def main() -> None:
        task = asyncio.ensure_future(attempt(Episode(lambda: asyncio.sleep(60)), TASK, policy("2"), 60))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


REWARDS = """
import os, time

def reward(task, completion):
    match completion.text:
        case "hang": time.sleep(600)
        case "busy":
            while True: pass
        case "die": os._exit(3)
        case "raise": raise KeyError("lost")
        case "text": return "seven"
        case "pid": return os.getpid()
    return float(len(completion.text))
"""


@pytest.fixture
def rewards(tmp_path: Path) -> str:
    (tmp_path / "rewards.py").write_text(REWARDS)
    return f"{tmp_path / 'rewards.py'}:reward"


def test_a_broken_reward_costs_one_score_and_its_process(rewards: str) -> None:
    async def main() -> None:
        pool = ScorerPool(rewards, processes=1, time_limit=LIMIT)
        for said, reason in (
            ("hang", "reward time limit"),
            ("busy", "reward time limit"),
            ("die", "reward process died"),
            ("raise", "KeyError"),
        ):
            with pytest.raises(ScoringError) as failure:
                await pool.score(TASK, completion(said))
            assert failure.value.reason == reason
            assert await pool.score(TASK, completion("abc")) == 3.0
        pid = int(await pool.score(TASK, completion("pid")))
        await pool.close()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    asyncio.run(main())


def test_scores_run_beside_each_other_and_beside_a_hung_one(rewards: str) -> None:
    async def main() -> None:
        pool = ScorerPool(rewards, processes=2, time_limit=1.0)
        hung = asyncio.ensure_future(pool.score(TASK, completion("hang")))
        scores = await asyncio.gather(*(pool.score(TASK, completion("x" * n)) for n in range(20)))
        assert scores == [float(n) for n in range(20)]
        assert not hung.done()
        with pytest.raises(ScoringError, match="longer than 1 s"):
            await hung
        await pool.close()

    asyncio.run(main())


def test_an_abandoned_score_does_not_answer_the_next(rewards: str) -> None:
    async def main() -> None:
        pool = ScorerPool(rewards, processes=1, time_limit=5.0)
        abandoned = asyncio.ensure_future(pool.score(TASK, completion("hang")))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(abandoned, 0.5)
        assert await pool.score(TASK, completion("ab")) == 2.0
        await pool.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("rollout", "why"),
    [
        (Rollout((), 1.0, steps=((StepReward(0, math.nan),),)), "reward of a step is nan"),
        (Rollout((), 1.0, {"style": math.inf}), "metric style is infinite"),
        (Rollout((), math.inf), "reward is inf"),
    ],
)
def test_a_number_that_would_spoil_its_group_fails_its_rollout_alone(rollout: Rollout, why: str) -> None:
    with pytest.raises(RolloutFailed, match=why):
        _sound(rollout)
    sound = Rollout((), 1.0, {"style": math.nan}, ((StepReward(0, 0.5),),))
    assert _sound(sound).steps == sound.steps  # NaN says that there is no such part
