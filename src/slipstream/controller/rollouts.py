"""Play training rollouts: admit groups, play the members of each, handle failures, retire tasks that always fail."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial

from slipstream.controller.run_context import RunContext
from slipstream.environments.base import Policy, Task
from slipstream.environments.concurrency import EpisodeSlots
from slipstream.environments.episode import (
    EpisodeOptions,
    EpisodeOutcome,
    RolloutFailed,
    episode_limits,
    play_again,
    run_episode,
)
from slipstream.errors import RunError
from slipstream.objective import has_signal
from slipstream.observe.events import CONTROLLER, SCORING
from slipstream.rollout import Group, Rollout
from slipstream.runtime.closing import gather_all
from slipstream.runtime.event_loop import throttle
from slipstream.scheduling.ledger import Visit

FILTERED_STEPS = 20  # steps' worth of filtered groups in a row: the default limit, and the number that causes a warning
UNASKED_STEPS = 10  # steps without a rollout of one of several policies, after which the run ends
SLOW_EPISODE_S = 10.0  # age at which an episode is first reported as slow


def admit_groups(run: RunContext) -> None:
    """Start as many groups as staleness and buffer allow. Called after every event that may allow more.

    A synchronous run starts all groups in one iteration of the event loop, so that an engine gets them as one message.
    """
    if run.ending:
        return
    if run.config.loop.max_lag == 0:
        start_groups(run, run.state.startable())
    elif run.admission is None or run.admission.done():
        run.admission = run.tasks.create_task(admit_gradually(run))


async def admit_gradually(run: RunContext) -> None:
    """Start a few groups per iteration of the event loop: starting hundreds of rollouts at once blocks it for 0.1 s."""
    while start_groups(run, min(1, run.state.startable())):
        await throttle()


def start_groups(run: RunContext, count: int) -> int:
    """Start `count` groups, or none if the run is paused or ending. Returns the number of started groups."""
    count = 0 if run.ending or run.paused else count
    for _ in range(count):
        task = run.tasks.create_task(play_group(run, run.state.ledger.start()))
        run.running_groups.add(task)
        task.add_done_callback(run.running_groups.discard)
    return count


async def play_group(run: RunContext, visit: Visit) -> None:
    """Play all members of one task's group concurrently, call `end_group` with their rollouts, and admit more groups.

    Raises as `play_rollout` and `end_group`.
    """
    played = run.environments[visit.environment]
    task, size = played.environment.train[visit.task], run.config.loop.group_size
    began = run.events.now()
    try:
        members = await gather_all(play_member(run, task, visit, member) for member in range(size))
    except asyncio.CancelledError:
        run.state.ledger.cancelled(visit.id)
        run.events.forget_group(visit.id)
        raise
    end_group(run, visit, task, list(itertools.chain.from_iterable(members)), began)
    admit_groups(run)
    run.changed.set()


async def play_member(run: RunContext, task: Task, visit: Visit, member: int) -> list[EpisodeOutcome]:
    """Play one member of a group, again after a failure. Returns as `play_again`."""
    return await play_again(
        lambda draw: play_rollout(run, task, visit, f"{member}/{draw}" if draw else f"{member}"),
        run.environments[visit.environment].options.rollout_retries,
    )


async def play_rollout(run: RunContext, task: Task, visit: Visit, member: str) -> EpisodeOutcome:
    """Play one episode. Returns its rollouts, one per role, or why it failed. `member` derives its seed.

    Raises `RunError` after too many failures in a row, and `WorkerDied` if all engines or a scoring process died.
    """
    if run.config.loop.max_lag:  # a synchronous run's requests reach an engine as one message
        await throttle()
    seed = f"{run.config.loop.seed}/{visit.id}/{visit.attempt}/{member}"
    played, began = run.environments[visit.environment], run.events.now()
    limits = episode_limits(played.options)
    generator = run.cluster.generator
    policy = Policy(generator, run.chat_tokenizer, played.sampling, seed, run.endpoint, limits, run.policies)
    try:
        scoring = partial(score, run, visit) if run.scoring else None
        playing = EpisodeOptions(
            played.options.timeout, scoring, run.episode_slots, played.reward_errors, run.reward_log
        )
        rollouts = await run_episode(played.environment, task, policy, playing)
        run.totals.reward_seconds.append(time.monotonic() - policy.sampled_at)
    except RolloutFailed as failure:
        run.events.rollout_failed(visit.id, began, policy.recorded, failure.reason)
        note_failure(run, visit, failure)
        return failure
    finally:
        run.totals.tokens_generated += sum(len(c.token_ids) for c in policy.recorded)
    if not (played.reward_errors and played.reward_errors.in_a_row):
        played.failure_streak.succeeded()
    return rollouts


async def score(run: RunContext, visit: Visit, task: Task, rollout: Rollout) -> Rollout:
    """The rollout as scorer and teacher complete it. Records the time, which includes the wait in their queue."""
    assert run.scoring
    began = run.events.now()
    try:
        return await run.scoring(task, rollout)
    finally:
        run.events.add("score", SCORING, began, run.events.now(), visit_id=visit.id)


def note_failure(run: RunContext, visit: Visit, failure: RolloutFailed) -> None:
    """Warn of the first failed rollout. `end_group` counts it.

    Raises `RunError` if the environment's `FailureStreak` ends the run, and `WorkerDied` if the engine pool or the
    scoring has died.
    """
    if dead := run.cluster.generator.dead or (run.scoring and run.scoring.dead):
        raise dead from None
    if not run.warned_of_failure:
        run.warned_of_failure = True
        run.progress.warn(f"a rollout failed: {failure.one_line}; rollout/failures in metrics.jsonl counts all reasons")
    streak = run.environments[visit.environment].failure_streak
    if streak.failed(visit.task, run.state.ledger.running_tasks(visit.environment)):
        found = f"{streak.rollouts} rollouts of {len(streak.tasks)} tasks in a row failed"
        raise run_error(run, found, failure) from None


def end_group(run: RunContext, visit: Visit, task: Task, played: Sequence[EpisodeOutcome], began: float) -> None:
    """Add the group to the buffer, filter it, or return its task to pending; retire the task after the last try.

    The group started at time `began` of the run. Raises `RunError` if most tasks are retired.
    """
    options, first_step, before = run.config.algorithm, run.state.step == 0, run.state.filtered_in_a_row
    limit = options.max_filtered_in_a_row or FILTERED_STEPS * run.config.loop.groups_per_step
    failures = [outcome for outcome in played if isinstance(outcome, RolloutFailed)]
    rollouts = [rollout for outcome in played if not isinstance(outcome, RolloutFailed) for rollout in outcome]
    task_id = run.environments[visit.environment].loaded.id_of(task)
    fate = run.state.end(
        visit,
        task_id,
        rollouts,
        failures=[failure.reason for failure in failures],
        has_signal=lambda group: (
            not options.filter_zero_advantage or has_signal(run.objective, run.config, group, strict=first_step)
        ),
        max_filtered_in_a_row=limit,
    )
    run.events.group(visit.id, task_id, "failed" if fate == "retired" else fate, began, rollouts)
    if fate == "retired" and failures:
        retire_task(run, visit, failures[-1])
    if before < min(limit, FILTERED_STEPS * run.config.loop.groups_per_step) == run.state.filtered_in_a_row:
        run.progress.warn(
            f"the last {run.state.filtered_in_a_row} groups had advantages of 0 and were replaced; after "
            f"algorithm.max_filtered_in_a_row = {limit} in a row they are trained on as they are, which changes "
            "nothing: give tasks that the policy solves sometimes, raise sampling.temperature or loop.group_size, "
            "or set algorithm.filter_zero_advantage = false"
        )


def take_groups(run: RunContext) -> list[Group]:
    """The groups of the next step, as `LoopState.take_batch`. Records the stale groups that it drops.

    Warns of one of several policies that has no rollout in the first step. Raises `RunError` if it has none in
    `UNASKED_STEPS` steps.
    """
    dropped: list[int] = []
    groups = run.state.take_batch(dropped.append)
    if dropped:
        run.events.add("dropped", CONTROLLER, visit_ids=dropped)
    if groups and (untrained := run.state.untrained):
        found = f'policy["{untrained[0]}"] has no rollout in the first'
        remedy = "ask it in the environment, or remove it from [[policies]]"
        if run.state.step + 1 >= UNASKED_STEPS:
            raise RunError(f"{found} {run.state.step + 1} steps: {remedy}")
        if run.state.step == 0:
            run.progress.warn(f"{found} step; the run ends if it has none in {UNASKED_STEPS} steps: {remedy}")
    return groups


def retire_task(run: RunContext, visit: Visit, failure: RolloutFailed) -> None:
    """Warn about a task whose every try failed. Raises `RunError` if these are most tasks of its environment."""
    played, tries = run.environments[visit.environment], run.config.loop.retries + 1
    task = played.environment.train[visit.task]
    task_id = played.loaded.id_of(task)
    run.totals.tasks_retired[task_id] = failure.reason
    played.retired.add(visit.task)
    playable = len(played.environment.train) - len(played.long_prompts)
    if 2 * len(played.retired) > playable:
        found = f"{len(played.retired)} of {playable} tasks can't be played: they failed in each of {tries} tries"
        raise run_error(run, found, failure) from None
    source = f" ({task.source})" if getattr(task, "source", "") else ""
    run.progress.warn(
        f"task {task_id}{source} is left out from now on: it failed in each of {tries} tries, the last with: "
        f"{failure.one_line}"
    )


def run_error(run: RunContext, found: str, last: RolloutFailed) -> RunError:
    """The error for too many failures, with the last of them and the command that resumes the run."""
    separator = "\n" if "\n" in last.detail else ": "  # the lines of a traceback stand alone
    resume = f"Fix the cause, then: slipstream train --resume {run.directory.path}"
    return RunError(f"{found}, the last with: {last.reason}{separator}{last.detail}\n{resume}")


async def report_slow_episodes(slots: EpisodeSlots, note: Callable[[str], object]) -> None:
    """Report the longest-running episode when its age reaches `SLOW_EPISODE_S`, and again each time it doubles."""
    due = SLOW_EPISODE_S
    while True:
        await asyncio.sleep(due / 10)
        longest = slots.longest
        if longest and longest.seconds >= due:
            where = f", and is at {longest.where}" if longest.where else ""
            note(
                f"an episode of task {longest.task_id} has taken {longest.seconds:.0f} s of its time limit of "
                f"{longest.timeout:g} s (environment.timeout){where}"
            )
            due *= 2
