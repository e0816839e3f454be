"""The worker that plays episodes in its process; `worker_environment.py` is the controller's end.

An episode here has a `Policy` with the seed of the controller's policy. Its requests for completions go to the
controller, which fetches them by `requests` and replies by `answer`. The controller's `Policy` samples and records the
completions, so their tokens and log-probabilities don't depend on what a worker reports.
"""

from __future__ import annotations

import asyncio
import dataclasses
import faulthandler
import itertools
import math
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from slipstream.config.environments import EnvironmentConfig
from slipstream.environments.base import Policy, Task
from slipstream.environments.chat_tokenizer import ChatTokenizer
from slipstream.environments.conversation import ConversationLimits
from slipstream.environments.endpoint import Endpoint
from slipstream.environments.episode import EpisodeOptions, EventLoopWatchdog, RolloutFailed, blocked_limit, run_episode
from slipstream.environments.reward_workers import RewardErrorCounter, ScoringError, cores
from slipstream.generators.base import EngineFailed, GenerationError, finish_request
from slipstream.generators.pausable_clock import Clock
from slipstream.rollout import Completion, Rollout, Sampling
from slipstream.runtime.worker import Worker

OWN_LOG = Path("/dev/stderr")  # the log of this process, to which reward workers write, too
BLOCKED_EXIT_S = 60.0  # of processor time on all cores, after which a process with a blocked event loop ends itself


class Request(NamedTuple):
    """A request of an episode for a completion of these token ids."""

    number: int
    episode: int
    prompt_ids: Sequence[int]
    sampling: Sampling


class EpisodeSettings(NamedTuple):
    """What an episode's policy in the worker has in common with the controller's."""

    sampling: Sampling
    seed: str
    limits: ConversationLimits
    policies: Mapping[str, str]
    unrewarded: bool
    counts_reward_errors: bool


class EpisodeResult(NamedTuple):
    """The rollouts of an episode or its `failure` (reason and detail), and the exceptions of its reward functions."""

    rollouts: tuple[Rollout, ...]
    failure: tuple[str, str] | None
    reward_errors: list[tuple[str, str]]


class EpisodeWorker(Worker):
    """Plays the episodes of an environment in its process; the controller answers their requests."""

    def __init__(self, options: EnvironmentConfig, tokenizer: ChatTokenizer) -> None:
        from slipstream.environments.load import load_environment  # which imports this module

        self._environment = load_environment(options)
        self._tokenizer, self._endpoint = tokenizer, Endpoint(tokenizer)
        self._blocked_limit = blocked_limit([options.timeout])
        self._clocks: dict[int, Clock] = {}  # of the episodes
        self._answers: dict[int, asyncio.Future[Completion]] = {}  # to requests without an answer yet
        self._numbers = itertools.count()
        self._outgoing: list[Request | int] = []
        self._arrived = asyncio.Event()

    async def run(self) -> None:
        """Interrupt episodes that block the event loop. End the process if one blocks it for long.

        A living controller kills the process sooner. This timer is for a process whose controller has died: no Python
        thread could end it while C code holds the interpreter's lock. It counts processor time,
        `BLOCKED_EXIT_S` for each core, so a process that was suspended continues.
        """
        faulthandler.register(signal.SIGPROF, chain=True)  # writes a traceback; then the signal ends the process
        with EventLoopWatchdog(self._blocked_limit):
            while True:
                signal.setitimer(signal.ITIMER_PROF, BLOCKED_EXIT_S * cores())  # all threads count
                await asyncio.sleep(BLOCKED_EXIT_S / 10)

    async def play(self, episode: int, task: Task, settings: EpisodeSettings) -> EpisodeResult:
        """Play one episode. The controller enforces its timeout. Raises `ConfigError` as `run_episode`."""
        errors: list[ScoringError] = []
        counter = RewardErrorCounter(sys.maxsize, errors.append) if settings.counts_reward_errors else None
        generator = ControllerGenerator(self, episode)
        self._clocks[episode] = generator.clock
        policy = Policy(
            generator, self._tokenizer, settings.sampling, settings.seed, self._endpoint, settings.limits,
            settings.policies,
        )  # fmt: skip
        options = EpisodeOptions(math.inf, reward_errors=counter, reward_log=OWN_LOG, unrewarded=settings.unrewarded)
        rollouts: tuple[Rollout, ...] = ()
        failure = None
        try:
            rollouts = await run_episode(self._environment, task, policy, options)
        except RolloutFailed as failed:
            failure = failed.reason, failed.detail
        finally:
            del self._clocks[episode]
        rollouts = tuple(map(_without_policy, rollouts))
        return EpisodeResult(rollouts, failure, [(error.reason, str(error)) for error in errors])

    async def sample(self, episode: int, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """The controller's completion for a request of an episode. Raises `GenerationError`, `EngineFailed`."""
        number = next(self._numbers)
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        self._send(Request(number, episode, prompt_ids, sampling))
        try:
            return await answer
        finally:
            del self._answers[number]
            if answer.cancelled():
                self._send(number)

    async def requests(self) -> list[Request | int]:
        """New requests, and the numbers of requests that were cancelled; waits for the first of them."""
        await self._arrived.wait()
        self._arrived.clear()
        new, self._outgoing = self._outgoing, []
        return new

    async def answer(self, number: int, outcome: Completion | GenerationError | EngineFailed) -> None:
        """Answer a request, unless it was cancelled."""
        if answer := self._answers.get(number):
            finish_request(answer, outcome)

    async def run_clock(self, episode: int, running: bool) -> None:
        """Start or stop the clock of an episode, if it has not ended."""
        if clock := self._clocks.get(episode):
            clock.start() if running else clock.stop()

    async def ping(self) -> None:
        """Return once the event loop has time."""

    async def end(self) -> None:
        """Close the environment."""
        from slipstream.environments.load import close_environment

        await close_environment(self._environment)
        await self._endpoint.close()

    def _send(self, message: Request | int) -> None:
        self._outgoing.append(message)
        self._arrived.set()


def _without_policy(rollout: Rollout) -> Rollout:
    """The rollout with the role that the environment gave; the controller prefixes the policy's name again."""
    role = rollout.role.removeprefix(rollout.policy).removeprefix(":") if rollout.policy else rollout.role
    return dataclasses.replace(rollout, role=role)


class ControllerGenerator:
    """The generator of an episode in a worker. `clock` is set by the controller."""

    version = 0  # unknown here; completions have theirs

    def __init__(self, worker: EpisodeWorker, episode: int) -> None:
        self._worker, self._episode, self.clock = worker, episode, Clock()

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        return await self._worker.sample(self._episode, prompt_ids, sampling)

    async def close(self) -> None:
        pass
