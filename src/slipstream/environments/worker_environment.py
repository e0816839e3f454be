"""An environment whose episodes are played in processes: a leak, a crash or a busy loop costs those of one worker.

`WorkerEnvironment` takes the place of the environment in the controller, which plays it as any other.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from slipstream.config.environments import EnvironmentConfig
from slipstream.config.schema import ConfigError
from slipstream.environments.base import Environment, Policy, Task
from slipstream.environments.chat_tokenizer import ChatTokenizer
from slipstream.environments.episode import RolloutFailed
from slipstream.environments.episode_workers import EpisodeResult, EpisodeSettings, EpisodeWorker, Request
from slipstream.environments.reward_workers import (
    CURRENT_EPISODE,
    START_TIMEOUT_S,
    EpisodeContext,
    RewardErrorCounter,
    ScoringError,
    cores,
    pause_episode_clock,
)
from slipstream.generators.base import EngineFailed, GenerationError
from slipstream.generators.pausable_clock import ASLEEP, Clock
from slipstream.rollout import Completion, Rollout
from slipstream.runtime.closing import gather_all
from slipstream.runtime.event_loop import throttle
from slipstream.runtime.priority import ENVIRONMENT_NICENESS, at_niceness
from slipstream.runtime.worker import WorkerDied, WorkerError, describe_death, succeeded
from slipstream.runtime.worker_process import WorkerProcess

EPISODE_WORKER = "slipstream.environments.episode_workers:EpisodeWorker"
PING_S = 1.0  # between two pings of a worker
HANG_S, HANG_CHECKS = 15.0, 10  # a worker that does not answer a ping for so long, in so many checks, hangs
WAVE_GAP_S = 2.0  # between two first requests of a wave
END_S = 10.0  # for a worker to close its environment
_numbers = itertools.count()  # of episodes


class WorkerClock(Clock):
    """Stops and starts the clock of an episode in its worker by `run` as it is stopped and started."""

    def __init__(self, parent: Clock, run: Callable[[bool], object]) -> None:
        self._run = run
        super().__init__(parent)

    def stop(self, reason: object = ASLEEP) -> None:
        if not self._reasons:
            self._run(False)
        super().stop(reason)

    def start(self, reason: object = ASLEEP) -> None:
        super().start(reason)
        if not self._reasons:
            self._run(True)


class Wave:
    """Sends the first requests of all episodes of a synchronous run at once, in the order in which episodes began.

    An engine gets them as one message, as it does without workers. They wait for every episode that began, but for
    `WAVE_GAP_S` at most after the last of them.
    """

    def __init__(self) -> None:
        self._silent: set[int] = set()  # episodes without a request
        self._held: dict[int, list[Callable[[], None]]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, episode: int) -> None:
        self._silent.add(episode)

    def request(self, episode: int, start: Callable[[], None]) -> None:
        """Call `start` once the episode's first request may start."""
        if episode in self._silent or episode in self._held:
            self._held.setdefault(episode, []).append(start)
            self.arrive(episode)
        else:
            start()

    def arrive(self, episode: int) -> None:
        """Note that an episode has a request, or has ended."""
        if episode not in self._silent:
            return
        self._silent.discard(episode)
        if self._timer:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(WAVE_GAP_S if self._silent else 0, self._release)

    def _release(self) -> None:
        held, self._held = self._held, {}
        self._silent.clear()
        for episode in sorted(held):
            for start in held[episode]:
                start()


class Playing(NamedTuple):
    """An episode in a worker, and its requests without an answer yet, by number."""

    policy: Policy
    clock: WorkerClock
    requests: dict[int, asyncio.Task[None]]


