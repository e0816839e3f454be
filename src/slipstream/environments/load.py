"""Load the environment that a configuration names: any failure raises `ConfigError` with one line. And close it."""

from __future__ import annotations

import asyncio
import inspect
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.config.environments import BUILT_IN, EnvironmentConfig
from slipstream.config.loading import with_options
from slipstream.config.plugins import construct, load_option, one_line, option_code
from slipstream.config.schema import Config, ConfigError
from slipstream.config.suggestions import suggest
from slipstream.environments.base import Environment, Policy, Task
from slipstream.environments.dataset import Dataset
from slipstream.environments.reward_workers import RewardFunction, cores
from slipstream.environments.text_limits import is_encodable
from slipstream.environments.worker_environment import Wave, WorkerEnvironment

LIBRARIES = {  # their environments are named "library:environment"
    "openenv": "slipstream.environments.openenv:OpenEnv",
    "reasoning-gym": "slipstream.environments.reasoning_gym:ReasoningGym",
    "verifiers": "slipstream.environments.verifiers:Verifiers",
}
CLOSE_TIMEOUT_S = 30.0  # of an environment
REWARD_SHARE = 0.1  # of an episode's timeout: one hung reward must not use up that of the episodes behind it


@dataclass(frozen=True)
class LoadedEnvironment:
    """An environment with its options. `prefix` makes the ids of its tasks unique among several environments."""

    options: EnvironmentConfig
    environment: Environment
    prefix: str = ""

    def id_of(self, task: Task) -> str:
        """The id of a task in the records of a run."""
        return self.prefix + task.id


def load_environments(config: Config, logs: Path | None = None) -> list[LoadedEnvironment]:
    """All environments of a configuration; their workers write to files in `logs`. Raises `ConfigError`."""
    wave = Wave() if config.loop.max_lag == 0 else None
    loaded = []
    for options in config.each_environment:
        environment = load_environment(options)
        if options.workers:
            environment = WorkerEnvironment(environment, options, wave, logs)
        loaded.append(LoadedEnvironment(options, environment, f"{options.label}/" if config.environments else ""))
    return loaded


def with_steps(config: Config, loaded: Sequence[LoadedEnvironment]) -> Config:
    """The configuration with the `loop.steps` of its `loop.epochs`, if it has these. Raises `ConfigError`."""
    if not config.loop.epochs:
        return config
    steps = math.ceil(config.loop.epochs * max(epoch_steps(config, each) for each in loaded))
    return with_options(config, loop=config.loop.model_dump() | {"steps": steps, "epochs": 0.0})


def epoch_steps(config: Config, each: LoadedEnvironment) -> float:
    """The steps in which each training task of an environment is visited once."""
    return len(each.environment.train) / (config.loop.groups_per_step * share_of_groups(config, each))


def share_of_groups(config: Config, each: LoadedEnvironment) -> float:
    """The share of an environment in the groups of a step, by the weights of all."""
    return each.options.weight / sum(options.weight for options in config.each_environment)


def load_environment(config: EnvironmentConfig) -> Environment:
    """The environment that `config.name` names, with `config.options`. Raises `ConfigError`."""
    library, _, inside = config.name.partition(":")
    name = LIBRARIES.get(library) or BUILT_IN.get(config.name, config.name)
    loaded = load_option("environment.name", name, "environment", list(BUILT_IN))
    environment: Environment = loaded
    with option_code("environment.name", config.name):
        if inspect.isclass(loaded):
            environment = _construct(loaded, config, {"name": inside} if library in LIBRARIES else {})
        elif callable(loaded) and not hasattr(loaded, "rollout"):
            environment = FunctionEnvironment(loaded, config)
        elif config.options:
            raise ConfigError(f"environment.options: {config.name} is made already and takes none; name its class")
        _validate(environment, config.name)
    return environment


async def close_environment(environment: Environment) -> None:
    """Call the environment's `close`, if it has one, sync or async. Prints a failure: results are already written.

    A `close` that does not end within `CLOSE_TIMEOUT_S` is cancelled.
    """
    try:
        closed = environment.close() if hasattr(environment, "close") else None
        if inspect.isawaitable(closed):
            await asyncio.wait_for(closed, CLOSE_TIMEOUT_S)
    except TimeoutError:
        print(f"slipstream: warning: closing the environment took {CLOSE_TIMEOUT_S:g} s: cancelled", file=sys.stderr)
    except Exception as error:
        print(f"slipstream: warning: closing the environment failed: {one_line(error)}", file=sys.stderr)


def takes_reward_workers(environment: Environment) -> bool:
    """Whether `environment.reward_workers` has an effect on the environment."""
    if isinstance(environment, WorkerEnvironment):
        environment = environment.environment
    if isinstance(environment, FunctionEnvironment):
        return environment.has_reward_workers
    return "reward_workers" in inspect.signature(type(environment)).parameters


