"""Between generation and buffer: finished rollouts wait here for their rewards.

Consumes rollouts whose episodes are over, produces the same with rewards and a teacher's log-probabilities. Waits for
scorers and the teacher, and only the group of a rollout waits for it: generators go on meanwhile.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from array import array
from typing import Any

from slipstream.actor import ActorDied, ActorError
from slipstream.closing import close_at_once
from slipstream.config import ConfigError, ScoringConfig
from slipstream.environments.base import Task
from slipstream.environments.scoring import ScoringError
from slipstream.rollout import Group, Rollout, mean
from slipstream.scoring.base import Scorer, rewarded
from slipstream.scoring.teacher import Teacher


@dataclasses.dataclass
class Lap:
    """What a stage did for a while, failed scores included. Times are seconds, summed over the scores that ended."""

    queue: int = 0  # as it is at the end, like what is `running` then
    running: int = 0
    scored: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    longest_queue: int = 0
    retries: dict[str, int] = dataclasses.field(default_factory=dict)


class ScoringStage:
    """Scores at most `scoring.concurrency` rollouts at once, each within `scoring.time_limit`; the others queue.

    Without a scorer the reward stays the environment's; without a teacher there are no log-probabilities of one.
    """

    def __init__(self, options: ScoringConfig, scorer: Scorer | None, teacher: Teacher | None = None) -> None:
        self._options = options
        self.scorer, self.teacher = scorer, teacher
        most = min(options.concurrency, getattr(scorer, "concurrency", options.concurrency))
        self._places = asyncio.Semaphore(most)
        self._limit = None if getattr(scorer, "keeps_time", False) else options.time_limit
        self.queue = 0
        self.running = 0
        self._lap = Lap()

    async def __call__(self, task: Task, rollout: Rollout) -> Rollout:
        """The rollout with its reward and the teacher's log-probabilities. Raises `ScoringError`."""
        if self.teacher is None:
            return await self._score(task, rollout)
        asked = asyncio.ensure_future(self.teacher.score(rollout.completions))
        try:
            return taught(await self._score(task, rollout), await asked)
        finally:
            asked.cancel()

    async def teach(self, group: Group) -> Group:
        """A group of a checkpoint: what was ready before the run had a teacher gets its log-probabilities now."""
        if self.teacher is None:
            return group
        rollouts = [r if r.teacher else taught(r, await self.teacher.score(r.completions)) for r in group.rollouts]
        return dataclasses.replace(group, rollouts=tuple(rollouts))

    @property
    def dead(self) -> ActorDied | None:
        """What became of the process of the reward model or of the teacher, if it died."""
        ends = (getattr(part, "dead", None) for part in (self.scorer, self.teacher))
        return next((dead for dead in ends if isinstance(dead, ActorDied)), None)

    def lap(self) -> Lap:
        """What was done since the last lap."""
        retries = dict(getattr(self.scorer, "retries", None) or {})
        lap, self._lap = self._lap, Lap(longest_queue=self.queue)
        return dataclasses.replace(lap, queue=self.queue, running=self.running, retries=retries)

    async def start(self) -> None:
        """Start the processes that scorer and teacher need, if any. Raises `ConfigError` for what they refuse."""
        try:
            parts: list[Any] = [self.scorer, self.teacher]
            for part in parts:  # one after the other, since they may share a GPU
                if hasattr(part, "start"):
                    await part.start()
        except ActorError as error:
            if error.kind in ("ConfigError", "ValueError", "OSError", "ImportError"):
                raise ConfigError(str(error)) from None
            raise

    async def close(self) -> None:
        await close_at_once(*(part.close for part in (self.scorer, self.teacher) if part is not None))

    async def _score(self, task: Task, rollout: Rollout) -> Rollout:
        """The rollout with its reward, once it is its turn. Raises `ScoringError`."""
        if self.scorer is None:
            return rollout
        queued = time.perf_counter()
        self.queue += 1
        if self._places.locked():  # else its turn comes at once
            self._lap.longest_queue = max(self._lap.longest_queue, self.queue)
        try:
            await self._places.acquire()
        finally:
            self.queue -= 1
        began = time.perf_counter()
        self.running += 1
        try:
            async with asyncio.timeout(self._limit) as clock:
                answer = await self.scorer.score(task, rollout)
        except TimeoutError:
            if not clock.expired():
                raise
            limit = f"it took longer than scoring.time_limit = {self._options.time_limit:g} s"
            raise ScoringError("scoring time limit", limit) from None
        finally:
            self.running -= 1
            self._places.release()
            self._lap.scored += 1
            self._lap.seconds += time.perf_counter() - began
            self._lap.waited += began - queued
        return rewarded(rollout, answer, self._options.weights)


def taught(rollout: Rollout, teacher: tuple[array[float], ...]) -> Rollout:
    """The rollout with a teacher's log-probabilities of its tokens.

    The metric `teacher_gap` is the mean of behaviour - teacher, which estimates KL(behaviour ‖ teacher) a token. A
    rollout that nobody has rewarded gets minus that as its reward.
    """
    rows = zip(rollout.completions, teacher, strict=True)
    gap = mean([b - t for completion, row in rows for b, t in zip(completion.logprobs, row, strict=True)])
    reward = -gap if math.isnan(rollout.reward) else rollout.reward
    return dataclasses.replace(rollout, reward=reward, teacher=teacher, metrics=rollout.metrics | {"teacher_gap": gap})
