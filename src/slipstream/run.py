"""The whole line of sight: tasks become rollouts, rollouts groups, groups a batch, a batch a step, and a step new weights
that draw the next rollouts. Generation and training run at the same time; this file says in which order things
happen, and every other file how one of them is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slipstream.algorithms.advantages import has_signal, make_batch
from slipstream.buffer import RolloutBuffer
from slipstream.config import Config, ConfigError
from slipstream.directory import RunDirectory, write_json
from slipstream.environments.base import Environment, Policy, Task
from slipstream.environments.guard import LoopWatch, RolloutFailed, attempt
from slipstream.environments.load import load_environment
from slipstream.evaluation import evaluate
from slipstream.ledger import Entry, Ledger, State
from slipstream.models import check_path, load_tokenizer
from slipstream.observe.progress import Progress
from slipstream.observe.recorder import Recorder
from slipstream.observe.tally import Tally
from slipstream.rollout import Batch, Completion, Group, Rollout, Sampling, VersionSpan
from slipstream.runtime.local import Pools
from slipstream.staleness import capacity
from slipstream.trainers.trainer import StepStats

PROBES = 4


class RunError(RuntimeError):
    """A run that can't go on. The message is for its user; the run's directory can be resumed from."""


def train(config: Config, *, quiet: bool = False) -> dict[str, Any]:
    """Run a configuration to its end and return the summary that is also in its directory."""
    check_path(config.model.path)
    name = Path(config.environment.name.partition(":")[0]).stem
    path = config.run.dir or f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    directory = RunDirectory.create(config, Path(path))
    return _run(config, directory, quiet)


def resume(path: Path, flags: list[str], *, quiet: bool = False) -> dict[str, Any]:
    """Go on with the run in `path` from its last checkpoint, or from its start if it was stopped before the first."""
    directory = RunDirectory.open(path)
    return _run(directory.load_config(flags), directory, quiet)


def _run(config: Config, directory: RunDirectory, quiet: bool) -> dict[str, Any]:
    async def main() -> dict[str, Any]:
        run = Run(config, directory, quiet)
        try:
            return await run.train()
        except* Exception as group:
            raise _first(group) from None
        finally:
            await run.close()

    try:
        return asyncio.run(main())
    finally:
        directory.close()


class Run:
    """One run: its processes, and the state that a checkpoint carries (ledger, buffer, version, step, tally)."""

    def __init__(self, config: Config, directory: RunDirectory, quiet: bool) -> None:
        self.config = config
        self.directory = directory
        self.environment: Environment = load_environment(config.environment)
        self.tokenizer = load_tokenizer(config.model.path)
        self.recorder = Recorder(directory.path, self.tokenizer.decode)
        self.progress = Progress(config.loop.steps, quiet=quiet)
        self.pools: Pools | None = None
        self.ledger = Ledger(len(self.environment.train), config.loop.seed, config.loop.retries)
        self.buffer = RolloutBuffer(config.buffer_capacity)
        self.tally = Tally()
        self.version = 0
        self.step = 0
        self.stopped: str | None = None
        self._changed = asyncio.Event()
        self._evaluation: asyncio.Task[None] | None = None
        self._failures_in_a_row = 0
        self._clock = _Clock()

    async def train(self) -> dict[str, Any]:
        """The story of the run."""
        with self.progress, self._signals(), LoopWatch(self.config.environment.time_limit):
            await self._start()
            async with asyncio.TaskGroup() as self._tasks:
                self._clock.open(await self.pool.generator.stats())
                self._admit()
                while self.step < self.config.loop.steps and (batch := await self._next_batch()):
                    waited = self._clock.lap()
                    described = self.tally.batch(batch, self.version)
                    stats = await self.pool.trainer.step(batch)
                    self.step += 1
                    if self.step % self.config.sync.every == 0:
                        await self._publish()
                    await self._record(batch, stats, described, waited)
                    await self._now_and_then()
                    self._admit()
                await self._settle()
            return await self._finish()

    # --- generation: tasks -> rollouts -> groups -> buffer

    def _admit(self) -> None:
        """Start as many groups as the gate allows. Called whenever something that it depends on has changed."""
        loop = self.config.loop
        if self.stopped:
            return
        ready, running = len(self.buffer), self.ledger.count(State.RUNNING)
        free = capacity(
            version=self.version,
            max_lag=loop.max_lag,
            groups_per_version=self.config.groups_per_version,
            trained=self.ledger.groups_trained,
            ready=ready,
            running=running,
            buffer=self.config.buffer_capacity,
        )
        left = loop.steps * loop.groups_per_step - self.ledger.groups_trained - ready - running
        for _ in range(min(free, left)):
            self._tasks.create_task(self._play_group(self.ledger.start()))

    async def _play_group(self, entry: Entry) -> None:
        """Play all rollouts of one task; the survivors become a ready group, or the task is tried again."""
        task = self.environment.train[entry.task]
        size = self.config.loop.group_size
        try:
            played = await asyncio.gather(*(self._play(task, entry, member) for member in range(size)))
        except asyncio.CancelledError:
            self.ledger.cancelled(entry.id)
            raise
        rollouts = tuple(r for r in played if r is not None)
        if len(rollouts) < 2:
            self.ledger.failed(entry.id, rollouts=size)
        else:
            self.ledger.ready(entry.id, rollouts=len(rollouts), failed=size - len(rollouts))
            group = Group(entry.id, task.id, rollouts)
            if self.config.algorithm.filter_equal and not has_signal(group):
                self.ledger.filtered(entry.id)
            else:
                self.buffer.put(group)
        self._admit()
        self._changed.set()

    async def _play(self, task: Task, entry: Entry, member: int) -> Rollout | None:
        """One rollout, or None with its reason counted; too many failures in a row end the run."""
        seed = f"{self.config.loop.seed}/{entry.id}/{entry.attempt}/{member}"
        policy = Policy(self.pool.generator, self.tokenizer, self._sampling(), seed)
        try:
            rollout = await attempt(self.environment, task, policy, self.config.environment.time_limit)
            self._failures_in_a_row = 0
            return rollout
        except RolloutFailed as failure:
            self.ledger.reason(failure.reason)
            self._failures_in_a_row += 1
            if self._failures_in_a_row >= self.config.environment.max_failures:
                raise RunError(
                    f"{self._failures_in_a_row} rollouts in a row failed, the last with {failure.reason}:\n"
                    f"{failure.detail}\nMend the environment, then `slipstream train --resume {self.directory.path}`"
                ) from None
            return None
        finally:
            self.tally.tokens_generated += sum(len(c.token_ids) for c in policy.completions)

    # --- training: buffer -> batch -> step -> published weights

    async def _next_batch(self) -> Batch | None:
        """Wait for a batch of groups that are fresh enough; None when the run is to stop."""
        loop = self.config.loop
        while not self.stopped:
            for group in self.buffer.drop_stale(self.version, loop.max_lag):
                self.ledger.dropped_stale(group.entry)
                self._admit()
            wave_over = loop.max_lag > 0 or self.ledger.count(State.RUNNING) == 0
            if wave_over and (groups := self.buffer.take(loop.groups_per_step)):
                for group in groups:
                    self.ledger.trained(group.entry)
                return make_batch(groups, normalize=self.config.algorithm.normalize)
            self._changed.clear()
            await self._changed.wait()
        return None

    async def _publish(self) -> None:
        """Bring the generators to the trainer's weights; the version changes once all of them serve it."""
        stats = await self.pool.link.publish(self.version + 1)
        self.version = stats.version
        self.tally.holds.append(stats.hold)
        if self.config.loop.max_lag:  # a synchronous run starts its next wave when the step's bookkeeping is done
            self._admit()

    # --- beside the line: records, evaluation, checkpoints

    async def _record(self, batch: Batch, stats: StepStats, described: dict[str, float], waited: float) -> None:
        self._clock.close(await self.pool.generator.stats())
        self._clock.trainer_busy += stats.seconds
        elapsed = max(self._clock.window, 1e-9)
        record = {
            "step": self.step,
            "version": self.version,
            "seconds": round(self.tally.wall_seconds + self._clock.wall, 3),
            **described,
            **{k: v for k, v in dataclasses.asdict(stats).items() if k not in ("step", "tokens", "seconds")},
            "tokens": stats.tokens,
            "tokens_trained": self.tally.tokens_trained,
            "tokens_generated": self.tally.tokens_generated,
            "trainer_tokens_per_second": stats.tokens / max(stats.seconds, 1e-9),
            "generator_tokens_per_second": self._clock.generator_tokens / elapsed,
            "step_seconds": stats.seconds,
            "wait_seconds": waited,
            "hold_ms": 1000 * self.tally.holds[-1] if self.tally.holds else None,
            "ready": len(self.buffer),
            "running": self.ledger.count(State.RUNNING),
            "capacity": self.config.buffer_capacity,
            "rollouts": dataclasses.asdict(self.ledger.counts),
            "failures": dict(self.ledger.reasons),
        }
        self.recorder.step(record, batch)
        self.progress.step(record)

    async def _now_and_then(self) -> None:
        """Evaluations and checkpoints that are due after this step."""
        every = self.config.evaluation.every
        if every and self.step % every == 0 and self.step < self.config.loop.steps:
            if self._evaluation and not self._evaluation.done():
                self.progress.warn(f"evaluation at step {self.step} left out: the one before still runs")
            else:
                self._evaluation = self._tasks.create_task(self._evaluate())
                if self.config.loop.max_lag == 0:
                    await self._evaluation
        if self.step % self.config.checkpoint.every == 0:
            await self._checkpoint()

    async def _evaluate(self) -> None:
        """Held-out tasks on the generators as they are, beside the training rollouts."""
        options, step = self.config.evaluation, self.step
        tasks = self.environment.test[: options.tasks]
        if not tasks:
            return
        sampling = dataclasses.replace(self._sampling(), temperature=options.temperature, top_k=0, top_p=1.0)
        result = await evaluate(
            self.environment, tasks, self.pool.generator, self.tokenizer, sampling,
            seed=self.config.loop.seed, time_limit=self.config.environment.time_limit,
        )  # fmt: skip
        record = {"step": step, **result}
        self.tally.evaluations.append(record)
        self.recorder.evaluation(record)
        self.progress.evaluation(record)

    async def _checkpoint(self) -> None:
        """All that the run needs to go on from here. Generation goes on meanwhile."""
        if self.directory.checkpoint(self.step).exists():
            return
        await self.recorder.flush()
        with self.directory.new_checkpoint(self.step, self.config.checkpoint.keep) as path:
            await self.pool.trainer.save(path / "trainer")
            # No batch has been cut since the step, so what the ledger says now fits the weights just saved.
            write_json(path / "run.json", self._snapshot())

    # --- beginning and end

    async def _start(self) -> None:
        """Start the processes, restore what a checkpoint has, connect the link and see that both sides agree."""
        self.progress.note(f"run directory {self.directory.path}")
        self.pools = await Pools.start(self.config, self.directory.path)
        checkpoints = self.directory.checkpoints()
        if checkpoints:
            await self._restore(checkpoints[-1])
        self.recorder.truncate(self.step)
        await self.pool.link.connect(self.version)
        await self._probe()
        if not self.tally.evaluations:
            await self._evaluate()

    async def _probe(self) -> None:
        """Refuse to train when generator and trainer give the same tokens different probabilities."""
        policy = Policy(self.pool.generator, self.tokenizer, self._sampling(), f"{self.config.loop.seed}/probe")
        tasks = self.environment.train[:PROBES]
        drawn = await asyncio.gather(*(policy.sample(t.prompt, seed=i) for i, t in enumerate(tasks)))
        scored = await self.pool.trainer.score(drawn)
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
        """No more batches: let a running evaluation end, and put what is still being generated back to pending."""
        current = asyncio.current_task()
        if self._evaluation and not self.stopped:
            await self._evaluation
        for task in [t for t in self._tasks._tasks if t is not current]:
            task.cancel()

    async def _finish(self) -> dict[str, Any]:
        """Last publish, evaluation, checkpoint and export; then the summary."""
        if not self.stopped and self.step % self.config.sync.every:
            await self._publish()
        if not self.stopped:
            await self._evaluate()
        await self._checkpoint()
        await self.pool.trainer.export(self.directory.policy)
        self.tokenizer.save_pretrained(self.directory.policy)
        await self.recorder.flush()
        summary = self._summary()
        write_json(self.directory.summary, summary)
        return summary

    async def close(self) -> None:
        """Stop every process, whatever happened."""
        if self.pools:
            await self.pools.close()
        close = getattr(self.environment, "close", None)
        if close:
            await close()
        self.recorder.close()

    @property
    def pool(self) -> Pools:
        assert self.pools is not None, "the processes are not started"
        return self.pools

    def _sampling(self) -> Sampling:
        s = self.config.sampling
        return Sampling(
            temperature=s.temperature,
            top_k=s.top_k,
            top_p=s.top_p,
            max_tokens=s.max_tokens,
            stop_strings=tuple(s.stop),
            record_kept=bool(s.top_k) or s.top_p < 1,
        )

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM end the run after the current step; a second one ends it at once."""
        loop = asyncio.get_running_loop()

        def stop(number: int) -> None:
            self.stopped = signal.Signals(number).name
            self._changed.set()
            loop.remove_signal_handler(number)
            self.progress.note(f"{self.stopped}: stopping after this step; again to stop at once")

        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):  # no main thread: no signals to handle
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, stop, number)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def _totals(self) -> Tally:
        """The tally with this sitting's times added."""
        clock = self._clock
        return dataclasses.replace(
            self.tally,
            wall_seconds=self.tally.wall_seconds + clock.wall,
            window_seconds=self.tally.window_seconds + clock.window,
            generator_busy=self.tally.generator_busy + clock.generator_busy,
            trainer_busy=self.tally.trainer_busy + clock.trainer_busy,
        )

    def _summary(self) -> dict[str, Any]:
        return {
            "steps": self.step,
            **self._totals().summary(),
            "rollouts": dataclasses.asdict(self.ledger.counts),
            "failures": dict(self.ledger.reasons),
            "given_up": self.ledger.given_up,
            "version": self.version,
            "seed": self.config.loop.seed,
            "stopped": self.stopped,
            "directory": str(self.directory.path),
            "policy": str(self.directory.policy),
        }

    def _snapshot(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "version": self.version,
            "ledger": self.ledger.snapshot(),
            "ready": [_plain(group) for group in self.buffer.groups],
            "tally": self._totals().snapshot(),
        }

    async def _restore(self, path: Path) -> None:
        data = json.loads((path / "run.json").read_text(encoding="utf-8"))
        await self.pool.trainer.restore(path / "trainer")
        self.step, self.version = data["step"], data["version"]
        self.ledger = Ledger.restore(data["ledger"])
        self.ledger.retries = self.config.loop.retries
        if self.ledger.tasks != len(self.environment.train):
            raise ConfigError(
                f"environment: the run was started on {self.ledger.tasks} tasks, and there are "
                f"{len(self.environment.train)} now; give it the same data"
            )
        self.buffer = RolloutBuffer(self.config.buffer_capacity, [_group(g) for g in data["ready"]])
        self.tally = Tally.restore(data["tally"])
        self.progress.note(f"resumed from step {self.step}, version {self.version}, {len(self.buffer)} groups ready")


