"""Evaluation: play held-out tasks on the engines during the training of further steps.

`slipstream eval` evaluates without a run (`tools/evaluate.py`); `slipstream generate` uses a model in this process.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from slipstream.config.environments import EnvironmentConfig
from slipstream.config.schema import Config
from slipstream.controller.evaluation_record import (
    PlayedTask,
    add_policies,
    all_failed,
    describe_failures,
    summarize,
)
from slipstream.controller.publishing import wait_published
from slipstream.controller.run_context import RunContext
from slipstream.environments.base import Policy, Task
from slipstream.environments.chat_tokenizer import ChatTokenizer
from slipstream.environments.concurrency import EpisodeSlots
from slipstream.environments.endpoint import Endpoint
from slipstream.environments.episode import (
    EpisodeOptions,
    EpisodeOutcome,
    RolloutFailed,
    Scoring,
    episode_limits,
    play_again,
    reward_error_counter,
    run_episode,
)
from slipstream.environments.load import LoadedEnvironment
from slipstream.environments.reward_workers import ScoringError
from slipstream.generators.base import Generator
from slipstream.observe.events import CONTROLLER
from slipstream.rollout import Sampling
from slipstream.runtime.closing import gather_all
from slipstream.runtime.event_loop import throttle

RECORDED_TASKS = 200  # tasks whose outcomes are recorded


async def evaluate_if_due(run: RunContext, tokens: int) -> None:
    """Start an evaluation if one is due, by steps or tokens. `tokens` are those of the last step, already in `totals`.

    Skips it, with a warning, while the one before is running. If `loop.max_lag` is 0, waits until the new one ends.
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
    run.evaluation = run.tasks.create_task(evaluate_served_policy(run))
    run.evaluation.add_done_callback(lambda _: run.changed.set())
    if run.config.loop.max_lag == 0:
        run.recorder.write()  # the trainer is idle now
        await run.evaluation


async def evaluate_served_policy(run: RunContext) -> None:
    """Evaluate the policy that engines serve, and record the result. Does nothing without held-out tasks.

    Training may continue in the meantime, if the caller lets it; then the version may change, unless
    `evaluation.snapshot`. Raises `WorkerDied` if no engine is alive.
    """
    environments = [each.loaded for each in run.environments]
    if not any(held_out_tasks(run.config, each) for each in environments):
        return
    snapshot = run.config.evaluation.snapshot
    if snapshot:
        await wait_published(run)  # no other publish begins until the evaluation ends, see `run.next_batch`
    step, began = run.state.step, run.events.now()
    with one_version(run) if snapshot else nullcontext():
        result = await evaluate(
            run.config, environments, run.cluster.generator, run.chat_tokenizer, run.endpoint, run.scoring,
            run.episode_slots, run.warn_of_reward_error, reward_log=run.reward_log,
        )  # fmt: skip
    if dead := run.cluster.generator.dead:  # without engines, every episode failed and the score means nothing
        raise dead
    run.events.add("evaluation", CONTROLLER, began, run.events.now(), step=step)
    record = {"step": step, **result}
    run.totals.add_evaluation(record)
    run.recorder.evaluation(record)
    run.progress.evaluation(record)
    if all_failed(result):
        run.progress.warn(describe_failures(result, f" in the evaluation after step {step}"))
    oldest, newest = result["versions"]
    if snapshot and oldest != newest:
        run.progress.warn(
            f"the evaluation after step {step} was sampled by versions {oldest} to {newest} in spite of "
            "evaluation.snapshot: engines died and were restarted on newer weights"
        )


@contextmanager
def one_version(run: RunContext) -> Iterator[None]:
    """Context in which engines that are late for the current version get no requests."""
    pool = run.cluster.generator
    before, pool.oldest = pool.oldest, run.state.version
    try:
        yield
    finally:
        pool.oldest = before


def held_out_tasks(config: Config, loaded: LoadedEnvironment) -> Sequence[Task]:
    """The held-out tasks on which an environment is evaluated."""
    count = loaded.options.evaluation_tasks
    return loaded.environment.test[: config.evaluation.tasks if count < 0 else count]


def _tasks_in_turns(config: Config, environments: Sequence[LoadedEnvironment]) -> list[tuple[LoadedEnvironment, Task]]:
    """The held-out tasks of all environments, one of each in turn, so that records have the first tasks of each."""
    rows = zip_longest(*([(each, task) for task in held_out_tasks(config, each)] for each in environments))
    return [pair for row in rows for pair in row if pair]


