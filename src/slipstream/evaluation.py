"""How good is a policy, and what does it say? Held-out tasks on any generator, and a model in this process."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from slipstream.closing import CloseError, closing
from slipstream.config import Config, ConfigError
from slipstream.environments.base import Codec, Environment, Policy, Task
from slipstream.environments.endpoint import Endpoint
from slipstream.environments.guard import (
    RolloutFailed,
    Scoring,
    all_or_none,
    attempt,
    count_reward_errors,
    episode_limits,
    episode_places,
)
from slipstream.environments.in_flight import Places
from slipstream.environments.load import load_environment
from slipstream.environments.scoring import ScoringError
from slipstream.generators.base import Generator
from slipstream.generators.torch import Engine, TorchGenerator
from slipstream.models import context_of, dtype_of, load_causal_lm, load_tokenizer, pick_device
from slipstream.observe.tally import metric_means
from slipstream.rollout import Completion, Rollout, Sampling, mean, samples_of
from slipstream.scoring.load import make_scoring
from slipstream.things import one_line

SAMPLES = 200  # tasks whose outcomes are recorded
TEXT = 500  # characters of a prompt or a completion that are recorded


async def evaluate(
    config: Config,
    environment: Environment,
    generator: Generator,
    codec: Codec,
    endpoint: Endpoint | None = None,
    scoring: Scoring | None = None,
    places: Places | None = None,
    told: Callable[[ScoringError], None] = lambda error: None,
) -> dict[str, Any]:
    """Play `evaluation.tasks` held-out tasks once each, and have them scored.

    `places` bound episodes in flight; `told` hears of reward functions that raise. `score` is the mean of the metric
    "correct" where the environment reports one, else of the reward; a failed episode counts as 0, and `failures` counts
    the reasons. `versions` are the oldest and newest weights that drew a token of it.
    """
    began = time.perf_counter()
    tasks = environment.test[: config.evaluation.tasks]

    limits = episode_limits(config.environment)
    failures: list[RolloutFailed] = []
    raised: Counter[str] = Counter()

    def count(error: ScoringError) -> None:
        raised[error.reason] += 1
        told(error)

    errors, limit = count_reward_errors(config.environment, count), config.environment.time_limit

    async def one(task: Task) -> tuple[tuple[Rollout, ...], dict[str, Any]]:
        seed = f"{config.loop.seed}/evaluation/{task.id}"
        policy = Policy(generator, codec, _sampling(config), seed, endpoint, limits)
        try:
            episode = await attempt(environment, task, policy, limit, scoring, places, errors)
        except RolloutFailed as failure:
            failures.append(failure)
            return (), {"failed": failure.reason}
        return episode, _sample(episode[-1], codec)

    played = await all_or_none(one(task) for task in tasks)
    episodes = [episode for episode, _ in played if episode]
    rollouts = [rollout for episode in episodes for rollout in episode]
    versions = [v for r in rollouts for c in r.completions for v in c.versions] or [generator.version]
    total = max(1, len(played))
    return {
        "versions": [min(versions), max(versions)],
        "score": sum(_score(episode) for episode in episodes) / total,
        "reward": sum(mean([r.reward for r in episode]) for episode in episodes) / total,
        "tasks": len(played),
        "failed": len(failures),
        "failures": dict(Counter(failure.reason for failure in failures)),
        "last_failure": failures[-1].one_line if failures else None,
        "reward_errors": dict(raised),
        "metrics": metric_means(rollouts),
        "completion_length": mean([float(r.tokens) for r in rollouts]),
        "seconds": time.perf_counter() - began,
        "samples": [
            {"id": task.id, "prompt": _prompt(task), **sample}
            for task, (_, sample) in zip(tasks[:SAMPLES], played, strict=False)
        ],
    }


def _score(episode: Sequence[Rollout]) -> float:
    """The mean of "correct" over the roles that report it, else of the rewards."""
    return mean([r.metrics["correct"] for r in episode if "correct" in r.metrics] or [r.reward for r in episode])


def _sample(rollout: Rollout, codec: Codec) -> dict[str, Any]:
    first, *more = rollout.completions
    last = samples_of(rollout.completions)[-1:] if more else []  # all that was said in it, by both sides
    said = codec.decode(last[0].token_ids[last[0].drawn[0] :]) if last else first.text
    return {"completion": _cut(said), "reward": rollout.reward}


def _prompt(task: Task) -> str:
    """What a task asks, as text; "" for a prompt of token ids."""
    if question := task.data.get("question"):
        return _cut(str(question))
    if isinstance(task.prompt, str):
        return _cut(task.prompt)
    last: Any = task.prompt[-1] if task.prompt else None
    return _cut(str(last.get("content", ""))) if isinstance(last, Mapping) else ""


def _cut(text: str) -> str:
    half = TEXT // 2
    return text if len(text) <= TEXT else f"{text[:half]} … {text[-half:]}"


class EvaluationError(RuntimeError):
    """No held-out task could be played."""


async def evaluate_model(config: Config) -> dict[str, Any]:
    """Play held-out tasks with the model at `config.model.path`; see `evaluate`. Raises `EvaluationError`."""
    environment = load_environment(config.environment)
    if not environment.test[: config.evaluation.tasks]:
        raise ConfigError(
            f"environment.name = {config.environment.name!r} has {len(environment.test)} held-out tasks, and "
            f"evaluation.tasks = {config.evaluation.tasks}: there is nothing to evaluate on"
        )
    generator, tokenizer = load_generator(config)
    codec = Codec(tokenizer, context_of(config))
    endpoint = Endpoint(codec)
    scoring = make_scoring(config, codec)
    closers = [part.close for part in (scoring, endpoint) if part]
    async with closing(*closers, lambda: close_environment(environment)):
        if scoring:
            await scoring.start()
        places = episode_places(config, config.generator.slots)
        result = await evaluate(config, environment, generator, codec, endpoint, scoring, places)
        if result["failed"] == result["tasks"]:
            raise EvaluationError(
                f"all {result['tasks']} held-out tasks failed, the last with: {result['last_failure']}"
            )
        return result


async def generate_texts(config: Config, prompts: Sequence[str]) -> list[Completion]:
    """Complete each prompt as evaluations do; the chat template is applied where the tokenizer has one."""
    generator, tokenizer = load_generator(config)
    policy = Policy(generator, Codec(tokenizer, context_of(config)), _sampling(config), "")
    return list(await asyncio.gather(*(policy.sample(p, seed=config.loop.seed + i) for i, p in enumerate(prompts))))


async def close_environment(environment: Environment) -> None:
    """Call the `close` of an environment that has one, async or not. Raises `CloseError`."""
    try:
        closed = environment.close() if hasattr(environment, "close") else None
        if inspect.isawaitable(closed):
            await closed
    except Exception as error:
        raise CloseError(f"closing the environment failed: {one_line(error)}") from None


def _sampling(config: Config) -> Sampling:
    """How completions are drawn where nothing is learned from them."""
    return Sampling(
        config.evaluation.temperature, max_tokens=config.sampling.max_tokens, stop_strings=tuple(config.sampling.stop)
    )


def load_generator(config: Config) -> tuple[TorchGenerator, Any]:
    """An embedded generator in this process, and its tokenizer."""
    if config.generator.threads:
        torch.set_num_threads(config.generator.threads)
    device = pick_device(config.generator.device, "generator.device")
    tokenizer = load_tokenizer(config.model.path)
    model = load_causal_lm(config.model.path, device=device, dtype=dtype_of(config))
    engine = Engine(model, slots=config.generator.slots, context=config.generator.context, tokenizer=tokenizer)
    return TorchGenerator(engine), tokenizer
