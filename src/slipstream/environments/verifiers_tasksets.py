"""Environments of verifiers 0.4 and later: a taskset, and agents that play its tasks by a harness in a runtime.

Consumes `environment.options`, the table [env] of verifiers; produces tasks, and rollouts with the rewards of traces.
Waits for the episode in verifiers, whose interception server forwards each request to the policy's URL.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from slipstream.config.schema import ConfigError
from slipstream.environments.base import Policy, Task
from slipstream.rollout import Rollout
from slipstream.runtime.worker import fail_unawaited


class PlayedTaskset:
    """The taskset of the installed package `name`. `options` are verifiers' [env], with two more tables.

    `select` chooses the tasks, as verifiers' [select]. `test` changes the other options for held-out tasks; without it,
    `test` is the training data.
    """

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        given = {**options}
        changes = given.pop("test", None)
        self._splits = {"train": Split(name, given)}
        self.train = self.test = self._splits["train"].tasks
        if changes is not None:
            self._splits["test"] = Split(name, _merge(given, changes), "test/")
            self.test = self._splits["test"].tasks

    async def rollout(self, task: Task, policy: Policy) -> Rollout:
        return await self._splits["test" if task.data["held_out"] else "train"].rollout(task, policy)

    async def close(self) -> None:
        for split in self._splits.values():
            await split.close()


class Split:
    """One environment of verifiers, and its tasks. Servers for its agents run from the first episode until `close`."""

    def __init__(self, name: str, options: Mapping[str, Any], prefix: str = "") -> None:
        from verifiers.v1 import SelectConfig
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        given = {**options}
        where = f"environment.name = 'verifiers:{name}'"
        try:
            select = SelectConfig.model_validate(given.pop("select", {}))
            config = resolve_env_config(_merge(given, {"taskset": {"id": name}}))
            self._environment = load_environment(config)
            taskset = self._environment.taskset.select(select)
            if not taskset.bounded:
                raise ConfigError(f"{where} has infinitely many tasks; set environment.options.select.limit")
            self._tasks = list(taskset)
        except ConfigError:
            raise
        except ValidationError as error:
            first = error.errors()[0]
            option = ".".join(map(str, ("environment.options", *first["loc"])))
            raise ConfigError(f"{option} = {first['input']!r:.60}: {first['msg']}") from None
        except Exception as error:
            raise ConfigError(f"{where}: {' '.join(str(error).split())}") from None
        self.tasks = [
            Task(f"{name}/{prefix}{task.data.idx}", _prompt(task.data), {"at": at, "held_out": bool(prefix)})
            for at, task in enumerate(self._tasks)
        ]
        self._serving: asyncio.Task[None] | None = None
        self._served: asyncio.Future[None]  # once they are up

    async def rollout(self, task: Task, policy: Policy) -> Rollout:
        from verifiers.v1 import EvalClientConfig, ModelContext
        from verifiers.v1.types import SamplingConfig

        await self._serve()
        client = EvalClientConfig(base_url=await policy.base_url(), api_key_var="SLIPSTREAM_NEEDS_NO_KEY")
        context = ModelContext(model="policy", client=client, sampling=SamplingConfig())
        episode = await self._environment.run_episode(self._tasks[task.data["at"]], context)
        for played in (episode, *episode.traces):
            if not played.ok and played.last_error:
                raise RuntimeError(f"verifiers: {played.last_error.type}: {played.last_error.message}")
        trace = episode.traces[0]
        scores = {name: reward.score for name, reward in trace.rewards.items() if reward} | trace.metrics
        metrics: dict[str, Any] = {name: float(value) for name, value in scores.items() if value is not None}
        return policy.rollout(trace.reward, **metrics)

    async def close(self) -> None:
        if self._serving:
            self._serving.cancel()
            [outcome] = await asyncio.gather(self._serving, return_exceptions=True)
            if isinstance(outcome, Exception):
                raise outcome

    async def _serve(self) -> None:
        """Start the servers of the environment, once. Raises what their start raises."""
        if self._serving is None:  # in a new context: the servers outlive the episode that starts them
            self._served = asyncio.get_running_loop().create_future()
            self._serving = asyncio.create_task(self._hold_servers(), context=contextvars.Context())
        await asyncio.shield(self._served)

    async def _hold_servers(self) -> None:
        try:
            async with self._environment.serving():
                self._served.set_result(None)
                await asyncio.Event().wait()  # until `close` cancels it
        except Exception as error:
            if self._served.done():
                raise
            fail_unawaited(self._served, error)


def _merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `changes`; tables that both have are merged."""
    both = {name for name in changes if isinstance(base.get(name), dict) and isinstance(changes[name], Mapping)}
    return {**base, **changes, **{name: _merge(base[name], changes[name]) for name in both}}


def _prompt(data: Any) -> str | tuple[dict[str, str], ...]:
    """The prompt of a task, for records; "" if a user opens the conversation."""
    if not data.system_prompt and (data.prompt is None or isinstance(data.prompt, str)):
        return data.prompt or ""
    opening = [{"role": "user", "content": data.prompt}] if isinstance(data.prompt, str) else data.prompt or []
    messages = [one if isinstance(one, dict) else one.model_dump(exclude_none=True) for one in opening]
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    return tuple(system + messages)