class EpisodeProcess:
    """The controller's end of one worker, which `starting` starts. `retired` ones get no further episodes.

    `assigned` episodes play in it or wait for its start. It is `responsive` unless a ping has waited for its answer
    since the last check.
    """

    starting: asyncio.Task[None]

    def __init__(self, name: str, log: Path | None, wave: Wave | None) -> None:
        from slipstream.runtime.runtime import current_runtime  # imports torch, as no worker should

        launcher, niceness = current_runtime().service("cpu"), at_niceness(ENVIRONMENT_NICENESS)
        self.process = WorkerProcess(name, log, launcher, niceness, essential=False)  # its pings are no progress
        self.retired, self.responsive = False, True
        self.assigned = 0
        self.episodes: dict[int, Playing] = {}
        self._wave = wave
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, options: EnvironmentConfig, tokenizer: ChatTokenizer) -> None:
        self._calls = await self.process.start(EpisodeWorker, EPISODE_WORKER, options, tokenizer)
        self._tasks = [asyncio.create_task(self._serve()), asyncio.create_task(self._watch())]
        for task in self._tasks:
            task.add_done_callback(self._end_if_failed)

    async def play(self, number: int, task: Task, policy: Policy, context: EpisodeContext) -> EpisodeResult:
        """Play an episode. Raises `WorkerDied`, `WorkerError`."""
        settings = EpisodeSettings(*policy.settings, context.unrewarded, context.reward_errors is not None)
        playing = self._calls.play(number, task, settings)
        clock = WorkerClock(policy.clock, partial(self._calls.run_clock, number))
        self.episodes[number] = Playing(policy, clock, {})
        try:
            return await playing
        finally:
            for request in self.episodes.pop(number).requests.values():
                request.cancel()

    async def close(self) -> None:
        """Close the environment in the worker, and end the process."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            with suppress(TimeoutError, WorkerDied, WorkerError):
                async with asyncio.timeout(END_S):
                    await self._calls.end()
        await self.process.stop(grace=1.0)

    async def _serve(self) -> None:
        """Start and cancel generations as the worker asks. Raises `WorkerDied`."""
        while True:
            for new in await self._calls.requests():
                if isinstance(new, Request):
                    start = partial(self._start_request, new)
                    self._wave.request(new.episode, start) if self._wave else start()
                    continue
                for playing in self.episodes.values():
                    if request := playing.requests.get(new):
                        request.cancel()

    def _start_request(self, request: Request) -> None:
        if playing := self.episodes.get(request.episode):
            task = asyncio.create_task(self._generate(playing.policy, request))
            playing.requests[request.number] = task
            task.add_done_callback(lambda _: playing.requests.pop(request.number, None))

    async def _generate(self, policy: Policy, request: Request) -> None:
        outcome: Completion | GenerationError | EngineFailed
        if not self._wave:  # a synchronous run's requests reach an engine as one message
            await throttle()
        try:
            outcome = await policy.generate(request.prompt_ids, request.sampling)
        except GenerationError as error:
            outcome = error
        except Exception as error:
            outcome = EngineFailed(f"{type(error).__name__}: {error}")
        with suppress(WorkerDied):
            await self._calls.answer(request.number, outcome)

    async def _watch(self) -> None:
        """Terminate the worker if it does not answer a ping for `HANG_S`.

        Checks are counted, so that time in which this process itself was stopped does not count.
        """
        while True:
            await asyncio.sleep(PING_S)
            ping = asyncio.ensure_future(self._calls.ping())
            checks = 0
            while not ping.done() and checks < HANG_CHECKS:
                await asyncio.wait([ping], timeout=HANG_S / HANG_CHECKS)
                self.responsive = ping.done()
                checks += 1
            if not ping.done():
                found = f"an episode has blocked its event loop for {HANG_S:g} s"
                self.process.terminate(f"{self.process.name} was ended: {found}")
            await ping

    def _end_if_failed(self, task: asyncio.Task[None]) -> None:
        """Kill what a dead worker has started."""
        if not task.cancelled() and not succeeded(task):
            self.process.kill()


class WorkerEnvironment:
    """An environment whose episodes are played in `options.workers` processes, each of which has all of it.

    They start with the first episode, at most one for each core at a time. A worker that dies or hangs is replaced,
    also one above `options.worker_memory_gb`, which first ends its episodes.

    An episode goes to the worker with the fewest episodes, and waits if this worker is still being started. Otherwise
    the episodes of dead workers would gather in the remaining workers, and the next crash would end them, too.
    """

    def __init__(
        self, environment: Environment, options: EnvironmentConfig, wave: Wave | None, logs: Path | None
    ) -> None:
        self.environment, self.train, self.test = environment, environment.train, environment.test
        rewards = max(1, (options.reward_workers or cores()) // options.workers)
        self._options = options.model_copy(update={"reward_workers": rewards})
        self._wave, self._logs = wave, logs
        self._alive: set[EpisodeProcess] = set()
        self._workers: list[EpisodeProcess | None] = [None] * options.workers
        self._starts = asyncio.Semaphore(cores())  # a start takes about a second of processor time
        self._closing: set[asyncio.Task[None]] = set()

    async def rollout(self, task: Task, policy: Policy) -> Sequence[Rollout]:
        """Play an episode in a worker. Raises `RolloutFailed`, `ScoringError`, `ConfigError`."""
        context = CURRENT_EPISODE.get()
        assert context, "`run_episode` plays episodes"
        number = next(_numbers)
        if self._wave:
            self._wave.begin(number)
        try:
            process = self._choose(policy.tokenizer)
            process.assigned += 1
            try:
                with pause_episode_clock():
                    await self._wait_for_start(process)
                result = await process.play(number, task, policy, context)
            finally:
                process.assigned -= 1
                self._close_if_retired(process)
        except WorkerDied as died:
            raise RolloutFailed("environment worker died", f"task {task.id}: {describe_death(died)}") from None
        except WorkerError as error:
            if error.kind == ConfigError.__name__:
                raise ConfigError(str(error)) from None
            raise RolloutFailed(error.kind, f"task {task.id}: {error}") from None
        finally:
            if self._wave:
                self._wave.arrive(number)
        count_reward_errors(context.reward_errors, result.reward_errors)
        if result.failure:
            raise RolloutFailed(*result.failure)
        return result.rollouts

    async def close(self) -> None:
        from slipstream.environments.load import close_environment

        for process in filter(None, self._workers):
            process.starting.cancel()
        await gather_all([process.close() for process in self._alive])
        await asyncio.gather(*self._closing)
        await close_environment(self.environment)

    def _choose(self, tokenizer: ChatTokenizer) -> EpisodeProcess:
        """The responsive worker with the fewest episodes. Starts missing workers first."""
        for index, process in enumerate(self._workers):
            if not process or self._must_leave(process):
                self._workers[index] = self._begin(index, tokenizer)
        return min(filter(None, self._workers), key=lambda process: (not process.responsive, process.assigned))

    async def _wait_for_start(self, process: EpisodeProcess) -> None:
        """Wait until the worker has started; with a wave, until all have. Raises what the start raises."""
        others = filter(None, self._workers) if self._wave else ()
        await asyncio.wait([worker.starting for worker in (process, *others)])
        process.starting.result()

    def _must_leave(self, process: EpisodeProcess) -> bool:
        """Whether to replace a worker: dead, not started, or above the memory limit, at which it also retires it."""
        if process.process.dead or (process.starting.done() and not succeeded(process.starting)):
            self._alive.discard(process)
            return True
        limit = self._options.worker_memory_gb * 1e9
        process.retired = 0 < limit < process.process.memory_bytes
        self._close_if_retired(process)
        return process.retired

    def _begin(self, index: int, tokenizer: ChatTokenizer) -> EpisodeProcess:
        """A worker that is being started."""
        log = self._logs and self._logs / f"{self._options.label or 'environment'}-worker-{index}.log"
        process = EpisodeProcess(f"environment worker {index}", log, self._wave)
        self._alive.add(process)
        process.starting = asyncio.create_task(self._start(process, tokenizer))
        process.starting.add_done_callback(succeeded)  # episodes raise its exception, if any wait for it
        return process

    async def _start(self, process: EpisodeProcess, tokenizer: ChatTokenizer) -> None:
        try:
            async with self._starts, asyncio.timeout(START_TIMEOUT_S):
                await process.start(self._options, tokenizer)
        except BaseException as error:
            self._alive.discard(process)
            process.process.kill()
            if not isinstance(error, TimeoutError):
                raise
            raise WorkerDied(f"{process.process.name} did not start within {START_TIMEOUT_S:g} s") from None

    def _close_if_retired(self, process: EpisodeProcess) -> None:
        """Close a retired worker after its last episode."""
        if process.retired and not process.assigned and process in self._alive:
            self._alive.discard(process)
            closing = asyncio.create_task(process.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)


def count_reward_errors(counter: RewardErrorCounter | None, errors: Sequence[tuple[str, str]]) -> None:
    """Count the reward functions that raised in a worker. Raises `ScoringError` beyond the counter's limit."""
    if not counter:
        return
    for reason, detail in errors:
        counter.count(ScoringError(reason, detail))
    if not errors:
        counter.succeeded()
