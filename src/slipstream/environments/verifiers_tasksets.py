"""Environments of verifiers 0.4 and later: a taskset, and agents that play its tasks by a harness in a runtime.

Consumes `environment.options`, the table [env] of verifiers; produces tasks, and rollouts with the rewards of traces.
Waits for the episode in verifiers, whose interception server forwards each request to the policy's URL.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from slipstream.config.schema import ConfigError
from slipstream.environments.base import Policy, Task, as_reward
from slipstream.environments.episode import RolloutFailed
from slipstream.environments.verifiers import load_failed
from slipstream.rollout import Completion, Rollout
from slipstream.runtime.worker import fail_unawaited


class PlayedTaskset:
    """The taskset of the installed package `name`. `options` are verifiers' [env], with two more tables.

    `select` chooses the training tasks, as verifiers' [select]. `test` changes the other options for held-out tasks,
    and may have its own `select`; without it, `test` is the training data.
    """

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        _validate_tables("environment.options", options, "taskset", "select", "test")
        if (other := options.get("taskset", {}).get("id", name)) != name:
            raise ConfigError(
                f"environment.options.taskset.id = {other!r:.60}, and environment.name is verifiers:{name}"
            )
        shared = {option: value for option, value in options.items() if option not in ("select", "test")}
        select = {"select": options["select"]} if "select" in options else {}
        self._splits = [Split(name, "environment.options", shared | select)]
        if "test" in options:
            _validate_tables("environment.options.test", options["test"], "taskset", "select")
            changed = _merge(shared, options["test"])
            self._splits.append(Split(name, "environment.options.test", changed, "test/"))
        self.train, self.test = self._splits[0].tasks, self._splits[-1].tasks

    async def rollout(self, task: Task, policy: Policy) -> list[Rollout]:
        return await next(split for split in self._splits if task.id in split.played).rollout(task, policy)

    async def close(self) -> None:
        for split in self._splits:
            await split.close()


class Split:
    """One environment of verifiers, and its tasks. Servers for its agents run from the first episode until `close`."""

    def __init__(self, name: str, table: str, options: Mapping[str, Any], prefix: str = "") -> None:
        from verifiers.v1 import SelectConfig
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        given = {**options}
        try:
            select = SelectConfig.model_validate(given.pop("select", {}))
            config = resolve_env_config(_merge(given, {"taskset": {"id": name}}))
            self._environment = load_environment(config)
            taskset = self._environment.taskset.select(select)
            if not taskset.bounded:
                raise ConfigError(f"verifiers:{name} has tasks without an end: set {table}.select.limit")
            self.played = {f"{name}/{prefix}{task.data.idx}": task for task in taskset}
            if not self.played:
                raise ConfigError(f"verifiers:{name} has no tasks; check {table}")
            self._roles = _validated_agents(config, type(taskset).task_type())
        except ConfigError:
            raise
        except ValidationError as error:
            first = error.errors()[0]
            within = ("select",) if error.title == SelectConfig.__name__ else ()
            option = ".".join(map(str, (table, *within, *first["loc"])))
            raise ConfigError(f"{option} = {first['input']!r:.60}: {first['msg']}") from None
        except Exception as error:
            raise load_failed(name, error) from None
        self.tasks = [
            Task(id, _prompt(task.data), task.data.model_dump(mode="json", exclude={"prompt"}, exclude_defaults=True))
            for id, task in self.played.items()
        ]
        self._serving: asyncio.Task[None] | None = None
        self._served: asyncio.Future[None]  # once they are up

    async def rollout(self, task: Task, policy: Policy) -> list[Rollout]:
        """A rollout for each agent that is trained. Raises `RolloutFailed` for an episode that failed in verifiers."""
        from verifiers.v1 import EvalClientConfig, ModelContext
        from verifiers.v1.types import SamplingConfig

        await self._serve()
        url = await (policy[policy.names[0]] if policy.names else policy).shared_url()
        client = EvalClientConfig(base_url=url, api_key_var="SLIPSTREAM_NEEDS_NO_KEY")
        context = ModelContext(model="policy", client=client, sampling=SamplingConfig())
        asked: dict[str, Policy] = {}

        def begin(trace: Any) -> None:
            if trace.agent.config.client.base_url == url:  # an agent may have another model
                asked[trace.id] = policy[trace.agent.name] if policy.names else policy
                asked[trace.id].open_session(trace.id)

        episode = await self._environment.run_episode(self.played[task.id], context, on_trace=begin)
        if not self._environment.complete(episode):
            errors = [played.last_error for played in (*episode.traces, episode) if played.last_error]
            reason, detail = (errors[0].type, errors[0].message) if errors else ("incomplete episode", "")
            raise RolloutFailed(reason, f"task {task.id}: verifiers: {detail}")
        rollouts = [
            self._rollout(trace, completions, named=bool(policy.names))
            for trace in episode.traces
            if trace.ok and trace.agent.trainable and trace.id in asked
            if (completions := asked[trace.id].sessions[trace.id])
        ]
        if not rollouts:
            raise RolloutFailed("no completion", f"task {task.id}: no trainable agent of verifiers asked the policy")
        return rollouts

    def _rollout(self, trace: Any, completions: Sequence[Completion], named: bool) -> Rollout:
        """The completions of an agent, with the rewards and metrics of its trace.

        `named`: the run has several policies, named as the agents.
        """
        scores = {name: reward.score for name, reward in trace.rewards.items() if reward} | trace.metrics
        metrics = {name: float(value) for name, value in scores.items() if value is not None}
        role = trace.agent.name if len(self._roles) > 1 and not named else ""  # else its policy's name is the role
        return Rollout(tuple(completions), as_reward(trace.reward), metrics, role=role)

    async def close(self) -> None:
        if self._serving:
            self._serving.cancel()
            [outcome] = await asyncio.gather(self._serving, return_exceptions=True)
            self._serving = None
            if isinstance(outcome, Exception):
                raise outcome

    async def _serve(self) -> None:
        """Start the servers of the environment, once. Raises what their start raises."""
        if self._serving is None:  # in a new context: the servers outlive the episode that starts them
            self._served = asyncio.get_running_loop().create_future()
            self._serving = asyncio.create_task(self._hold_servers(), context=contextvars.Context())
        await asyncio.shield(self._served)

    async def _hold_servers(self) -> None:
        """Run the servers of the environment until `close` cancels this task."""
        try:
            async with self._environment.serving():
                self._served.set_result(None)
                await asyncio.Event().wait()
        except Exception as error:
            if self._served.done():
                raise
            fail_unawaited(self._served, error)


def _validated_agents(config: Any, task: type) -> list[str]:
    """The names of an environment's agents.

    Raises `ConfigError` for a Prime Intellect sandbox without PRIME_API_KEY, and `ValueError` for a harness that can't
    play the tasks in the agent's runtime.
    """
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.compile import validate_pairing
    from verifiers.v1.utils.loaders import load_harness
    from verifiers.v1.utils.prime import load_prime_config

    harnesses, agents = config.agent_harnesses(), agent_config_fields(config)
    for name, agent in agents.items():
        if agent.runtime.type == "prime" and not (
            os.environ.get("PRIME_API_KEY") or load_prime_config().get("api_key")
        ):
            chat = ', harness = { id = "null" }' if harnesses[name].id == "bash" else ""  # without a shell on this host
            raise ConfigError(
                f"environment.options.{name}.runtime is a sandbox of Prime, and PRIME_API_KEY is not set; set it, or "
                f'another runtime, on this host by {name} = {{ runtime = {{ type = "subprocess" }}{chat} }}'
            )
        validate_pairing(load_harness(harnesses[name]), task, agent.runtime)
    return [*agents]


def _validate_tables(table: str, options: Mapping[str, Any], *names: str) -> None:
    """Raise `ConfigError` for an option of these names that is no table."""
    for name in names:
        if not isinstance(options.get(name, {}), Mapping):
            raise ConfigError(f"{table}.{name} = {options[name]!r:.60}: make it a table of options")


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
