"""Any environment written for verifiers, named `verifiers:ENV`: single-turn, multi-turn, with tools.

https://github.com/PrimeIntellect-ai/verifiers. The environment calls the policy's OpenAI-compatible URL and computes
the reward. Before 0.4 `verifiers.load_environment` loads it; from 0.4 on it is a taskset (`verifiers_tasksets`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slipstream.config.schema import ConfigError
from slipstream.environments.base import Policy, Task
from slipstream.rollout import Rollout


class Verifiers:
    """The installed environment `name`, of the generation that the installed verifiers has."""

    def __init__(self, name: str, **options: Any) -> None:
        try:
            import verifiers
        except ImportError:
            needs = f"environment.name = 'verifiers:{name}' needs verifiers: pip install 'slipstream-rl[verifiers]'"
            raise ConfigError(needs) from None
        self._environment: Any
        if hasattr(verifiers, "load_environment"):
            self._environment = Loaded(name, options)
        else:
            from slipstream.environments.verifiers_tasksets import PlayedTaskset

            self._environment = PlayedTaskset(name, options)
        self.train: list[Task] = self._environment.train
        self.test: list[Task] = self._environment.test

    async def rollout(self, task: Task, policy: Policy) -> Rollout | list[Rollout]:
        rollout: Rollout | list[Rollout] = await self._environment.rollout(task, policy)
        return rollout

    async def close(self) -> None:
        if hasattr(self._environment, "close"):
            await self._environment.close()


class Loaded:
    """The environment `name` of verifiers before 0.4, loaded with `options`.

    Its evaluation data is held out; without any, `test` is the training data.
    """

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        import verifiers
        from verifiers.types import ClientConfig

        try:
            self._environment = verifiers.load_environment(name, **options)
        except Exception as error:
            raise ConfigError(f"environment.name = 'verifiers:{name}': {' '.join(str(error).split())}") from None
        self._client = ClientConfig
        self.train = _tasks(name, self._environment.get_dataset())
        self.test = _tasks(name, self._environment.get_eval_dataset())

    async def rollout(self, task: Task, policy: Policy) -> Rollout:
        client = self._client(api_base_url=await policy.base_url(), api_key_var="SLIPSTREAM_NEEDS_NO_KEY")
        outcome = await self._environment.run_rollout(dict(task.data), client, "policy", {})
        if outcome.get("error"):
            raise RuntimeError(f"verifiers: {outcome['error']}")
        values = (outcome.get("metrics") or {}).items()
        metrics: dict[str, Any] = {name: float(value) for name, value in values if isinstance(value, int | float)}
        return policy.rollout(outcome["reward"], **metrics)


def _tasks(name: str, rows: Sequence[dict[str, Any]]) -> list[Task]:
    """One task for each row, with the environment's ids."""
    return [Task(f"{name}/{row.get('example_id', i)}", _prompt(row["prompt"]), dict(row)) for i, row in enumerate(rows)]


def _prompt(prompt: Any) -> str | tuple[dict[str, str], ...]:
    return prompt if isinstance(prompt, str) else tuple(dict(message) for message in prompt)