def _validate(environment: Any, name: str) -> None:
    """Raise `ConfigError` for missing attributes, and for invalid tasks."""
    for attribute in ("train", "test", "rollout"):
        if not hasattr(environment, attribute):
            raise ConfigError(f"environment.name = {name!r} has no {attribute!r}; an environment needs it")
    for split in ("train", "test"):
        tasks = getattr(environment, split)
        if not hasattr(tasks, "__len__") or not hasattr(tasks, "__getitem__"):
            found = type(tasks).__name__
            raise ConfigError(f"environment.name = {name!r}: {split} is a {found}; make it a list of tasks")
        for index in range(len(tasks)):
            task: Any = tasks[index]
            if not hasattr(task, "id") or not isinstance(getattr(task, "prompt", None), str | list | tuple):
                raise ConfigError(
                    f"environment.name = {name!r}: {split}[{index}] is {task!r:.80}; make it a "
                    "slipstream.environments.base.Task, whose prompt is text or a list of messages"
                )
            if not isinstance(task.id, str) or not is_encodable(task.id):
                raise ConfigError(
                    f"environment.name = {name!r}: the id of {split}[{index}] is {task.id!r:.80}, of type "
                    f"{type(task.id).__name__}; make it text that UTF-8 can encode"
                )
    if not len(environment.train):
        raise ConfigError(f"environment.name = {name!r} has no training tasks; check environment.options")
    try:
        inspect.signature(environment.rollout).bind("task", "policy")
    except TypeError as error:
        raise ConfigError(
            f"environment.name = {name!r}: rollout can't be called with 2 arguments ({error}); write "
            "`async def rollout(self, task, policy)`"
        ) from None


def _construct(kind: type, config: EnvironmentConfig, from_name: dict[str, str]) -> Any:
    """The environment with its options and those in its name (`library:NAME`). Raises `ConfigError`."""
    parameters = inspect.signature(kind).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    options = {**config.options, **from_name}
    for name in options:
        if name not in parameters and not takes_any:
            hint = suggest(name, list(parameters)) or f"; it takes {', '.join(parameters) or 'none'}"
            raise ConfigError(f"environment.options.{name} is unknown to {config.name}{hint}")
    # An environment with its own `RewardWorkerPool` gets the run's settings.
    settings = {"reward_workers": config.reward_workers or cores(), "timeout": config.timeout * REWARD_SHARE}
    settings = {name: value for name, value in settings.items() if name in parameters and name not in options}
    return construct("environment", config.name, kind, options, **settings)


class FunctionEnvironment:
    """A user's `async rollout(task, policy)` or `reward(task, completion)`, on the tasks of a dataset.

    Options are those of `Dataset` but `reward`. `train` is another name of `dataset`.
    """

    def __init__(self, function: Any, config: EnvironmentConfig) -> None:
        self._function = function
        signature = inspect.signature(function)
        parameters = list(signature.parameters)
        write = "write `async def rollout(task, policy)` or `def reward(task, completion)`"
        if len(parameters) != 2:
            raise ConfigError(f"environment.name = {config.name!r} takes {len(parameters)} arguments; {write}")
        try:
            signature.bind("task", "policy")
        except TypeError as error:
            found = f"can't be called with 2 arguments ({error})"
            raise ConfigError(f"environment.name = {config.name!r} {found}; {write}") from None
        is_async = inspect.iscoroutinefunction(function)
        if not is_async and parameters[1] == "policy":
            raise ConfigError(
                f"environment.name = {config.name!r} takes a policy: write it as `async def`, to await it"
            )
        is_episode = is_async and parameters[1] != "completion"
        timeout = config.timeout * REWARD_SHARE
        self._reward = None if is_episode else RewardFunction(function, config.name, config.reward_workers, timeout)
        self.has_reward_workers = bool(self._reward and self._reward.pool)
        options = {"id": "id?", **config.options}
        if "train" in options:
            options["dataset"] = options.pop("train")
        if unusable := [name for name in ("dataset", "reward") if (name in options) == (name == "reward")]:
            raise ConfigError(
                "environment.dataset is not set; a function needs the file of its tasks"
                if unusable[0] == "dataset"
                else "environment.reward does nothing: the function is the reward; leave it out"
            )
        tasks = _construct(Dataset, config.model_copy(update={"options": options}), {})
        self.train, self.test = tasks.train, tasks.test

    async def rollout(self, task: Task, policy: Policy) -> Any:
        if self._reward:
            return await self._reward.score(task, await policy.sample(task.prompt))
        return await self._function(task, policy)

    async def close(self) -> None:
        if self._reward:
            await self._reward.close()
