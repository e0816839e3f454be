"""Scoring between generation and buffer.

Consumes rollouts of finished episodes, produces rollouts with rewards and a teacher's log-probabilities. Waits for the
scorer and the teacher; meanwhile generation continues, and only the rollout's group waits.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from array import array
from collections.abc import Callable
from functools import partial
from typing import Any

from slipstream.config.plugins import is_ctrl_c, one_line
from slipstream.config.schema import ConfigError, ScoringConfig
from slipstream.environments.base import Task
from slipstream.environments.concurrency import RateLimiter
from slipstream.environments.reward_workers import ScoringError
from slipstream.rollout import Group, Rollout, mean
from slipstream.runtime.closing import close_at_once
from slipstream.runtime.worker import WorkerDied, WorkerError
from slipstream.scoring.base import Scorer, apply_answer
from slipstream.scoring.process import ScoringProcess
from slipstream.scoring.teacher import Teacher


@dataclasses.dataclass
class Interval:
    """Statistics of a stage since the last `take_interval`, failed scores included.

    `queue` and `running` are the current numbers. Times are in seconds, summed over the scores that ended.
    """

    queue: int = 0
    running: int = 0
    scored: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    retries: dict[str, int] = dataclasses.field(default_factory=dict)


class ScoringStage:
    """Scores up to `scoring.concurrency` rollouts at once, each within `scoring.timeout`; the others queue.

    Without a scorer the environment's reward remains; without a teacher `Rollout.teacher` remains ().
    """

    def __init__(self, options: ScoringConfig, scorer: Scorer | None, teacher: Teacher | None = None) -> None:
        self._options = options
        self.scorer, self.teacher = scorer, teacher
        concurrency = min(options.concurrency, getattr(scorer, "concurrency", options.concurrency))
        self._slots = asyncio.Semaphore(concurrency)
        self._limiter = RateLimiter(options.requests_per_second)
        self._timeout = None if getattr(scorer, "has_own_timeout", False) else options.timeout
        self.queue = 0
        self.running = 0
        self._interval = Interval()

    async def __call__(self, task: Task, rollout: Rollout) -> Rollout:
        """The rollout with its reward and the teacher's log-probabilities.

        Raises `ScoringError`, or another error of scorer or teacher as it is.
        """
        if self.teacher is None:
            return await self._score(task, rollout)
        logprobs = asyncio.ensure_future(self.teacher.score(rollout.completions))
        try:
            return with_teacher(await self._score(task, rollout), await logprobs)
        finally:
            logprobs.cancel()

    async def add_teacher(self, group: Group) -> Group:
        """The group with a teacher's log-probabilities: a checkpoint's groups may be older than the teacher."""
        if self.teacher is None:
            return group
        rollouts = [
            r if r.teacher else with_teacher(r, await self.teacher.score(r.completions)) for r in group.rollouts
        ]
        return dataclasses.replace(group, rollouts=tuple(rollouts))

    @property
    def dead(self) -> WorkerDied | None:
        """The last death of the reward model or the teacher, once it is not restarted any more."""
        return next((part.dead for part in self._processes if part.dead), None)

    @property
    def _processes(self) -> list[ScoringProcess]:
        return [part for part in (self.scorer, self.teacher) if isinstance(part, ScoringProcess)]

    def warn_by(self, warn: Callable[[str], None]) -> None:
        """Report restarts of reward model and teacher by this function."""
        for part in self._processes:
            part.warn = warn

    def take_interval(self) -> Interval:
        """Statistics since the last call."""
        retries = dict(getattr(self.scorer, "retries", None) or {})
        interval, self._interval = self._interval, Interval()
        return dataclasses.replace(interval, queue=self.queue, running=self.running, retries=retries)

    async def start(self) -> None:
        """Start the processes of reward model and teacher, if any; reward workers start when first needed.

        Raises `ConfigError` if one can't be built from its options or files.
        """
        try:
            parts: list[Any] = [self.scorer, self.teacher]
            for part in parts:  # sequentially, since they may share a GPU
                if hasattr(part, "start"):
                    await part.start()
        except WorkerError as error:
            if error.kind in ("ConfigError", "InvalidInput", "ValueError", "OSError", "ImportError"):
                raise ConfigError(str(error)) from None
            raise

    async def close(self) -> None:
        await close_at_once(*(part.close for part in (self.scorer, self.teacher) if part is not None))

    async def _score(self, task: Task, rollout: Rollout) -> Rollout:
        """The rollout with its reward, after a wait for a free slot. Raises `ScoringError`."""
        if self.scorer is None:
            return rollout
        queued = time.perf_counter()
        self.queue += 1
        try:
            await self._slots.acquire()
        finally:
            self.queue -= 1
        began = time.perf_counter()
        self.running += 1
        try:
            await self._limiter.wait()
            began = time.perf_counter()
            call = partial(self._ask, self.scorer, task, rollout)
            answer = await (self.scorer.repeat(call) if isinstance(self.scorer, ScoringProcess) else call())
        finally:
            self.running -= 1
            self._slots.release()
            self._interval.scored += 1
            self._interval.seconds += time.perf_counter() - began
            self._interval.waited += began - queued
        return apply_answer(rollout, answer, self._options.weights)

    async def _ask(self, scorer: Scorer, task: Task, rollout: Rollout) -> Any:
        """The scorer's answer, unchecked.

        Raises `ScoringError` after `scoring.timeout`, or if the scorer exits (`SystemExit`); other errors pass.
        """
        try:
            async with asyncio.timeout(self._timeout) as clock:
                return await scorer.score(task, rollout)
        except (SystemExit, KeyboardInterrupt) as error:  # raised in a task, it would end the event loop
            if is_ctrl_c(error):
                raise
            raise ScoringError(type(error).__name__, one_line(error)) from None
        except TimeoutError:
            if not clock.expired():
                raise
            message = f"it took longer than scoring.timeout = {self._options.timeout:g} s"
            raise ScoringError("scoring time limit", message) from None


def with_teacher(rollout: Rollout, teacher: tuple[array[float], ...]) -> Rollout:
    """The rollout with a teacher's log-probabilities of its tokens.

    The metric `teacher_gap` is the mean of behaviour - teacher log-probabilities, an estimate of KL(behaviour ‖
    teacher) per token. A rollout without a reward gets -teacher_gap as its reward.
    """
    rows = zip(rollout.completions, teacher, strict=True)
    gap = mean([b - t for completion, row in rows for b, t in zip(completion.logprobs, row, strict=True)])
    reward = -gap if math.isnan(rollout.reward) else rollout.reward
    return dataclasses.replace(rollout, reward=reward, teacher=teacher, metrics=rollout.metrics | {"teacher_gap": gap})
