"""A dataset as others have published it, with rewards by name. docs/datasets.md describes its options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slipstream.config.schema import ConfigError
from slipstream.environments.base import Policy, Task
from slipstream.environments.reward_workers import RewardWorkerPool, await_reward
from slipstream.environments.rewards import Code, load_rewards
from slipstream.environments.tasks import Columns, load_tasks
from slipstream.rollout import Rollout


class Dataset:
    """One reply to each prompt. The reward is the weighted sum of `reward`'s parts, each of which is a metric.

    The metric "correct" is 1 if the first part is. Without `reward` the reward is left to `scoring`.
    """

    def __init__(
        self,
        dataset: str = "",
        prompt: str = "prompt",
        answer: str = "",
        id: str = "",
        reward: Any = "",
        system: str = "",
        filter: Mapping[str, Any] | None = None,
        subset: str = "",
        split: str = "",
        test: str | float = "",
        skip_malformed: bool = False,
        category: str = "",
        images: str = "",
        reward_workers: int = 0,
        timeout: float = 60.0,
    ) -> None:
        if not dataset:
            raise ConfigError("environment.dataset is not set; give a file, a directory, or a name on the Hub")
        texts = {
            "dataset": dataset, "prompt": prompt, "answer": answer, "id": id, "system": system, "subset": subset,
            "split": split, "category": category, "images": images,
        }  # fmt: skip
        for name, value in texts.items():
            if not isinstance(value, str):
                raise ConfigError(f"environment.{name} = {value!r}: it must be text")
        if not isinstance(filter or {}, dict):
            raise ConfigError(f"environment.filter = {filter!r}: it must be a table, such as {{ level = [1, 2] }}")
        self._rewards = load_rewards(reward)
        if unanswered := [name for name, one in self._rewards.items() if one.needs_answer and not answer]:
            raise ConfigError(f"environment.answer is not set; {unanswered[0]} compares replies with its column")
        columns = Columns(prompt, answer, id, system, filter or {}, self._rewards, category, images)
        self.train, self.test = load_tasks(dataset, columns, subset, split, test, skip_malformed)
        self._workers = RewardWorkerPool("slipstream.environments.rewards:score", reward_workers, timeout)

    async def rollout(self, task: Task, policy: Policy) -> Rollout | None:
        completion = await policy.sample(task.prompt)
        if not self._rewards:
            return None
        parts: dict[str, Any] = dict.fromkeys(self._rewards, 0.0)  # kept if a reward raises
        wanted, plain = task.data["wanted"], {n: r for n, r in self._rewards.items() if not isinstance(r, Code)}
        if plain:
            scored = replace(task, prompt="", data={"rewards": plain, "wanted": wanted})
            found = await self._workers.score(scored, completion)
            parts |= found if isinstance(found, Mapping) else {}
        for name, reward in self._rewards.items():
            if isinstance(reward, Code):
                parts[name] = await await_reward(reward.grade(completion.text, wanted[name]))
        total = sum(self._rewards[name].weight * value for name, value in parts.items())
        return policy.rollout(total, **parts, correct=float(next(iter(parts.values())) >= 1))

    async def close(self) -> None:
        await self._workers.close()