class _Clock:
    """This sitting's times: since the start, and between the first rollout and the last step."""

    def __init__(self) -> None:
        self._began = self._lap = time.perf_counter()
        self._opened = self._closed = 0.0
        self._at_open = {"tokens": 0.0, "busy": 0.0}
        self._at_close = self._at_open
        self.trainer_busy = 0.0

    def open(self, generator: dict[str, float]) -> None:
        self._opened = self._closed = self._lap = time.perf_counter()
        self._at_open = self._at_close = generator

    def close(self, generator: dict[str, float]) -> None:
        self._closed = self._lap = time.perf_counter()
        self._at_close = generator

    def lap(self) -> float:
        """Seconds since the last step was recorded."""
        return time.perf_counter() - self._lap

    @property
    def wall(self) -> float:
        return time.perf_counter() - self._began

    @property
    def window(self) -> float:
        return self._closed - self._opened

    @property
    def generator_busy(self) -> float:
        return self._at_close["busy"] - self._at_open["busy"]

    @property
    def generator_tokens(self) -> float:
        return self._at_close["tokens"] - self._at_open["tokens"]


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The exception that a group of tasks ended with."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _plain(group: Group) -> dict[str, Any]:
    """A group as JSON; what only replay needs becomes lists."""
    data = dataclasses.asdict(group)
    for rollout in data["rollouts"]:
        for completion in rollout["completions"]:
            kept, experts = completion["kept"], completion["experts"]
            completion["kept"] = kept and [ids.tolist() for ids in kept]
            completion["experts"] = experts.tolist() if experts is not None else None
    return data


def _group(data: dict[str, Any]) -> Group:
    """The group that `_plain` wrote."""

    def completion(c: dict[str, Any]) -> Completion:
        as_tuples = {k: tuple(c[k]) for k in ("prompt_ids", "token_ids", "logprobs")}
        return Completion(**(c | as_tuples | {"spans": tuple(VersionSpan(*s) for s in c["spans"])}))

    rollouts = tuple(
        Rollout(tuple(completion(c) for c in r["completions"]), r["reward"], r["metrics"]) for r in data["rollouts"]
    )
    return Group(data["entry"], data["task_id"], rollouts)
