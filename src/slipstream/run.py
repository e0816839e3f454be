"""The whole line of sight: tasks become rollouts, rollouts groups, groups a batch, a batch a step, and a step new
weights that draw the next rollouts. Generation and training run at the same time; this file says in which order things
happen, and every other file how one of them is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import itertools
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from slipstream.actor import ActorError
from slipstream.closing import closing
from slipstream.config import Config, ConfigError, load_config
from slipstream.directory import RunDirectory, read_ready, write_json, write_state
from slipstream.disk import DiskFull, describe_full_disk, writing
from slipstream.environments.base import Codec, Policy, Task
from slipstream.environments.endpoint import Endpoint
from slipstream.environments.guard import (
    LoopWatch,
    RolloutFailed,
    all_or_none,
    attempt,
    count_reward_errors,
    episode_limits,
    episode_places,
)
from slipstream.environments.in_flight import Places
from slipstream.environments.load import load_environment
from slipstream.environments.prompts import describe, too_long
from slipstream.environments.scoring import ScoringError
from slipstream.evaluation import close_environment, evaluate
from slipstream.failures import FailureStreak
from slipstream.heap import set_heap_aside
from slipstream.ledger import Entry
from slipstream.models import check_path, context_of, has_experts, load_tokenizer, pick_device, refuse_adapter
from slipstream.observe.progress import Progress
from slipstream.observe.recorder import Recorder, RecordError
from slipstream.observe.tally import Tally
from slipstream.observe.waiting import told_of
from slipstream.rollout import Batch, Rollout, Sampling, StepStats
from slipstream.rule import cut_batch, has_signal, load_rule
from slipstream.runtime.local import Pools
from slipstream.runtime.placement import settled, under_torchrun
from slipstream.runtime.ranks import refuse_torchrun
from slipstream.scoring.load import make_scoring
from slipstream.scoring.teacher import Snapshots
from slipstream.state import LoopState
from slipstream.sync.link import find_link

PROBES = 4
FIRST_WORD_S = 10.0  # of an episode, after which the run says that it takes long
STARTED = 8  # rollouts that are started in one turn of the event loop
SWITCH = 0.0005  # seconds after which a thread that records or sends hands the interpreter to the event loop
FUTILE = 20  # steps' worth of groups without signal in a row that call for a warning, and are replaced by default


class RunError(RuntimeError):
    """A run that can't go on. The message is for its user; the run's directory can be resumed from."""


def train(config: Config, *, quiet: bool = False) -> dict[str, Any]:
    """Run a configuration to its end and return the summary that is also in its directory."""
    config = _checked(config)
    name = Path(config.environment.name.partition(":")[0]).stem
    path = Path(config.run.dir or f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    with _telling_full_disk(path), contextlib.closing(RunDirectory.create(path)) as directory:
        return asyncio.run(_run(config, directory, quiet))


def resume(path: Path, flags: Sequence[str] = (), *, quiet: bool = False) -> dict[str, Any]:
    """Go on with the run in `path` from its last checkpoint, or from its start if it was stopped before the first.

    `flags` are laid over its configuration, and become part of it once the run has started again with them.
    """
    with _telling_full_disk(path), contextlib.closing(RunDirectory.open(path)) as directory:
        config = _checked(load_config(directory.config, flags))
        return asyncio.run(_run(config, directory, quiet))


@contextlib.contextmanager
def _telling_full_disk(path: Path) -> Iterator[None]:
    """Raise `RunError` for what fails in a run since its disk is full, with the command that goes on."""
    try:
        yield
    except RecordError:
        raise  # which says so
    except (OSError, ActorError, DiskFull) as error:
        started = (path / "config.toml").exists()
        if not (full := describe_full_disk(error, path)):
            raise
        again = f"slipstream train --resume {path}" if started else "start the run again"
        raise RunError(f"{full}; free space, then: {again}") from None


def _checked(config: Config) -> Config:
    """The configuration, all of it settled. Refuses early what can be known to fail. Raises `ConfigError`."""
    if under_torchrun():
        refuse_torchrun(config)
    check_path(config.model.path)
    refuse_adapter(config.model.path)
    if config.algorithm.kl and config.algorithm.reference not in ("start", "average"):
        check_path(config.algorithm.reference, "algorithm.reference")
    if config.teacher.path:
        check_path(config.teacher.path, "teacher.path")
    if config.scoring.kind == "model" and isinstance(path := config.scoring.options.get("path"), str):
        check_path(path, "scoring.options.path")
    pick_device(config.generator.device, "generator.device")
    pick_device(config.trainer.device, "trainer.device")
    config = settled(config)
    find_link(config.sync.link)
    return config


async def _run(config: Config, directory: RunDirectory, quiet: bool) -> dict[str, Any]:
    run, interval = Run(config, directory, quiet), sys.getswitchinterval()
    sys.setswitchinterval(SWITCH)
    try:
        async with closing(run.close):
            return await run.train()
    except BaseException as raised:
        error: Any = _first(raised)
        if directory.config.exists():  # the run had started
            error.resumable = directory.path
        if error is raised:
            raise
        raise error from None
    finally:
        sys.setswitchinterval(interval)


class Run:
    """One run. Its processes are in `pools`; what a checkpoint carries is in `state` and `tally`."""

    def __init__(self, config: Config, directory: RunDirectory, quiet: bool) -> None:
        self.config = config
        self.directory = directory
        self.rule = load_rule(config)
        self.environment = load_environment(config.environment)
        self.tokenizer = load_tokenizer(config.model.path)
        self.codec = Codec(self.tokenizer, context_of(config))
        self.endpoint = Endpoint(self.codec)
        self._keep_routing = config.algorithm.keep_routing and has_experts(config.model.path)
        self.progress = Progress(config.loop.steps, quiet=quiet)
        self.recorder = Recorder(directory.path, self.tokenizer.decode, self.progress.warn)
        self.state = LoopState(config.loop, config.sync.every, len(self.environment.train))
        self.tally = Tally()
        self.stopped: str | None = None
        self.scoring = make_scoring(config, self.codec, directory.path / "logs")
        self._started: Pools | None = None
        self._places = Places()  # for episodes in flight, which are bounded once slots are known
        self._telling: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._groups: set[asyncio.Task[None]] = set()
        self._admitting: asyncio.Task[None] | None = None
        self._evaluation: asyncio.Task[None] | None = None
        self._saving: asyncio.Task[None] | None = None
        self._publishing: asyncio.Task[None] | None = None
        self._failures = FailureStreak(config.environment.max_failures, len(self.environment.train))
        self._reward_errors = count_reward_errors(config.environment, self._count_reward_error)
        self._failed: dict[int, RolloutFailed] = {}  # the last failure of each entry in flight
        self._too_long: dict[int, str] = {}  # tasks whose prompt leaves no room in the context, and its length
        self._given_up: set[int] = set()
        self._warned_of_reward = False
        self._aside = False  # whether the heap is, until the end of the run

    async def train(self) -> dict[str, Any]:
        """The story of a run."""
        limit = self.config.environment.time_limit
        # An episode that blocks the loop stops every other's clock too, so it is given much less than the whole limit.
        with self.progress, self._signals(), LoopWatch(min(limit, 5.0, max(1.0, limit / 10))):
            await self._start()
            async with asyncio.TaskGroup() as self._tasks:
                self._admit()
                while batch := await self._next_batch():
                    waited = self.tally.lap()
                    described = self.tally.batch(batch, self.state.version)
                    due = (self.state.step + 1) % self.config.sync.every == 0
                    async with self.pools.trainers_turn(publishes=due):
                        stats = await self._step(batch)
                        self.state.step += 1
                        if due:
                            await self._publish()
                    self._record(batch, stats, described, waited)
                    await self.recorder.room()
                    await self._evaluate_and_save_if_due(batch.tokens)
                    self._admit()
                await self._settle()
            return await self._finish()

    # tasks -> rollouts -> groups -> buffer

    def _admit(self) -> None:
        """Start as many groups as may start; called whenever something that this depends on has changed.

        The wave of a synchronous run starts in one turn of the event loop, and so reaches an engine as one message.
        """
        if self._ending:
            return
        if self.config.loop.max_lag == 0:
            self._start_groups(self.state.startable())
        elif self._admitting is None or self._admitting.done():
            self._admitting = self._tasks.create_task(self._admit_in_turns())

    async def _admit_in_turns(self) -> None:
        """Start a few rollouts a turn of the event loop: to start hundreds takes a tenth of a second."""
        few = max(1, STARTED // self.config.loop.group_size)
        while self._start_groups(min(few, self.state.startable())):
            await asyncio.sleep(0)

    def _start_groups(self, count: int) -> int:
        """Start this many groups, none if the run is about to end. Returns how many."""
        count = 0 if self._ending else count
        for _ in range(count):
            task = self._tasks.create_task(self._play_group(self.state.ledger.start()))
            self._groups.add(task)
            task.add_done_callback(self._groups.discard)
        return count

    async def _play_group(self, entry: Entry) -> None:
        """Play all rollouts of one task at once; whoever survives makes the group."""
        task, size = self.environment.train[entry.task], self.config.loop.group_size
        try:
            played = await all_or_none(self._play(task, entry, member) for member in range(size))
        except asyncio.CancelledError:
            self.state.ledger.cancelled(entry.id)
            raise
        self._end_group(entry, task, played)
        self._admit()
        self._changed.set()

    def _end_group(self, entry: Entry, task: Task, played: Sequence[tuple[Rollout, ...] | None]) -> None:
        rollouts = [rollout for episode in played if episode for rollout in episode]
        failed = sum(episode is None for episode in played)
        rule, first, before = self.config.algorithm, self.state.step == 0, self.state.filtered_in_a_row
        given_up = self.state.end(
            entry,
            task.id,
            rollouts,
            failed=failed,
            has_signal=lambda group: not rule.filter_equal or has_signal(self.rule, self.config, group, strict=first),
            filter_most=self._filter_most,
        )
        failure = self._failed.pop(entry.id, None)
        if given_up and failure:
            self._give_up(entry.task, failure)
        if before < FUTILE * self.config.loop.groups_per_step == self.state.filtered_in_a_row:
            self.progress.warn(
                f"the last {self.state.filtered_in_a_row} groups had advantages of 0 and were replaced; after "
                f"algorithm.filter_most = {self._filter_most} in a row they are trained on as they are, which changes "
                "nothing: give tasks that the policy solves sometimes, raise sampling.temperature or loop.group_size, "
                "or set algorithm.filter_equal = false"
            )

    @property
    def _filter_most(self) -> int:
        """Groups without signal in a row that are replaced."""
        return self.config.algorithm.filter_most or FUTILE * self.config.loop.groups_per_step

    def _give_up(self, index: int, failure: RolloutFailed) -> None:
        """Name a task that can't be played. Raises `RunError` if most can't."""
        task, tries = self.environment.train[index], self.config.loop.retries + 1
        self.tally.given_up[task.id] = failure.reason
        self._given_up.add(index)
        playable = len(self.environment.train) - len(self._too_long)
        if 2 * len(self._given_up) > playable:
            found = f"{len(self._given_up)} of {playable} tasks can't be played: they failed in each of {tries} tries"
            raise RunError(f"{found}, the last with: {failure.reason}\n{failure.detail}\n{self._mend}") from None
        source = f" ({task.source})" if getattr(task, "source", "") else ""
        self.progress.warn(
            f"task {task.id}{source} is left out from now on: it failed in each of {tries} tries, the last with: "
            f"{failure.one_line}"
        )

    def _count_reward_error(self, error: ScoringError) -> None:
        self.tally.reward_errors[error.reason] = self.tally.reward_errors.get(error.reason, 0) + 1
        self._warn_of_reward(error)

    def _warn_of_reward(self, error: ScoringError) -> None:
        if not self._warned_of_reward:
            self._warned_of_reward = True
            self.progress.warn(
                f"the reward function raised {error.one_line}; the reward is 0 then, and reward_errors in "
                'metrics.jsonl counts it. Mend the function, or set environment.reward_error = "fail"'
            )

    @property
    def _mend(self) -> str:
        return f"Mend the cause, then: slipstream train --resume {self.directory.path}"

    async def _play(self, task: Task, entry: Entry, member: int) -> tuple[Rollout, ...] | None:
        """One episode, or None with its reason counted; too many failures in a row end the run."""
        seed = f"{self.config.loop.seed}/{entry.id}/{entry.attempt}/{member}"
        options = self.config.environment
        limits = episode_limits(options)
        policy = Policy(self.pools.generator, self.codec, self._sampling(), seed, self.endpoint, limits)
        try:
            rollouts = await attempt(
                self.environment, task, policy, options.time_limit, self.scoring, self._places, self._reward_errors
            )
        except RolloutFailed as failure:
            # Whatever the environment made of it.
            if dead := self.pools.generator.dead or (self.scoring and self.scoring.dead):
                raise dead from None
            self.state.ledger.reasons[failure.reason] += 1
            self._failed[entry.id] = failure
            if self._failures.failed(entry.task, self.state.ledger.running_tasks):
                found = f"{self._failures.rollouts} rollouts of {len(self._failures.tasks)} tasks in a row failed"
                raise RunError(f"{found}, the last with: {failure.reason}\n{failure.detail}\n{self._mend}") from None
            return None
        finally:
            self.tally.tokens_generated += sum(len(c.token_ids) for c in policy.recorded)
        if not (self._reward_errors and self._reward_errors.in_a_row):
            self._failures.succeeded()
        return rollouts

    # buffer -> batch -> step -> published weights

    async def _next_batch(self) -> Batch | None:
        """Wait for a batch of groups that are fresh enough; None when the run is over or asked to stop."""
        while not self._ending:
            if groups := self.state.cut():
                try:
                    # What no rollout of the first step has is a mistake; later ones may lack it by chance.
                    first = self.state.step == 0
                    return cut_batch(self.rule, self.config, groups, self.state.version, strict=first)
                except ValueError as error:
                    raise RunError(str(error)) from None
            self._admit()
            self.recorder.write()
            self._changed.clear()
            await self._changed.wait()
        return None

    async def _step(self, batch: Batch) -> StepStats:
        """Let the trainer take a step. What the step before left to be recorded was in this one's way until now."""
        step = asyncio.ensure_future(self.pools.trainer.step(batch))
        for _ in range(2):  # the batch is told, and with all else of this turn sent
            await asyncio.sleep(0)
        self.recorder.write()
        return await step

    def _enough(self) -> bool:
        """Whether the run has had its steps, or its tokens."""
        tokens = self.config.loop.tokens
        return self.state.step >= self.config.loop.steps or 0 < tokens <= self.tally.tokens_trained

    @property
    def _ending(self) -> bool:
        """Whether no further work starts: the run was asked to stop, or has had enough."""
        return self.stopped is not None or self._enough()

    async def _publish(self) -> None:
        """Make the trainer's weights the next version, and bring the generators there.

        An asynchronous run does not wait for that: it goes on as soon as the trainer may take its next step.
        """
        await self._published()  # one at a time
        free = asyncio.Event()
        self._publishing = self._tasks.create_task(self._bring(free))
        told = asyncio.ensure_future(free.wait())
        await asyncio.wait((self._publishing, told), return_when=asyncio.FIRST_COMPLETED)
        told.cancel()
        loop, sync, teacher = self.config.loop, self.config.sync, self.config.teacher
        if not loop.max_lag or loop.hold_lag or teacher.lag or sync.placement == "colocated":
            await self._published()

    async def _published(self) -> None:
        """Wait until the last version is served. Raises what went wrong."""
        if self._publishing:
            await self._publishing

    async def _bring(self, free: asyncio.Event) -> None:
        """Bring the generators to the trainer's weights; more may start once all of them serve these."""
        step = self.state.step
        self.state.stage()
        stats = await self.pools.link.publish(self.state.version, free=free)
        self.state.publish(step)
        self.tally.holds.append(stats.hold)
        for lost in stats.lost:
            self.progress.warn(lost)
        self.tally.lost += stats.lost
        await self._refresh_teacher()
        if self.config.loop.max_lag:  # a synchronous run starts its next wave when the step's bookkeeping is done
            self._admit()
        self._changed.set()

    async def _refresh_teacher(self) -> None:
        """Where the policy is its own teacher, make that the version of `teacher.lag` publishes ago."""
        lag = self.config.teacher.lag
        if lag and self.scoring and self.scoring.teacher:
            snapshots = Snapshots(self.directory.path / "teacher", lag)
            await self.pools.trainer.export(snapshots.new(self.state.version))
            await self.scoring.teacher.load(snapshots.oldest())

    # beside the line: records, evaluations, checkpoints

    def _record(self, batch: Batch, stats: StepStats, described: dict[str, float], waited: float) -> None:
        self.tally.close(self.pools.generator.totals, stats.seconds)
        state = self.state
        record = {
            "step": state.step,
            "version": state.version,
            "seconds": round(self.tally.wall(), 3),
            "window_seconds": round(self.tally.window_seconds, 3),
            **described,
            **{k: v for k, v in dataclasses.asdict(stats).items() if k not in ("step", "seconds")},
            "tokens_trained": self.tally.tokens_trained,
            "tokens_generated": self.tally.tokens_generated,
            "trainer_tokens_per_second": stats.tokens / max(stats.seconds, 1e-9),
            "generator_tokens_per_second": self.tally.generator_rate,
            "step_seconds": stats.seconds,
            "wait_seconds": waited,
            "generator_busy_seconds": self.tally.generator_busy,
            "trainer_busy_seconds": self.tally.trainer_busy,
            "hold_ms": 1000 * self.tally.holds[-1] if self.tally.holds else None,
            "ready": len(state.ready),
            "running": state.running,
            "capacity": state.capacity,
            "generators": len(self.pools.generator.living),
            "rollouts": dataclasses.asdict(state.ledger.counts),
            "failures": dict(state.ledger.reasons),
            "reward_errors": dict(self.tally.reward_errors),
            **(self.tally.scoring(self.scoring.lap()) if self.scoring else {}),
        }
        self.recorder.step(record, batch)
        self.progress.step(record)

    async def _evaluate_and_save_if_due(self, tokens: int) -> None:
        """After a step on so many tokens."""
        step, total = self.state.step, self.tally.tokens_trained
        every, every_tokens = self.config.evaluation.every, self.config.evaluation.every_tokens
        by_steps = every and step % every == 0
        by_tokens = every_tokens and total // every_tokens > (total - tokens) // every_tokens
        if (by_steps or by_tokens) and not self._enough():
            if self._evaluation and not self._evaluation.done():
                self.progress.warn(f"evaluation at step {step} left out: the one before is still running")
            else:
                self._evaluation = self._tasks.create_task(self._evaluate())
                if self.config.loop.max_lag == 0:
                    self.recorder.write()  # no step is about to begin
                    await self._evaluation
        if step % self.config.checkpoint.every == 0:
            if self._saving:
                await self._saving  # one at a time
            sent = asyncio.Event()
            self._saving = self._tasks.create_task(self._save(sent))
            await sent.wait()  # the trainer copies its state before it takes another step

    async def _evaluate(self) -> None:
        """Held-out tasks on the generators as they are, beside the training rollouts."""
        if not self.environment.test[: self.config.evaluation.tasks]:
            return
        step = self.state.step
        result = await evaluate(
            self.config, self.environment, self.pools.generator, self.codec, self.endpoint, self.scoring, self._places,
            self._warn_of_reward,
        )  # fmt: skip
        if dead := self.pools.generator.dead:  # a score of what was not drawn is none
            raise dead
        record = {"step": step, **result}
        self.tally.evaluation(record)
        self.recorder.evaluation(record)
        self.progress.evaluation(record)
        if result["failed"] == result["tasks"]:
            self.progress.warn(
                f"all {result['tasks']} held-out tasks failed in the evaluation after step {step}, the last with: "
                f"{result['last_failure']}"
            )

    async def _save(self, sent: asyncio.Event) -> None:
        """Write all that the run needs to go on from here. Generation and training go on once the trainer's call is
        `sent`."""
        # No batch has been cut since the step, so what the ledger says now fits the weights of the step.
        known = self.state.snapshot() | {"tally": self.tally.snapshot()}
        ready, last = tuple(self.state.ready), self._ending
        if (written := self.directory.checkpoint(self.state.step)).exists():
            sent.set()
            await self.recorder.flush()  # what is known to be recorded
            # The weights are these; what is known about them may have grown.
            await asyncio.to_thread(write_state, written, known, ready)
            return
        async with self.directory.new_checkpoint(self.state.step, self.config.checkpoint.keep) as path:
            sent.set()  # whoever waits for it runs after the next line has made its call
            await self.pools.trainer.save(path / "trainer", last)
            await self.recorder.flush()
            await asyncio.to_thread(write_state, path, known, ready)

    # beginning and end

    async def _start(self) -> None:
        """Start the processes, restore the last checkpoint, connect the link and see that both sides agree."""
        await self._find_long_prompts()
        where, link = self.directory.path, self.config.sync.link
        restarts = ", sync.restart = true" if self.config.sync.restart else ""
        self.progress.note(f'run directory {where}, sync.link = "{link}"{restarts}; generators and trainer start')
        checkpoint, state, damaged = await asyncio.to_thread(self.directory.newest_whole)
        for line in damaged:
            self.progress.warn(line)
        await self._start_pools()
        if self.scoring:  # afterwards, since these may share a GPU
            await self.scoring.start()
        if checkpoint:
            await self._restore(checkpoint, state)
        self.state.ledger.leave_out(self._too_long)
        self.tally.given_up |= {self.environment.train[i].id: f"prompt of {n}" for i, n in self._too_long.items()}
        await asyncio.to_thread(self.recorder.truncate, self.state.step, len(self.tally.evaluations))
        await self.pools.link.connect(self.state.version)
        await self._refresh_teacher()
        if self.scoring:
            self.state.ready = [await self.scoring.teach(group) for group in self.state.ready]
        await self._probe()
        if not self.tally.evaluations and not self.stopped:
            await self._evaluate()
        self.directory.write_config(self.config)  # from here on there is a run to resume
        self.tally.open(await self.pools.generator.stats())
        self._aside = not gc.get_freeze_count()  # else it is another's to undo
        set_heap_aside()

    async def _tell_of_long_episodes(self) -> None:
        """Say that an episode takes long, long before its time limit: first after `FIRST_WORD_S`, then twice that."""
        due, limit = FIRST_WORD_S, self.config.environment.time_limit
        while True:
            await asyncio.sleep(due / 10)
            longest = self._places.longest
            if longest and longest.seconds >= due:
                where = f", and is at {longest.where}" if longest.where else ""
                self.progress.note(
                    f"an episode of task {longest.task_id} has taken {longest.seconds:.0f} s of its time limit of "
                    f"{limit:g} s (environment.time_limit){where}"
                )
                due *= 2

    async def _find_long_prompts(self) -> None:
        """Find the tasks whose prompts leave no room in the context. Raises `ConfigError` if that is all of them."""
        context = self.codec.limits.context
        training, held_out = self.environment.train, self.environment.test[: self.config.evaluation.tasks]
        if not context:
            return
        remedy = f"no room in the context of {context} tokens; shorten them, or raise generator.context if it is lower"
        self._too_long = await asyncio.to_thread(too_long, training, self.codec, context)
        if len(self._too_long) == len(training):
            raise ConfigError(f"the prompts of all training tasks leave {remedy}: {describe(self._too_long, training)}")
        others = await asyncio.to_thread(too_long, held_out, self.codec, context)
        for what, tasks, found in (
            ("training tasks are left out", training, self._too_long),
            ("held-out tasks will fail", held_out, others),
        ):
            if found:
                named = describe(found, tasks)
                self.progress.warn(f"{len(found)} of {len(tasks)} {what}, since their prompts leave {remedy}: {named}")

    async def _start_pools(self) -> None:
        starting = Pools.start(self.config, self.directory.path)
        self._started = await told_of(starting, self.progress.note, self.directory.path / "logs")
        self._places = episode_places(self.config, self.pools.generator.slots)
        self._telling = asyncio.create_task(self._tell_of_long_episodes())

    async def _restore(self, path: Path, data: dict[str, Any]) -> None:
        try:
            self.state.restore(data, await asyncio.to_thread(read_ready, path, data))
        except ValueError as error:
            raise ConfigError(f"{path}: {error}") from None
        self.tally.restore(data["tally"])
        await self.pools.trainer.restore(path / "trainer")
        self.progress.note(f"resumed after step {self.state.step} with {len(self.state.ready)} groups ready")

    async def _probe(self) -> None:
        """Refuse to train when generator and trainer give the same tokens different probabilities."""
        sampling = self._sampling()
        if not sampling.record_kept:  # what top_k and top_p leave is no matter of the policy
            sampling = dataclasses.replace(sampling, top_k=0, top_p=1.0)
        policy = Policy(self.pools.generator, self.codec, sampling, f"{self.config.loop.seed}/probe")
        playable = (t for i, t in enumerate(self.environment.train) if i not in self._too_long)
        tasks = list(itertools.islice(playable, PROBES))
        drawn = await asyncio.gather(*(policy.sample(t.prompt, seed=i) for i, t in enumerate(tasks)))
        async with self.pools.trainers_turn(publishes=False):
            scored = await self.pools.trainer.score(drawn)
        worst = max(abs(a - b) for c, s in zip(drawn, scored, strict=True) for a, b in zip(c.logprobs, s, strict=True))
        bound = self.config.trainer.probe_bound or (1e-3 if self.config.model.dtype == "float32" else 0.5)
        finding = f"log-probabilities of generator and trainer differ by at most {worst:.1e} (bound {bound:.1e})"
        if not worst <= bound:
            raise RunError(
                f"{finding}: they do not run the same policy. Check model.dtype and the model's files, or raise "
                "trainer.probe_bound if you accept the difference"
            )
        self.progress.note(f"probe: {finding}")

    async def _settle(self) -> None:
        """No more batches: put what is still being generated back to pending, and let a running evaluation end."""
        self.recorder.write()
        await self._published()
        self.tally.close(await self.pools.generator.stats())
        for task in self._groups:
            task.cancel()
        if self._evaluation and self.stopped:
            self._evaluation.cancel()
        elif self._evaluation:
            await self._evaluation

    async def _finish(self) -> dict[str, Any]:
        """Last publish, evaluation, checkpoint and export; then the summary."""
        if self.state.published < self.state.step:
            await self._bring(asyncio.Event())
        last = self.tally.evaluations[-1] if self.tally.evaluations else {}
        evaluated = last.get("step") == self.state.step and set(last["versions"]) == {self.state.version}
        if not self.stopped and not evaluated:
            await self._evaluate()
        await self._save(asyncio.Event())
        await self.pools.trainer.export(self.directory.policy)
        with writing(self.directory.policy):
            self.tokenizer.save_pretrained(self.directory.policy)
        await self.recorder.flush()
        ledger = self.state.ledger
        summary = {
            "steps": self.state.step,
            **self.tally.summary(),
            "rollouts": dataclasses.asdict(ledger.counts),
            "failures": dict(ledger.reasons),
            "given_up": ledger.given_up,
            "version": self.state.version,
            "seed": self.config.loop.seed,
            "stopped": self.stopped,
            "directory": str(self.directory.path),
            "policy": str(self.directory.policy),
        }
        write_json(self.directory.summary, summary)
        return summary

    async def close(self) -> None:
        """Stop every process, whatever happened, and whatever closing one of them raises."""
        if self._telling:
            self._telling.cancel()
        parts = (self.endpoint, self.scoring, self._started)
        closers = [part.close for part in parts if part]
        try:
            async with closing(*closers, lambda: close_environment(self.environment)):
                pass
        finally:
            if self._aside:
                gc.unfreeze()
            self.recorder.close()

    @property
    def pools(self) -> Pools:
        assert self._started is not None, "the processes are not started"
        return self._started

    def _sampling(self) -> Sampling:
        s = self.config.sampling
        return Sampling(
            **s.model_dump(exclude={"stop"}),
            stop_strings=tuple(s.stop),
            record_kept=self.config.algorithm.keep_sampling_mask,
            record_experts=self._keep_routing,
        )

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM end the run after the current step; a second one ends it at once."""
        loop, numbers = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)

        def stop(number: int) -> None:
            self.stopped = signal.Signals(number).name
            self._changed.set()
            for handled in numbers:
                loop.remove_signal_handler(handled)
            self.progress.note(f"{self.stopped}: stopping after this step; once more stops at once")

        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):  # not the main thread: no signals here
            for number in numbers:
                loop.add_signal_handler(number, stop, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)


def _first(error: BaseException) -> BaseException:
    """The exception that a group of tasks ended with, or the error itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
