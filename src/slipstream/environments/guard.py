"""A wall around a user's code: whatever an episode does costs one rollout and a reason, never the run."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import signal
import threading
import traceback
from collections.abc import Callable, Coroutine, Iterable
from types import FrameType
from typing import Any, TypeVar

from slipstream.config import Config, ConfigError, EnvironmentConfig
from slipstream.environments.base import Environment, NoNumber, Policy, Task, as_reward, play
from slipstream.environments.conversation import Limits
from slipstream.environments.in_flight import Places
from slipstream.environments.rollout_checks import InvalidRollout
from slipstream.environments.scoring import EPISODE, RewardErrors, ScoringError, Waits
from slipstream.generators.base import GenerationError
from slipstream.rollout import Rollout

MAX_REWARD = 1e12  # by amount; squares of advantages have to fit into float32
MAX_RAISED_IN_A_ROW = 512  # rewards; a weak policy may give strange answers alone for a while
CONVERSATION_SHARE = 0.9  # of an episode's time limit


class RolloutFailed(Exception):
    """One episode failed. `reason` is short enough to be counted by; `detail` is for a person."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail

    @property
    def one_line(self) -> str:
        """The reason with the end of the detail."""
        last = self.detail.splitlines()[-1] if self.detail else ""
        return last if last.startswith(self.reason) else f"{self.reason}: {last}"


class EpisodeBlocked(BaseException):
    """Raised inside an episode that held up the event loop. No `except Exception` of a user's can swallow it."""


Scoring = Callable[[Task, Rollout], Coroutine[Any, Any, Rollout]]
Result = TypeVar("Result")


def episode_limits(config: EnvironmentConfig) -> Limits:
    """What an episode's conversations may take. Their time is up before the episode's: there is a reward to compute."""
    return Limits(config.turns, config.tokens, config.time_limit * CONVERSATION_SHARE)


def episode_places(config: Config, slots: int) -> Places:
    """Places for episodes in flight, by default twice as many as the engines have `slots` (0: unknown).

    By default a synchronous run has no bound. It begins a whole wave at once, so that the order in which requests reach
    the engine does not depend on when other episodes end.
    """
    auto = 0 if config.loop.max_lag == 0 or not slots else max(2 * slots, config.loop.group_size)
    return Places(config.environment.max_concurrent or auto)


async def attempt(
    environment: Environment,
    task: Task,
    policy: Policy,
    time_limit: float,
    scoring: Scoring | None = None,
    places: Places | None = None,
    reward_errors: RewardErrors | None = None,
) -> tuple[Rollout, ...]:
    """Play one episode, end it, and have it scored: one rollout, or one of each role.

    Raises `RolloutFailed` for an exception, a hang, or a reward that is no finite number; a `ConfigError`, such as a
    package that is missing, is the run's, since no other episode would do better. `time_limit` is in seconds of the
    policy's clock, which begins when there is one of the `places` for the episode; `scoring` has a clock of its own.
    A reward function that raises fails the rollout unless `reward_errors` count it.
    """
    token = EPISODE.set(Waits(policy.clock, reward_errors))
    try:
        place = (places or Places()).place(task.id, policy.clock)
        async with place, policy.clock.timeout(time_limit) as clock:
            rollouts = await play(environment, task, policy, unrewarded=scoring is not None)
        policy.end()
        if not all(rollout.completions for rollout in rollouts):
            raise RolloutFailed("no completion", "the episode returned without having sampled from the policy")
        if scoring:
            rollouts = tuple(await all_or_none(scoring(task, rollout) for rollout in rollouts))
        return tuple(map(_sound, rollouts))
    except asyncio.CancelledError:
        current = asyncio.current_task()
        if current and current.cancelling():  # the run is stopping; what an episode cancels by itself is its failure
            raise
        raise RolloutFailed("CancelledError", f"task {task.id}:\n{_tail()}") from None
    except EpisodeBlocked:
        raise RolloutFailed("blocked the event loop", f"task {task.id}:\n{_tail()}") from None
    except (RolloutFailed, ConfigError):
        raise
    except InvalidRollout as error:
        raise RolloutFailed(f"invalid rollout: {error.field}", f"task {task.id}: {error}") from None
    except GenerationError as error:
        raise RolloutFailed(type(error).__name__, f"task {task.id}: {error}") from None
    except NoNumber as error:
        raise RolloutFailed("reward is no number", f"task {task.id}: {error}") from None
    except ScoringError as error:
        raise RolloutFailed(error.reason, f"task {task.id}: {error}") from None
    except (Exception, SystemExit) as error:
        if isinstance(error, TimeoutError) and clock.expired():  # else it is a time limit of the episode's own
            raise RolloutFailed("time limit", f"task {task.id} took longer than {time_limit:g} s") from None
        refused = f"\nIts URL had answered: {policy.refused}" if policy.refused else ""
        raise RolloutFailed(type(error).__name__, f"task {task.id}:\n{_tail()}{refused}") from None
    finally:
        policy.end()
        EPISODE.reset(token)


def count_reward_errors(options: EnvironmentConfig, told: Callable[[ScoringError], None]) -> RewardErrors | None:
    """What `attempt` does with rewards that raise, as `environment.reward_error` says."""
    return RewardErrors(MAX_RAISED_IN_A_ROW, told) if options.reward_error == "zero" else None


async def all_or_none(coroutines: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """What all of them return. If one raises, the others are cancelled."""
    tasks = [asyncio.ensure_future(one) for one in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _sound(rollout: Rollout) -> Rollout:
    reward = as_reward(rollout.reward)
    steps = [step.reward for turn in rollout.steps for step in turn]
    for what, value in (("reward", reward), *(("reward of a step", value) for value in steps)):
        if not math.isfinite(value):
            raise RolloutFailed(f"{what} is {value}", "a reward must be a finite number")
        if abs(value) > MAX_REWARD:
            found = f"{what} above {MAX_REWARD:g}"
            raise RolloutFailed(found, f"it is {value:g}; a reward must be a finite number, up to {MAX_REWARD:g}")
    metrics = {name: float(value) for name, value in rollout.metrics.items()}
    if infinite := next((name for name, value in metrics.items() if math.isinf(value)), ""):
        raise RolloutFailed(
            f"metric {infinite} is infinite", "a metric must be a finite number, or NaN where there is none"
        )
    return dataclasses.replace(rollout, reward=reward, metrics=metrics)


def _tail() -> str:
    return "".join(traceback.format_exc().splitlines(keepends=True)[-8:]).rstrip()


class LoopWatch:
    """Interrupts an episode that blocks the event loop (a `time.sleep`, a busy loop) for longer than `limit` seconds.

    A heartbeat on the loop keeps pushing an alarm into the future. When it rings the loop is stuck; if it is stuck in
    an episode, that episode gets an exception there and then. Works in the main thread of systems that have SIGALRM,
    and does nothing elsewhere.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._active = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
        self._beat: asyncio.TimerHandle | None = None

    def __enter__(self) -> LoopWatch:
        if self._active:
            self._previous: Any = signal.signal(signal.SIGALRM, self._ring)
            self._heartbeat()
        return self

    def __exit__(self, *_: object) -> None:
        if self._active:
            if self._beat:
                self._beat.cancel()
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self._previous)

    def _heartbeat(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, self._limit, self._limit)
        self._beat = asyncio.get_running_loop().call_later(min(1.0, self._limit / 4), self._heartbeat)

    def _ring(self, _number: int, _frame: FrameType | None) -> None:
        if EPISODE.get():
            raise EpisodeBlocked
