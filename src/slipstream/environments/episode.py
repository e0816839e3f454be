"""Run one episode of a user's environment: a failure costs one rollout, with a reason, and never the run.

Consumes an environment, a task and a policy; produces validated rollouts. Waits for a free `EpisodeSlots` slot, for
the episode, and for its score.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import signal
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias, TypeVar

from slipstream.config.environments import EnvironmentConfig
from slipstream.config.plugins import is_ctrl_c
from slipstream.config.schema import Config, ConfigError
from slipstream.environments.base import Environment, InvalidReward, Policy, Task, as_reward, play
from slipstream.environments.concurrency import PACKAGE, STANDARD_LIBRARY, Episode, EpisodeSlots
from slipstream.environments.conversation import ConversationLimits
from slipstream.environments.reward_workers import (
    CURRENT_EPISODE,
    EpisodeContext,
    RewardErrorCounter,
    ScoringError,
    raised_at,
)
from slipstream.environments.rollout_checks import InvalidRollout
from slipstream.environments.tools import ServerFailed
from slipstream.generators.base import GenerationError
from slipstream.rollout import Rollout
from slipstream.runtime.closing import abandon, gather_all
from slipstream.runtime.worker import succeeded
from slipstream.scheduling.loop_state import max_episodes

EVENTS = asyncio.events.__file__  # of the frame that calls a task's step
AGAIN_S = 0.01  # after which an ignored interruption is raised again
MAX_REWARD = 1e12  # absolute value; float32 has to hold the squares of advantages
MAX_REWARD_ERRORS_IN_A_ROW = 512  # a weak policy may give only malformed answers for a while
MAX_MESSAGE = 1000  # characters of an exception's message
MAX_METRIC = 1e100  # sums of its squares are finite
METRIC = "a metric must be a finite number, or NaN where there is none"
CLEANUP_S = 5.0  # between an episode's cancellation and its abandonment
CONVERSATION_SHARE = 0.9  # of an episode's timeout; the rest is for the reward

Scoring = Callable[[Task, Rollout], Coroutine[Any, Any, Rollout]]
Result = TypeVar("Result")
Exit: TypeAlias = SystemExit | KeyboardInterrupt  # asyncio raises these out of the event loop


class RolloutFailed(Exception):
    """One episode failed. `reason` is a short category, which the run counts; `detail` is for a person."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail

    @property
    def one_line(self) -> str:
        """The reason with the end of the detail, and where it was raised."""
        last = self.detail.splitlines()[-1] if self.detail else ""
        text = last if last.startswith(self.reason) else f"{self.reason}: {last}"
        return text + raised_at(self.detail)


EpisodeOutcome = tuple[Rollout, ...] | RolloutFailed  # of an episode: one rollout for each role


class EpisodeBlocked(BaseException):
    """Raised inside an episode that blocks the event loop. A user's `except Exception` does not catch it."""


@dataclass(frozen=True)
class EpisodeOptions:
    """How to run an episode.

    `timeout` is in seconds of the policy's clock, which starts when the episode gets one of the `slots`. `scoring` has
    its own timeout. Without `reward_errors` a reward function that raises fails the rollout. Processes of reward
    functions write to `reward_log`. The rewards of an `unrewarded` episode without `scoring` may be NaN.
    """

    timeout: float
    scoring: Scoring | None = None
    slots: EpisodeSlots = field(default_factory=EpisodeSlots)
    reward_errors: RewardErrorCounter | None = None
    reward_log: Path | None = None
    unrewarded: bool = False


def episode_limits(config: EnvironmentConfig) -> ConversationLimits:
    """Limits of an episode's conversations. A conversation gets 90% of the episode's timeout, the reward the rest.

    Each of the `environment.workers` gets an equal share of `tool_calls_per_second`.
    """
    rate = config.tool_calls_per_second / max(1, config.workers)
    return ConversationLimits(
        config.max_turns, config.max_tokens, config.timeout * CONVERSATION_SHARE, rate, config.label
    )


def episode_slots(config: Config, engine_slots: int) -> EpisodeSlots:
    """Slots for episodes in flight. `engine_slots` is the number of sequences that the engines decode; 0: unknown."""
    loop, limit = config.loop, config.environment.max_concurrent
    return EpisodeSlots(max_episodes(loop.max_lag, loop.group_size, engine_slots, limit))


def reward_error_counter(
    config: EnvironmentConfig, on_error: Callable[[ScoringError], None]
) -> RewardErrorCounter | None:
    """The counter that `environment.reward_error = "zero"` asks for; None for "fail"."""
    return RewardErrorCounter(MAX_REWARD_ERRORS_IN_A_ROW, on_error) if config.reward_error == "zero" else None


