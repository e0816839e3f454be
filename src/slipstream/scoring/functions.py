"""A user's own function or class as a scorer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from slipstream.config import Config, ConfigError
from slipstream.environments.base import Task
from slipstream.environments.scoring import ScorerPool, scored
from slipstream.rollout import Rollout
from slipstream.scoring.base import Scorer
from slipstream.things import load_option

PARAMETERS = ("rollout", "completion")


def own_scorer(config: Config) -> Scorer:
    """What `scoring.kind = "module:thing"` names: a function, or a class with `async score(task, rollout)`.

    A function takes (task, rollout) or (task, completion), the last one of the rollout. Raises `ConfigError`.
    """
    options = config.scoring
    thing = load_option("scoring.kind", options.kind)
    if inspect.isclass(thing):
        return _made(thing, options.options, options.kind)
    if not inspect.isfunction(thing):
        raise ConfigError(f"scoring.kind = {options.kind!r} is neither a function nor a class")
    names = list(inspect.signature(thing).parameters)
    if len(names) != 2 or names[1] not in PARAMETERS:
        raise ConfigError(
            f"scoring.kind = {options.kind!r} takes ({', '.join(names)}); write `def score(task, rollout)` or "
            "`def score(task, completion)`"
        )
    if options.options:
        raise ConfigError(f"scoring.options: {options.kind} is a function and takes none; name a class")
    subject: Callable[[Rollout], Any] = _itself if names[1] == "rollout" else _last
    if inspect.iscoroutinefunction(thing):
        return AsyncFunction(thing, subject)
    return ProcessFunction(ScorerPool(options.kind, config.environment.scorers, options.time_limit), subject)


class AsyncFunction:
    """A function that is awaited in the controller's loop."""

    def __init__(self, function: Callable[[Task, Any], Any], subject: Callable[[Rollout], Any]) -> None:
        self._function, self._subject = function, subject

    async def score(self, task: Task, rollout: Rollout) -> Any:
        return await scored(self._function(task, self._subject(rollout)))

    async def close(self) -> None: ...


class ProcessFunction:
    """A function that is not async, in processes of its own: one may compute, hang or crash."""

    keeps_time = True  # the pool's clock runs from when a process is there for the score

    def __init__(self, pool: ScorerPool, subject: Callable[[Rollout], Any]) -> None:
        self._pool, self._subject = pool, subject
        self.concurrency = pool.processes

    async def score(self, task: Task, rollout: Rollout) -> Any:
        return await self._pool.score(task, self._subject(rollout))

    async def close(self) -> None:
        await self._pool.close()


def _itself(rollout: Rollout) -> Rollout:
    return rollout


def _last(rollout: Rollout) -> Any:
    return rollout.completions[-1]


def _made(kind: type, options: Mapping[str, Any], name: str) -> Scorer:
    if not inspect.iscoroutinefunction(getattr(kind, "score", None)):
        raise ConfigError(f"scoring.kind = {name!r} has no `async def score(self, task, rollout)`")
    try:
        scorer: Scorer = kind(**options)
    except (TypeError, ValueError, OSError) as error:
        raise ConfigError(f"scoring.options for {name}: {' '.join(str(error).split())}") from None
    return scorer
