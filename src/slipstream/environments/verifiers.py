"""Any environment written for verifiers, named `verifiers:ENV`: single-turn, multi-turn, with tools.

https://github.com/PrimeIntellect-ai/verifiers. The environment calls the policy's OpenAI-compatible URL and computes
the reward. Before 0.4 `verifiers.load_environment` loads it; from 0.4 on it is a taskset (`verifiers_tasksets`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from slipstream.config.schema import ConfigError
from slipstream.environments.base import Policy, Task
from slipstream.rollout import Rollout

RETRIES = 10  # of a request before 0.4, as by verifiers itself


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
        await self._environment.close()


class Loaded:
    """The environment `name` of verifiers before 0.4, loaded with `options`.

    Its evaluation data is held out; without any, `test` is the training data.
    """

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        import verifiers

        try:
            self._environment = verifiers.load_environment(name, **options)
        except Exception as error:
            raise load_failed(name, error) from None
        self._http: Any = None
        self.train = _tasks(name, self._environment.get_dataset())
        self.test = _tasks(name, self._environment.get_eval_dataset())

    async def rollout(self, task: Task, policy: Policy) -> Rollout:
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient
        from verifiers.clients import OpenAIChatCompletionsClient

        if self._http is None:  # for all episodes: to make one takes 20 ms, and 1 MiB until a full garbage collection
            self._http = DefaultAsyncHttpxClient(timeout=None)
        url, http = await policy.base_url(), self._http
        client = AsyncOpenAI(base_url=url, api_key="none", timeout=None, max_retries=RETRIES, http_client=http)
        served = OpenAIChatCompletionsClient(client)
        outcome = await self._environment.run_rollout(dict(task.data), served, "policy", {})
        if outcome.get("error"):
            raise RuntimeError(f"verifiers: {outcome['error']}")
        values = (outcome.get("metrics") or {}).items()
        metrics: dict[str, Any] = {name: float(value) for name, value in values if isinstance(value, int | float)}
        return policy.rollout(outcome["reward"], **metrics)

    async def close(self) -> None:
        if self._http:
            await self._http.aclose()
            self._http = None


def load_failed(name: str, error: Exception) -> ConfigError:
    """The error of an environment that can't be loaded, in one line, with the remedy for one of another generation."""
    import verifiers

    text, cause = " ".join(str(error).split()), " ".join(str(error.__cause__ or "").split())
    text += f" ({cause})" if cause not in text else ""
    module = sys.modules.get(name.rpartition("/")[2].partition("@")[0].replace("-", "_").lower())
    exported = [getattr(module, export, None) for export in getattr(module, "__all__", ())]
    classic, taskset = hasattr(module, "load_environment"), any(hasattr(one, "toolsets") for one in exported)
    if hasattr(verifiers, "load_environment"):
        if taskset and not classic:
            text = "it is a taskset of verifiers 0.4 and later: pip install 'verifiers>=0.4'"
    elif classic and not taskset:
        text = "it is an environment of verifiers before 0.4: pip install 'verifiers<0.4'"
    return ConfigError(f"environment.name = 'verifiers:{name}': {text}")


def _tasks(name: str, rows: Sequence[dict[str, Any]]) -> list[Task]:
    """One task for each row, with the environment's ids."""
    return [Task(f"{name}/{row.get('example_id', i)}", _prompt(row["prompt"]), dict(row)) for i, row in enumerate(rows)]


def _prompt(prompt: Any) -> str | tuple[dict[str, str], ...]:
    return prompt if isinstance(prompt, str) else tuple(dict(message) for message in prompt)
