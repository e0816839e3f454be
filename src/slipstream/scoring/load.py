"""Create the scoring stage of a configuration, with a built-in scorer or a user's function or class."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from slipstream.config.plugins import construct, load_option, option_code
from slipstream.config.schema import Config, ConfigError
from slipstream.environments.base import Task
from slipstream.environments.chat_tokenizer import ChatTokenizer
from slipstream.environments.reward_workers import RewardFunction
from slipstream.rollout import Rollout
from slipstream.scoring.base import Scorer
from slipstream.scoring.http import Judge
from slipstream.scoring.model import RewardModel
from slipstream.scoring.stage import ScoringStage
from slipstream.scoring.teacher import Teacher

PARAMETERS = ("rollout", "completion")


def load_scoring(config: Config, tokenizer: ChatTokenizer, logs: Path | None = None) -> ScoringStage | None:
    """The stage of this configuration, not started; None without scorer and teacher. Raises `ConfigError`."""
    scorer = make_scorer(config, tokenizer, logs)
    teacher = Teacher(config, logs and logs / "teacher.log") if config.teacher.path or config.teacher.lag else None
    return ScoringStage(config.scoring, scorer, teacher) if scorer or teacher else None


def make_scorer(config: Config, tokenizer: ChatTokenizer, logs: Path | None) -> Scorer | None:
    """The scorer that `scoring.kind` names, if any. Raises `ConfigError`."""
    kind, options = config.scoring.kind, config.scoring.options
    if kind == "http":
        return Judge(options, tokenizer)
    if kind == "model":
        return RewardModel(options, config.model.path, logs and logs / "reward_model.log", config.runtime)
    return user_scorer(config) if kind else None


def user_scorer(config: Config) -> Scorer:
    """The scorer that `scoring.kind = "module:name"` names: a function, or a class with `async score(task, rollout)`.

    A function takes (task, rollout) or (task, completion), the rollout's last completion. Raises `ConfigError`.
    """
    loaded = load_option("scoring.kind", config.scoring.kind)
    with option_code("scoring.kind", config.scoring.kind):
        return _scorer(loaded, config)


def _scorer(loaded: Any, config: Config) -> Scorer:
    """The scorer of a loaded function or class."""
    options = config.scoring
    if inspect.isclass(loaded):
        for name, parameters in ("score", "self, task, rollout"), ("close", "self"):
            if not inspect.iscoroutinefunction(getattr(loaded, name, None)):
                raise ConfigError(f"scoring.kind = {options.kind!r} has no `async def {name}({parameters})`")
        scorer: Scorer = construct("scoring", options.kind, loaded, options.options)
        return scorer
    if not inspect.isfunction(loaded):
        raise ConfigError(f"scoring.kind = {options.kind!r} is neither a function nor a class")
    names = list(inspect.signature(loaded).parameters)
    if len(names) != 2 or names[1] not in PARAMETERS:
        raise ConfigError(
            f"scoring.kind = {options.kind!r} takes ({', '.join(names)}); write `def score(task, rollout)` or "
            "`def score(task, completion)`"
        )
    if options.options:
        raise ConfigError(f"scoring.options: {options.kind} is a function and takes none; name a class")
    function = RewardFunction(loaded, options.kind, config.environment.reward_workers, options.timeout)
    return FunctionScorer(function, takes_rollout=names[1] == "rollout")


class FunctionScorer:
    """Scores with a user's function. The timeout of a reward worker starts when a worker is free."""

    def __init__(self, function: RewardFunction, takes_rollout: bool) -> None:
        self._function, self._takes_rollout = function, takes_rollout
        self.has_own_timeout = function.pool is not None
        if function.pool:
            self.concurrency = function.pool.processes

    async def score(self, task: Task, rollout: Rollout) -> Any:
        return await self._function.score(task, rollout if self._takes_rollout else rollout.completions[-1])

    async def close(self) -> None:
        await self._function.close()