async def play_again(
    played: Callable[[int], Awaitable[Result | RolloutFailed]], retries: int
) -> list[Result | RolloutFailed]:
    """Await `played(draw)`, up to `retries` more times while it fails. Returns each failure, and at the end the
    success, if any."""
    outcomes: list[Result | RolloutFailed] = []
    for draw in range(retries + 1):
        outcomes.append(await played(draw))
        if not isinstance(outcomes[-1], RolloutFailed):
            break
    return outcomes


async def run_episode(
    environment: Environment, task: Task, policy: Policy, options: EpisodeOptions
) -> tuple[Rollout, ...]:
    """Play and score one episode: one rollout, or one for each role.

    Raises `RolloutFailed` for an exception, a timeout, no completion, or a reward that is not a finite number. Raises
    `ConfigError`, such as for a missing package, unchanged: every other episode would fail alike.
    """
    unrewarded = options.unrewarded or options.scoring is not None
    token = CURRENT_EPISODE.set(EpisodeContext(policy.clock, options.reward_errors, options.reward_log, unrewarded))
    try:
        rollouts = await _play(environment, task, policy, options, unrewarded)
        policy.end()
        if not all(rollout.completions for rollout in rollouts):
            raise RolloutFailed(
                "no completion", f"task {task.id}: the episode returned without having sampled from the policy"
            )
        if options.scoring:
            rollouts = tuple(await gather_all(options.scoring(task, rollout) for rollout in rollouts))
        return rollouts if options.unrewarded else tuple(validate_numbers(rollout, task.id) for rollout in rollouts)
    except (ConfigError, GeneratorExit):
        raise
    except BaseException as error:
        current = asyncio.current_task()
        stopping = isinstance(error, asyncio.CancelledError) and current and current.cancelling()
        if stopping or is_ctrl_c(error):
            raise
        raise _as_rollout_failed(error, task, policy) from None
    finally:
        policy.end()
        CURRENT_EPISODE.reset(token)


async def _play(
    environment: Environment, task: Task, policy: Policy, options: EpisodeOptions, unrewarded: bool
) -> tuple[Rollout, ...]:
    """The episode's rollouts, within its timeout and a slot."""
    slot = options.slots.acquire(task.id, options.timeout, policy.clock)
    try:
        async with slot as episode, policy.clock.timeout(options.timeout) as clock:
            episode.player = asyncio.create_task(_catch_exit(play(environment, task, policy, unrewarded)))
            return await _wait(episode.player, episode, policy, clock)
    except TimeoutError:
        if not clock.expired():  # a timeout inside the user's code
            raise
        raise RolloutFailed("time limit", f"task {task.id} took longer than {options.timeout:g} s") from None


async def _catch_exit(coroutine: Coroutine[Any, Any, Result]) -> Result | Exit:
    """The coroutine's result, or an exit as a value: raised in a task, it would end the event loop."""
    try:
        return await coroutine
    except (SystemExit, KeyboardInterrupt) as error:
        if is_ctrl_c(error):
            raise
        return error


async def _wait(
    player: asyncio.Task[Result | Exit], episode: Episode, policy: Policy, clock: asyncio.Timeout
) -> Result:
    """The result of an episode's task. On cancellation, cancel that task and abandon it after `CLEANUP_S`.

    Raises `RolloutFailed` for an abandoned task whose timeout has expired. Its further requests are never answered.
    """
    try:
        await asyncio.wait([player])
    except asyncio.CancelledError:
        policy.close()
        player.add_done_callback(succeeded)
        player.cancel()
        try:
            await asyncio.wait([player], timeout=CLEANUP_S)
        finally:
            if running := not player.done():
                abandon(player)
        if running and clock.expired():
            where = f" at {episode.where}" if episode.where else ""
            raise RolloutFailed(
                "the episode continued after it was cancelled",
                f"task {episode.task_id} took longer than its time limit, and still runs{where}, which swallows "
                "CancelledError: catch Exception instead of everything, or raise it again",
            ) from None
        raise
    if isinstance(result := player.result(), Exit):
        raise result
    return result


def _as_rollout_failed(error: BaseException, task: Task, policy: Policy) -> RolloutFailed:
    match error:
        case RolloutFailed():
            return error
        case InvalidRollout():
            reason = f"invalid rollout: {error.field}"
        case GenerationError() | ServerFailed():
            reason = type(error).__name__
        case InvalidReward():
            reason = "reward is not a number"
        case ScoringError():
            reason = error.reason
        case EpisodeBlocked():
            return RolloutFailed("blocked the event loop", f"task {task.id}: {error}")
        case _:
            leaf = first_error(error)
            reason = type(leaf).__name__
            refused = f"\nIts URL had answered: {policy.last_refusal}" if policy.last_refusal else ""
            return RolloutFailed(reason, f"task {task.id}:\n{_short_traceback(leaf)}{refused}")
    return RolloutFailed(reason, f"task {task.id}: {error}")


