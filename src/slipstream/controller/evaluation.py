"""Evaluation: play held-out tasks on the engines during the training of further steps, or on a model in this process.

`slipstream eval` and `slipstream generate` use a model in this process.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from slipstream.config.environments import EnvironmentConfig
from slipstream.config.plugins import Interrupts
from slipstream.config.schema import Config, ConfigError
from slipstream.controller.run_context import RunContext
from slipstream.environments.base import ChatTokenizer, Policy, Task
from slipstream.environments.concurrency import EpisodeSlots
from slipstream.environments.endpoint import Endpoint
from slipstream.environments.episode import (
    EpisodeOptions,
    RolloutFailed,
    Scoring,
    episode_limits,
    episode_slots,
    reward_error_counter,
    run_episode,
)
from slipstream.environments.load import LoadedEnvironment, close_environment, load_environments
from slipstream.environments.reward_workers import ScoringError
from slipstream.errors import RunError
from slipstream.generators.base import Generator
from slipstream.generators.torch.engine import Engine
from slipstream.generators.torch.generator import TorchGenerator
from slipstream.model.device import dtype_of, pick_device
from slipstream.model.inspection import max_model_len
from slipstream.model.loading import load_causal_lm, load_tokenizer
from slipstream.observe.events import CONTROLLER
from slipstream.observe.run_totals import metric_means
from slipstream.rollout import Completion, Rollout, Sampling, build_samples, mean
from slipstream.runtime.closing import closing, gather_all
from slipstream.runtime.event_loop import throttle
from slipstream.scheduling.curriculum import success_of
from slipstream.scoring.load import load_scoring

RECORDED_TASKS = 200  # tasks whose outcomes are recorded
RECORDED_CHARACTERS = 500  # of a prompt or a completion


async def evaluate_if_due(run: RunContext, tokens: int) -> None:
    """Start an evaluation if one is due, by steps or tokens. `tokens` is the number of tokens of the last step.

    Skips it, with a warning, while the one before is running. Waits for its end if `loop.max_lag` is 0.
    """
    step, total = run.state.step, run.totals.tokens_trained
    every, every_tokens = run.config.evaluation.every, run.config.evaluation.every_tokens
    by_steps = every and step % every == 0
    by_tokens = every_tokens and total // every_tokens > (total - tokens) // every_tokens
    if run.complete or not (by_steps or by_tokens):
        return
    if run.evaluation and not run.evaluation.done():
        run.progress.warn(f"evaluation at step {step} left out: the one before is still running")
        return
    run.evaluation = run.tasks.create_task(evaluate_run(run))
    if run.config.loop.max_lag == 0:
        run.recorder.write()  # the trainer is idle now
        await run.evaluation


async def evaluate_run(run: RunContext) -> None:
    """Evaluate the served policy concurrently with training rollouts, and record the result.

    Without held-out tasks it does nothing. Raises `WorkerDied` if no engine is alive.
    """
    environments = [each.loaded for each in run.environments]
    if not any(held_out_tasks(run.config, each) for each in environments):
        return
    step, began = run.state.step, run.events.now()
    result = await evaluate(
        run.config, environments, run.cluster.generator, run.chat_tokenizer, run.endpoint, run.scoring,
        run.episode_slots, run.warn_of_reward_error,
    )  # fmt: skip
    if dead := run.cluster.generator.dead:  # without engines, every episode failed and the score means nothing
        raise dead
    run.events.add("evaluation", CONTROLLER, began, run.events.now(), step=step)
    record = {"step": step, **result}
    run.totals.add_evaluation(record)
    run.recorder.evaluation(record)
    run.progress.evaluation(record)
    if result["eval/failed"] == result["eval/tasks"]:
        run.progress.warn(describe_failures(result, f" in the evaluation after step {step}"))


def held_out_tasks(config: Config, loaded: LoadedEnvironment) -> Sequence[Task]:
    """The held-out tasks on which an environment is evaluated."""
    count = loaded.options.evaluation_tasks
    return loaded.environment.test[: config.evaluation.tasks if count < 0 else count]


async def evaluate(
    config: Config,
    environments: Sequence[LoadedEnvironment],
    generator: Generator,
    tokenizer: ChatTokenizer,
    endpoint: Endpoint | None = None,
    scoring: Scoring | None = None,
    slots: EpisodeSlots | None = None,
    on_reward_error: Callable[[ScoringError], None] = lambda error: None,
) -> dict[str, Any]:
    """Play the held-out tasks of all environments once each and score them. Returns the record in `evaluations.jsonl`.

    `slots` bounds concurrent episodes. `eval/score` is the mean of the metric "correct" if the environment reports it,
    else of the reward; a failed episode counts as 0. `versions` are the oldest and newest weights that sampled a token.
    """
    began = time.perf_counter()
    tasks = [(each, task) for each in environments for task in held_out_tasks(config, each)]
    raised: Counter[str] = Counter()

    def count_error(error: ScoringError) -> None:
        raised[error.reason] += 1
        on_reward_error(error)

    slots = slots or EpisodeSlots()
    playing = {  # by label
        o.label: EpisodeOptions(o.timeout, scoring, slots, reward_error_counter(o, count_error))
        for o in (each.options for each in environments)
    }

    async def play_task(each: LoadedEnvironment, task: Task) -> tuple[Rollout, ...] | RolloutFailed:
        if config.loop.max_lag:  # a synchronous run's requests reach an engine as one message
            await throttle()
        seed, limits = f"{config.loop.seed}/evaluation/{each.id_of(task)}", episode_limits(each.options)
        policy = Policy(generator, tokenizer, evaluation_sampling(config, each.options), seed, endpoint, limits)
        try:
            return await run_episode(each.environment, task, policy, playing[each.options.label])
        except RolloutFailed as failure:
            return failure

    played = await gather_all(play_task(*each) for each in tasks)
    result = {**_outcome(played, generator.version), "eval/reward_errors": dict(raised)}
    for each in environments:
        own = [outcome for (environment, _), outcome in zip(tasks, played, strict=True) if environment is each]
        result |= environment_scores(each.options.label, own)
    samples = [_sample(*each, tokenizer) for each in zip(tasks, played[:RECORDED_TASKS], strict=False)]
    return {**result, "eval/duration_s": time.perf_counter() - began, "samples": samples}


def _outcome(played: Sequence[tuple[Rollout, ...] | RolloutFailed], version: int) -> dict[str, Any]:
    """Scores, failures and versions of the played tasks; `version` if no token was sampled."""
    failures = [outcome for outcome in played if isinstance(outcome, RolloutFailed)]
    episodes = [outcome for outcome in played if not isinstance(outcome, RolloutFailed)]
    versions = [v for e in episodes for r in e for c in r.completions for v in c.versions] or [version]
    return {
        "versions": [min(versions), max(versions)],
        **_scores(episodes, len(played)),
        "eval/failed": len(failures),
        "eval/failures": dict(Counter(failure.reason for failure in failures)),
        "last_failure": failures[-1].one_line if failures else None,
    }


async def evaluate_model(config: Config) -> dict[str, Any]:
    """Evaluate the model at `model.path`, see `evaluate`. Raises `ConfigError`, and `RunError` if all fail."""
    environments = load_environments(config)
    if not any(held_out_tasks(config, each) for each in environments):
        count = sum(len(each.environment.test) for each in environments)
        names = " and ".join(repr(each.options.name) for each in environments)
        raise ConfigError(
            f"environment.name = {names} has {count} held-out tasks, and evaluation.tasks = {config.evaluation.tasks}: "
            "there is nothing to evaluate on"
        )
    generator, tokenizer = load_generator(config)
    chat_tokenizer = ChatTokenizer(tokenizer, max_model_len(config))
    endpoint = Endpoint(chat_tokenizer)
    scoring = load_scoring(config, chat_tokenizer)
    closers: list[Callable[[], Awaitable[Any]]] = [part.close for part in (scoring, endpoint) if part]
    closers += [partial(close_environment, each.environment) for each in environments]
    async with closing(*closers):
        if scoring:
            await scoring.start()
        slots = episode_slots(config, config.generator.max_num_seqs)
        with Interrupts():
            result = await evaluate(config, environments, generator, chat_tokenizer, endpoint, scoring, slots)
        if result["eval/failed"] == result["eval/tasks"]:
            raise RunError(describe_failures(result))
        return result


async def generate_texts(config: Config, prompts: Sequence[str]) -> list[Completion]:
    """Complete each prompt with the embedded engine in this process, sampling as evaluations do.

    Uses the chat template if the tokenizer has one. Raises `ConfigError`.
    """
    generator, tokenizer = load_generator(config)
    sampling = evaluation_sampling(config, config.environment)
    policy = Policy(generator, ChatTokenizer(tokenizer, max_model_len(config)), sampling, "")
    seed = config.loop.seed
    return list(await asyncio.gather(*(policy.sample(p, seed=seed + i) for i, p in enumerate(prompts))))


def load_generator(config: Config) -> tuple[TorchGenerator, Any]:
    """An embedded engine in this process, and the tokenizer. Raises `ConfigError`, and as `Engine`."""
    if config.generator.threads:
        torch.set_num_threads(config.generator.threads)
    device = pick_device(config.generator.device, "generator.device")
    tokenizer = load_tokenizer(config.model.path)
    model = load_causal_lm(config.model.path, device=device, dtype=dtype_of(config))
    engine = Engine(
        model, slots=config.generator.max_num_seqs, context=config.generator.max_model_len, tokenizer=tokenizer
    )
    return TorchGenerator(engine), tokenizer


def evaluation_sampling(config: Config, environment: EnvironmentConfig) -> Sampling:
    """Sampling parameters of evaluations on an environment, and of `slipstream generate`."""
    options = config.sampling_of(environment)
    return Sampling(config.evaluation.temperature, max_tokens=options.max_tokens, stop_strings=tuple(options.stop))


def describe_failures(result: Mapping[str, Any], when: str = "") -> str:
    """One line on the held-out tasks that failed, at least one. `when`, such as " after step 5", follows the count."""
    failed, tasks = result["eval/failed"], result["eval/tasks"]
    count = f"all {tasks}" if failed == tasks else f"{failed} of {tasks}"
    return f"{count} held-out tasks failed{when}, the last with: {result['last_failure']}"


def _scores(episodes: Sequence[Sequence[Rollout]], tasks: int) -> dict[str, Any]:
    """Means over all `tasks`, of which `episodes` succeeded."""
    rollouts = [rollout for episode in episodes for rollout in episode]
    return {
        "eval/score": sum(success_of(episode) for episode in episodes) / max(1, tasks),
        "eval/reward": sum(mean([r.reward for r in episode]) for episode in episodes) / max(1, tasks),
        "eval/tasks": tasks,
        **{f"eval/env/{name}": value for name, value in metric_means(rollouts).items()},
        "eval/mean_length": mean([float(r.tokens) for r in rollouts]),
    }


def environment_scores(label: str, played: Sequence[tuple[Rollout, ...] | RolloutFailed]) -> dict[str, Any]:
    """Scores of one environment, by names with its label."""
    episodes = [outcome for outcome in played if not isinstance(outcome, RolloutFailed)]
    scores = _scores(episodes, len(played)) | {"eval/failed": len(played) - len(episodes)}
    return {name.replace("eval/", f"eval/environments/{label}/", 1): value for name, value in scores.items()}


def _sample(
    asked: tuple[LoadedEnvironment, Task], outcome: Sequence[Rollout] | RolloutFailed, tokenizer: ChatTokenizer
) -> dict[str, Any]:
    """What `evaluations.jsonl` records of one task."""
    loaded, task = asked
    known = {"id": loaded.id_of(task), "prompt": _prompt(task)}
    if isinstance(outcome, RolloutFailed):
        return {**known, "failed": outcome.reason}
    first, *more = outcome[-1].completions
    last = build_samples(outcome[-1].completions)[-1:] if more else []  # the whole conversation
    text = tokenizer.decode(last[0].token_ids[last[0].sampled_positions[0] :]) if last else first.text
    return {**known, "completion": _shorten(text), "reward": outcome[-1].reward, "score": success_of(outcome)}


def _prompt(task: Task) -> str:
    """What a task asks, as text; "" for a prompt of token ids."""
    if question := task.data.get("question"):
        return _shorten(str(question))
    if isinstance(task.prompt, str):
        return _shorten(task.prompt)
    last: Any = task.prompt[-1] if task.prompt else None
    return _shorten(str(last.get("content", ""))) if isinstance(last, Mapping) else ""


def _shorten(text: str) -> str:
    half = RECORDED_CHARACTERS // 2
    return text if len(text) <= RECORDED_CHARACTERS else f"{text[:half]} … {text[-half:]}"