@dataclass(frozen=True)
class _Player:
    """Plays the samples of an evaluation; `episodes` are options by an environment's label."""

    config: Config
    generator: Generator
    tokenizer: ChatTokenizer
    endpoint: Endpoint | None
    episodes: Mapping[str, EpisodeOptions]

    async def play_all(self, tasks: Sequence[tuple[LoadedEnvironment, Task]]) -> dict[str, list[PlayedTask]]:
        """The outcomes of all samples of these tasks, by the names of `line_ups`."""
        lines, samples = line_ups(self.config), self.config.evaluation.samples
        playing = (self.play(line, *each, i) for line in lines.values() for each in tasks for i in range(samples))
        ended = iter(await gather_all(playing))
        return {own: [PlayedTask(*each, list(itertools.islice(ended, samples))) for each in tasks] for own in lines}

    async def play(
        self, policies: Mapping[str, str], each: LoadedEnvironment, task: Task, sample: int
    ) -> EpisodeOutcome:
        """Play a sample, again after a failure. Returns its rollouts, or the last failure."""
        seed = f"{self.config.loop.seed}/evaluation/{each.id_of(task)}" + f"/{sample}" * (sample > 0)
        outcomes = await play_again(
            lambda draw: self._play_once(policies, each, task, f"{seed}/draw {draw}" if draw else seed),
            each.options.rollout_retries,
        )
        return outcomes[-1]

    async def _play_once(
        self, policies: Mapping[str, str], each: LoadedEnvironment, task: Task, seed: str
    ) -> EpisodeOutcome:
        if self.config.loop.max_lag:  # a synchronous run's requests reach an engine as one message
            await throttle()
        sampling, limits = evaluation_sampling(self.config, each.options), episode_limits(each.options)
        policy = Policy(self.generator, self.tokenizer, sampling, seed, self.endpoint, limits, policies)
        try:
            return await run_episode(each.environment, task, policy, self.episodes[each.options.label])
        except RolloutFailed as failure:
            return failure


def line_ups(config: Config) -> dict[str, dict[str, str]]:
    """Which adapters play each evaluation of the same tasks, as `Policy` takes them; first those of the run, under "".

    With `evaluation.against_start`, each policy also plays with all others as at the start: the model without adapter.
    """
    names = [policy.name for policy in config.policies]
    against = names if config.evaluation.against_start else []
    return {"": {name: name for name in names}} | {own: {n: n if n == own else "" for n in names} for own in against}


async def evaluate(
    config: Config,
    environments: Sequence[LoadedEnvironment],
    generator: Generator,
    tokenizer: ChatTokenizer,
    endpoint: Endpoint | None = None,
    scoring: Scoring | None = None,
    slots: EpisodeSlots | None = None,
    on_reward_error: Callable[[ScoringError], None] = lambda error: None,
    played: list[PlayedTask] | None = None,
    reward_log: Path | None = None,
) -> dict[str, Any]:
    """Play the held-out tasks of all environments, `evaluation.samples` times each. Returns the record in
    `evaluations.jsonl`.

    `slots` bounds concurrent episodes. `played`, if given, gets the outcomes.
    """
    began, raised = time.perf_counter(), Counter[str]()

    def count_error(error: ScoringError) -> None:
        raised[error.reason] += 1
        on_reward_error(error)

    slots = slots or EpisodeSlots()
    episodes = {
        o.label: EpisodeOptions(o.timeout, scoring, slots, reward_error_counter(o, count_error), reward_log)
        for o in (each.options for each in environments)
    }
    player = _Player(config, generator, tokenizer, endpoint, episodes)
    by_line = await player.play_all(_tasks_in_turns(config, environments))
    by_task = by_line.pop("")
    if played is not None:
        played += by_task
    result = {**summarize(by_task, generator.version), "eval/reward_errors": dict(raised)}
    add_policies(result, by_task, by_line)
    recorded = [each.describe(tokenizer) for each in by_task[:RECORDED_TASKS]]
    return {**result, "eval/duration_s": time.perf_counter() - began, "samples": recorded}


def evaluation_sampling(config: Config, environment: EnvironmentConfig) -> Sampling:
    """Sampling parameters of evaluations on an environment, and of `slipstream generate`."""
    options = config.sampling_of(environment)
    return Sampling(
        config.evaluation.temperature, max_tokens=options.max_tokens, stop_strings=tuple(options.stop),
        record_logprobs=False,
    )  # fmt: skip
