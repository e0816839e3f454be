"""Worker processes for reward functions that are not async.

They keep slow rewards out of the controller's event loop. A reward that hangs or crashes costs one rollout; the pool
replaces its process.
"""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import os
import re
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from slipstream.config.schema import ConfigError
from slipstream.environments.base import InvalidReward, Task, as_reward
from slipstream.errors import UserError
from slipstream.generators.pausable_clock import Clock
from slipstream.rollout import Completion, Rollout
from slipstream.runtime.priority import ENVIRONMENT_NICENESS, at_niceness
from slipstream.runtime.worker import Worker, WorkerDied, WorkerError, describe_death, handle, succeeded
from slipstream.runtime.worker_process import WorkerProcess

TRACEBACK_LINES = 8
FRAME = re.compile(r'^ +File "(.+)", line (\d+)', re.MULTILINE)
MAX_DEFAULT_WORKERS = 32  # each may need 100 MB
REWARD_WORKER = "slipstream.environments.reward_workers:RewardWorker"
START_TIMEOUT_S = 600.0  # of a process, with the imports of the function's module


class ScoringError(UserError):
    """Scoring one completion or rollout failed. `reason` is a short category, which the run counts."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason

    @property
    def one_line(self) -> str:
        """The error that the detail ends with: its text after the frames of a traceback, and where it was raised."""
        lines = str(self).splitlines()
        frames = [number for number, line in enumerate(lines) if line.startswith("  ")]
        return (" ".join(lines[frames[-1] + 1 if frames else 0 :]) or self.reason) + raised_at(str(self))


def raised_at(detail: str) -> str:
    """ " (FILE:LINE)" of the last frame of a traceback; empty without one."""
    frames = FRAME.findall(detail)
    return f" ({frames[-1][0]}:{frames[-1][1]})" if frames else ""


class RewardRaised(ScoringError):
    """The reward function itself raised, perhaps because of a malformed answer."""


class ZeroReward(float):
    """The reward 0 of a function that raised."""


class RewardErrorCounter:
    """Turns reward functions that raise into a reward of 0 and reports each error to `on_error`.

    After `limit` errors in a row rollouts fail: the function is broken. `succeeded` resets the count.
    """

    def __init__(self, limit: int, on_error: Callable[[ScoringError], None]) -> None:
        self._limit, self._on_error = limit, on_error
        self.in_a_row = 0

    def count(self, error: ScoringError) -> ZeroReward:
        """Count an error of a reward function, report it to `on_error`, and return the reward.

        Raises the error instead if it is one more than `limit` in a row.
        """
        self.in_a_row += 1
        if self.in_a_row > self._limit:
            raise error
        self._on_error(error)
        return ZeroReward()

    def succeeded(self) -> None:
        self.in_a_row = 0


class EpisodeContext(NamedTuple):
    """What scoring needs to know of the episode that the current asyncio task plays."""

    clock: Clock
    reward_errors: RewardErrorCounter | None
    reward_log: Path | None = None
    unrewarded: bool = False  # `scoring` computes the reward


SLOTS: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
CURRENT_EPISODE: ContextVar[EpisodeContext | None] = ContextVar("episode", default=None)


def pause_episode_clock() -> AbstractContextManager[None]:
    """Pause the timeout of the current episode, if any."""
    episode = CURRENT_EPISODE.get()
    return episode.clock.stopped() if episode else nullcontext()


@asynccontextmanager
async def core_slot() -> AsyncIterator[None]:
    """One of as many slots as there are cores, for processes of episodes. The wait pauses the episode's timeout."""
    slots = SLOTS.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(cores()))
    with pause_episode_clock():
        await slots.acquire()
    try:
        yield
    finally:
        slots.release()


async def await_reward(reward: Awaitable[Any]) -> Any:
    """The result of a reward function, or 0 if it raises and the episode's `RewardErrorCounter` allows it.

    Raises `ScoringError`, `InvalidReward`, `ConfigError`.
    """
    episode = CURRENT_EPISODE.get()
    errors = episode.reward_errors if episode else None
    try:
        result = await reward
    except RewardRaised as error:
        failure: ScoringError = error
    except (ScoringError, InvalidReward, ConfigError):
        raise
    except Exception as error:
        lines = traceback.format_exc().splitlines()[-TRACEBACK_LINES:]
        failure = RewardRaised(type(error).__name__, "\n".join(lines))
    else:
        if errors:
            errors.succeeded()
        return result
    if errors is None:
        raise failure
    return errors.count(failure)


