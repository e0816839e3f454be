"""Any task of reasoning-gym, named `reasoning-gym:TASK`: procedural puzzles with the task's own scorer.

https://github.com/open-thought/reasoning-gym
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

from slipstream.config.schema import ConfigError
from slipstream.config.suggestions import suggest
from slipstream.environments.base import Policy, Task
from slipstream.environments.reward_workers import await_reward
from slipstream.rollout import Rollout

ASK = "Think, then give your final answer between <answer> and </answer>."


class ReasoningGym:
    """`train` and `test` puzzles of the task `name`, determined by `seed`. `options` are passed to the task.

    `system` is the system prompt. The reward is the task's score, from 0 to 1, of the text in the last `<answer>`, or
    of the whole reply without one.
    """

    def __init__(
        self, name: str, train: int = 2000, test: int = 200, seed: int = 0, system: str = ASK, **options: Any
    ) -> None:
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ImportError:
            raise ConfigError(
                f"environment.name = 'reasoning-gym:{name}' needs reasoning-gym: pip install 'slipstream-rl[gym]'"
            ) from None
        if name not in DATASETS:
            raise ConfigError(f"environment.name: reasoning-gym has no task {name!r}{suggest(name, list(DATASETS))}")
        self._puzzles = reasoning_gym.create_dataset(name, size=train + test, seed=seed, **options)
        self._system = system
        tasks = [Task(f"{name}/{i}", self._puzzles[i]["question"], {"index": i}) for i in range(train + test)]
        self.test, self.train = tasks[:test], tasks[test:]

    async def rollout(self, task: Task, policy: Policy) -> Rollout:
        reply = await policy.conversation(self._system).ask(str(task.prompt))
        answers = re.findall(r"<answer>(.*?)</answer>", reply, re.DOTALL)
        answer = (answers[-1] if answers else reply).strip()
        puzzle = self._puzzles[task.data["index"]]
        score = await await_reward(asyncio.to_thread(self._puzzles.score_answer, answer, puzzle))
        return policy.rollout(score, correct=float(score == 1))