def validate_numbers(rollout: Rollout, task_id: str) -> Rollout:
    """The rollout with plain numbers. Raises `RolloutFailed` for rewards or metrics that training can't use."""
    reward = as_reward(rollout.reward)
    steps = [step.reward for turn in rollout.steps for step in turn]
    for name, value in (("reward", reward), *(("reward of a step", value) for value in steps)):
        if not math.isfinite(value):
            raise RolloutFailed(f"{name} is {value}", f"task {task_id}: a reward must be a finite number")
        if abs(value) > MAX_REWARD:
            limit = f"a reward must be a finite number, up to {MAX_REWARD:g}"
            raise RolloutFailed(f"{name} above {MAX_REWARD:g}", f"task {task_id}: it is {value:g}; {limit}")
    metrics = {name: _metric(name, value, task_id) for name, value in rollout.metrics.items()}
    return dataclasses.replace(rollout, reward=reward, metrics=metrics)


def _metric(name: str, value: Any, task_id: str) -> float:
    """A metric as a float. Raises `RolloutFailed` if it is not a number, or beyond `MAX_METRIC`."""
    try:
        if isinstance(value, str):
            raise TypeError
        number = float(value)
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError):
        found = f"it is {value!r:.80}, of type {type(value).__name__}"
        raise RolloutFailed(f"metric {name} is no number", f"task {task_id}: {found}; {METRIC}") from None
    if abs(number) > MAX_METRIC:
        found = "infinite" if math.isinf(number) else f"above {MAX_METRIC:g}"
        raise RolloutFailed(f"metric {name} is {found}", f"task {task_id}: {METRIC}")
    return number


def first_error(error: BaseException) -> BaseException:
    """The first exception of a (nested) exception group, or the exception itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _short_traceback(error: BaseException) -> str:
    """The last three frames of an exception, two lines each, then its message, as one line."""
    frames = "".join(traceback.format_tb(error.__traceback__)).splitlines()
    frames = [line for line in frames if line.strip(" ^~")][-6:]  # without marks below the code
    message = " ".join("".join(traceback.format_exception_only(error)).split())
    return "\n".join([*frames, message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]} ..."])


def blocked_limit(timeouts: Iterable[float]) -> float:
    """Seconds for which an episode may block the event loop, from the timeouts of the environments on it.

    A tenth of the shortest timeout, but from 1 to 5, and never more than that timeout: while the loop is blocked, all
    other episodes wait, too.
    """
    timeout = min(timeouts)
    return min(timeout, 5.0, max(1.0, timeout / 10))


def _users_line(frame: FrameType | None) -> str:
    """File and line of the innermost frame of the user's code in an asyncio task; "" without one."""
    while frame and frame.f_code.co_filename != EVENTS:
        if not frame.f_code.co_filename.startswith((PACKAGE, STANDARD_LIBRARY)):
            return f" at {frame.f_code.co_filename}, line {frame.f_lineno}"
        frame = frame.f_back
    return ""


class EventLoopWatchdog:
    """Interrupts an episode that blocks the event loop (a `time.sleep`, a busy loop) for longer than `limit` seconds.

    A timer of the event loop postpones an alarm signal again and again. The signal arrives if the loop is blocked; its
    handler raises `EpisodeBlocked` if an episode is running. It calls `warn` for the first blocked episode only. Has no
    effect outside of the main thread, and on systems without SIGALRM.
    """

    def __init__(self, limit: float, warn: Callable[[str], object] = print) -> None:
        self._limit, self._warn = limit, warn
        self._warned = False
        self._active = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
        self._beat: asyncio.TimerHandle | None = None

    def __enter__(self) -> EventLoopWatchdog:
        if self._active:
            self._previous: Any = signal.signal(signal.SIGALRM, self._on_alarm)
            self._ignored, sys.unraisablehook = sys.unraisablehook, self._on_ignored
            self._heartbeat()
        return self

    def __exit__(self, *_: object) -> None:
        if self._active:
            if self._beat:
                self._beat.cancel()
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self._previous)
            sys.unraisablehook = self._ignored

    def _heartbeat(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, self._limit, self._limit)
        self._beat = asyncio.get_running_loop().call_later(min(1.0, self._limit / 4), self._heartbeat)

    def _on_alarm(self, _number: int, frame: FrameType | None) -> None:
        if CURRENT_EPISODE.get():
            blocked = EpisodeBlocked(
                f"it held up all others for {self._limit:g} s{_users_line(frame)}; await there, or use "
                "asyncio.to_thread or environment.workers"
            )
            if not self._warned:
                self._warned = True
                with contextlib.suppress(Exception):  # the episode may have been printing
                    self._warn(f"an episode blocked the event loop: {blocked}")
            raise blocked

    def _on_ignored(self, ignored: sys.UnraisableHookArgs) -> None:
        """Raise `EpisodeBlocked` again after `AGAIN_S` if Python ignored it, as it does in destructors."""
        if isinstance(ignored.exc_value, EpisodeBlocked):
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S, self._limit)
        else:
            self._ignored(ignored)