class RewardWorkerPool:
    """Up to `processes` workers (0: one for each core) that call "module:function" or "file.py:function".

    A worker starts when first needed. It is replaced if it dies or one score takes longer than `timeout` seconds. Its
    start has a separate timeout, and continues if the score that began it is cancelled. The timeout of an episode
    excludes starts and the wait for a free worker.
    """

    def __init__(self, reference: str, processes: int, timeout: float) -> None:
        self.processes = processes or cores()
        self._reference, self._timeout = reference, timeout
        self._closed = False
        self._workers: set[WorkerProcess] = set()
        # A stack, which prefers running workers.
        self._free = asyncio.LifoQueue[asyncio.Task[WorkerProcess] | None]()
        for _ in range(self.processes):
            self._free.put_nowait(None)

    async def score(self, task: Task, subject: Completion | Rollout) -> Any:
        """The result of `RewardWorker.score` in one of the workers. Errors are handled as in `await_reward`.

        Waits for a free worker.
        """
        return await await_reward(self._score(task, subject))

    async def _score(self, task: Task, subject: Completion | Rollout) -> Any:
        with pause_episode_clock():
            start = await self._free.get()
            if start is None or _has_ended(start):
                start = asyncio.create_task(self._start())
                start.add_done_callback(succeeded)  # its exception is raised below, unless this score is cancelled
        worker: WorkerProcess | None = None
        reusable = True
        try:
            with pause_episode_clock():
                await asyncio.wait([start])  # if cancelled here, the next score continues to wait for this start
            reusable = False
            worker = start.result()
            async with asyncio.timeout(self._timeout):
                answer = await handle(RewardWorker, worker).score(task, subject)
            reusable = True
            return answer
        except WorkerError as error:
            reusable = worker is not None
            if error.kind == InvalidReward.__name__:
                raise InvalidReward(str(error)) from None
            detail = "\n".join(error.details.splitlines()[-TRACEBACK_LINES:])
            raise (RewardRaised if reusable else ScoringError)(error.kind, detail) from None
        except TimeoutError:
            limit = "a tenth of environment.timeout, or scoring.timeout for a scorer"
            slow = f"the reward took longer than {self._timeout:g} s: {limit}"
            raise ScoringError("reward time limit", slow) from None
        except WorkerDied as died:
            why = f"the reward function took its process down: {describe_death(died)}"
            raise ScoringError("reward process died", why) from None
        finally:
            if worker and not reusable:  # it may still compute an abandoned score
                self._end(worker)
            self._free.put_nowait(start if reusable else None)

    async def close(self) -> None:
        self._closed = True
        workers = list(self._workers)
        for worker in workers:
            self._end(worker)
        await asyncio.gather(*(worker.stop(grace=0.0) for worker in workers))

    async def _start(self) -> WorkerProcess:
        """A worker that has loaded the function. A failure kills its process. Raises `ScoringError` if it is slow."""
        if self._closed:
            raise WorkerDied("the reward workers are closed")
        from slipstream.runtime.runtime import current_runtime  # imports torch, as no reward worker should

        launcher, episode = current_runtime().service("cpu"), CURRENT_EPISODE.get()
        environment = {**at_niceness(ENVIRONMENT_NICENESS), "PYTHONUNBUFFERED": "1"}  # it may be killed after a print
        worker = WorkerProcess("reward worker", episode and episode.reward_log, launcher, environment)
        self._workers.add(worker)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await worker.start(RewardWorker, REWARD_WORKER, self._reference, self._timeout)
        except BaseException as error:
            self._end(worker)
            if not isinstance(error, TimeoutError):
                raise
            slow = f"{self._reference} took longer than {START_TIMEOUT_S:g} s to load; do less in its module on import"
            raise ScoringError("reward start", slow) from None
        return worker

    def _end(self, worker: WorkerProcess) -> None:
        self._workers.discard(worker)
        worker.kill()


class RewardFunction:
    """A user's reward function: an async one runs in the event loop, any other in a `RewardWorkerPool`."""

    def __init__(self, function: Callable[[Task, Any], Any], reference: str, processes: int, timeout: float) -> None:
        self._function = function
        is_async = inspect.iscoroutinefunction(function)
        self.pool = None if is_async else RewardWorkerPool(reference, processes, timeout)

    async def score(self, task: Task, subject: Completion | Rollout) -> Any:
        """The function's result for this completion or rollout. Raises as `await_reward`."""
        if self.pool:
            return await self.pool.score(task, subject)
        return await await_reward(self._function(task, subject))

    async def close(self) -> None:
        if self.pool:
            await self.pool.close()


def _has_ended(start: asyncio.Task[WorkerProcess]) -> bool:
    """Whether a worker failed to start, or died, between two scores."""
    return start.done() and (not succeeded(start) or start.result().dead is not None)


class RewardWorker(Worker):
    """Calls a reward function with one completion or rollout at a time."""

    def __init__(self, reference: str, timeout: float) -> None:
        from slipstream.config.plugins import load_object

        self._reward: Callable[[Task, Any], Any] = load_object(reference)
        self._timeout = timeout

    async def score(self, task: Task, subject: Completion | Rollout) -> Any:
        """The reward function's result for a completion or a rollout: a mapping unchanged, any other value as a float.

        Raises `InvalidReward`, or what the function raises.
        """
        # The controller kills this process at the timeout. If the controller was killed, this ends it a little later.
        faulthandler.dump_traceback_later(2 * self._timeout, exit=True)
        try:
            answer = self._reward(task, subject)
            return answer if isinstance(answer, Mapping) else as_reward(answer)
        finally:
            faulthandler.cancel_dump_traceback_later()


def cores() -> int:
    """Cores that this process may use, at most `MAX_DEFAULT_WORKERS`."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(usable, MAX_DEFAULT_WORKERS)
