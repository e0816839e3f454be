"""Several engines as one generator: each in its own process, or a server of the user."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from slipstream.config.schema import Config
from slipstream.generators.activity import Activity, ActivityLog
from slipstream.generators.base import ContextFull, EngineWorker, GenerationError
from slipstream.generators.pausable_clock import Clock, EngineSlots
from slipstream.generators.vllm.servers import Server
from slipstream.rollout import Completion, Sampling, int32_array, set_times
from slipstream.runtime.closing import close_at_once
from slipstream.runtime.worker import WorkerDied, WorkerError, handle, succeeded
from slipstream.runtime.worker_process import WorkerProcess

SESSION_SLACK = 8  # pending requests by which a session's engine may exceed the least loaded one
STATS_TIMEOUT_S = 300.0  # a call may wait for a step, which on a CPU may be a pass over all prompts
STOP_TIMEOUT_S = 20.0  # in which an engine ends, with the processes that it has started
REQUEST_ERRORS = {kind.__name__: kind for kind in (GenerationError, ContextFull)}

Result = TypeVar("Result")
Start = Callable[[], Coroutine[Any, Any, None]]
Begin = Callable[[Config], tuple[WorkerProcess, Start]]
BeginNumbered = Callable[[int, Config], tuple["EngineReplica", Start]]


class EngineReplica:
    """One engine of the pool as a `Generator`: a process or a server.

    `ranks` of its processes hold weights. `begin` starts a replacement. `max_num_seqs` sequences are decoded at once
    (0: unknown). Requests are sent to an engine once it is `serving`. Completions of a quarantined version are withheld
    until `release`.
    """

    def __init__(
        self,
        process: WorkerProcess | Server,
        ranks: int = 1,
        begin: Begin | None = None,
        max_num_seqs: int = 0,
        started: bool = True,
    ) -> None:
        self.started, self.serving = started, asyncio.Event()
        if started:
            self.serving.set()
        self.leaving = False  # gets no requests any more
        self.resumed = asyncio.Event()  # the pool's, which all its engines share
        self.resumed.set()
        self.now: Callable[[], float] = time.perf_counter  # the clock of the pool
        self.activity = ActivityLog()
        self._calls_with_limit = 0
        self._use(process)
        self.ranks = ranks
        self.slots = EngineSlots(max_num_seqs)
        self._begin = begin
        self._previous_totals: dict[str, float] = {}  # of the processes that this one replaces
        self.pending_requests = 0
        self.version = 0
        self.quarantined: int | None = None
        self._released = asyncio.Event()
        self.totals: dict[str, float] = {"tokens": 0, "busy_s": 0.0}

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, clock: Clock | None = None) -> Completion:
        """As `Generator.generate`. The episode's `clock` is stopped while the request is queued for a slot."""
        if not self.pending_requests:
            self.activity.requests.begin(self.now())
        self.pending_requests += 1
        process, began = self.process, self.now()
        try:
            call = self.worker.generate(int32_array(prompt_ids), sampling)
            with self.slots.request(clock or Clock()):
                completion = await call
            while any(span.version == self.quarantined for span in completion.spans):
                await self._released.wait()
                if process.dead:
                    raise process.dead
        except WorkerError as error:
            raise REQUEST_ERRORS[error.kind](str(error)) if error.kind in REQUEST_ERRORS else error from None
        finally:
            self.pending_requests -= 1
            if not self.pending_requests:
                self.activity.requests.end(self.now())
        return set_times(completion, self.track, began, self.now())

    @property
    def track(self) -> str:
        """The engine's name in `events.jsonl`, which its successors have, too."""
        return self.activity.track

    def _use(self, process: WorkerProcess | Server) -> None:
        """Make this process or server the engine.

        Its progress timeout excludes requests while the pool is paused, and other calls while one of them has its own
        limit.
        """
        self.process = process
        self.worker: EngineWorker = process if isinstance(process, Server) else handle(EngineWorker, process)
        if isinstance(process, WorkerProcess):
            process.excused = lambda method: (
                not self.resumed.is_set() if method == EngineWorker.generate.__name__ else self._calls_with_limit > 0
            )

    async def probe(self, seconds: float, doing: str) -> None:
        """Terminate the engine if it neither answers a call nor sends a heartbeat within `seconds`."""
        before, call = self.process.heartbeats, asyncio.ensure_future(self.worker.longest_in_flight())
        call.add_done_callback(succeeded)  # retrieves the error: any response will do
        answered, _ = await asyncio.wait((call,), timeout=seconds)
        call.cancel()
        if not answered and before is not None and before == self.process.heartbeats:
            self.terminate(f"{self.process.name} was silent {doing}")

    async def wait_for(self, call: Awaitable[Result], doing: str, limit: float = math.inf) -> Result:
        """Result of `call`. After `limit` seconds, terminates the engine and raises `WorkerDied`."""
        future, limited = asyncio.ensure_future(call), limit < math.inf
        future.add_done_callback(succeeded)  # retrieves the error; it is raised below if still relevant
        self._calls_with_limit += limited
        try:
            if not (await asyncio.wait((future,), timeout=limit if limited else None))[0]:
                raise self.terminate(f"{self.process.name} did not {doing} within {limit:.3g} s")
            return await future
        finally:
            self._calls_with_limit -= limited
            future.cancel()

    @property
    def alive(self) -> bool:
        """Whether the engine gets requests, unless its version is too old."""
        return self.serving.is_set() and not (self.process.dead or self.leaving)

    @property
    def replaceable(self) -> bool:
        """Whether the run started the engine, and so can start another in its place."""
        return self._begin is not None

    def create_successor(self, config: Config) -> tuple[EngineReplica, Start]:
        """A replica to take the place of this dead one, and the coroutine function that starts it.

        Call it only if `replaceable`. The caller adds the replica to the pool.
        """
        assert self._begin is not None
        process, start = self._begin(config)
        new = EngineReplica(process, self.ranks, self._begin, self.slots.count, started=False)
        new._previous_totals, new.totals = dict(self.totals), dict(self.totals)
        return new, start

    def quarantine(self, version: int) -> None:
        """Withhold completions of this version until its checksums are compared with the published ones."""
        self.quarantined = version
        self._released.clear()

    def release(self) -> None:
        """Return the withheld completions."""
        self.quarantined = None
        self._released.set()

    def terminate(self, why: str) -> WorkerDied:
        """End the engine for good. Pending calls and withheld requests raise the returned error."""
        died = self.process.terminate(why)
        self._released.set()
        return died

    async def stats(self) -> dict[str, float]:
        """Tokens generated and seconds busy since the start of the run."""
        return self.count(await self.wait_for(self.worker.stats(), "return its statistics", STATS_TIMEOUT_S))

    def count(self, stats: dict[str, float]) -> dict[str, float]:
        """Set and return the totals over all processes of this engine. `stats` are those of the current process."""
        self.totals = {name: value + self._previous_totals.get(name, 0.0) for name, value in stats.items()}
        return self.totals

    async def replace(self, config: Config) -> Start:
        """End this engine. Returns the function that starts its replacement, once all on the same GPU have ended.

        Call it while the pool is paused. Pending requests fail with `WorkerDied`. The old process has
        `STOP_TIMEOUT_S` to end by itself: a killed one would leave the memory of its workers allocated.
        """
        assert self._begin is not None
        old = self.process
        with contextlib.suppress(WorkerDied):  # the totals of the last call remain
            await self.stats()
        self._previous_totals = dict(self.totals)
        process, start = self._begin(config)  # before the old one ends, so that the pool has an engine alive
        self._use(process)
        await old.stop(STOP_TIMEOUT_S)
        return start

    async def close(self) -> None:
        await self.process.stop()


class Session:
    """The pool for one episode, whose requests stay on one engine: it has the keys and values of earlier turns.

    The session moves if its engine has more than `SESSION_SLACK` pending requests above the least loaded one, and more
    than a quarter above. If its engine dies, another one samples the completion again.
    """

    def __init__(self, pool: GeneratorPool) -> None:
        self.clock = Clock(pool.clock)  # the episode's
        self._pool = pool
        self._engine: EngineReplica | None = None

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """As `Generator.generate`."""
        while True:
            while not self._pool.resumed.is_set():  # the pool may pause again before this task runs
                await self._pool.resumed.wait()
            self._engine = self._pool.choose(self._engine)
            if not self._engine:
                with self.clock.stopped():
                    await self._pool.wait_alive()
                continue
            try:
                return await self._engine.generate(prompt_ids, sampling, self.clock)
            except WorkerDied:
                if self._pool.dead:
                    raise


class GeneratorPool:
    """Several engines as one `Generator`. A request goes to the alive engine with the fewest pending requests.

    The requests of a `session` go to the same engine. While the pool is paused, requests wait and `clock` is stopped.
    If the pool is `supervised`, requests also wait while no engine is alive, until one is or `fail` is called. `begin`
    makes another engine by its number.
    """

    def __init__(self, generators: Sequence[EngineReplica], begin: BeginNumbered | None = None) -> None:
        self.generators = list(generators)
        self.begin = begin
        self.supervised = False
        self._failure: WorkerDied | None = None
        self._changed = asyncio.Event()  # cleared by tasks that wait for an engine
        self._offsets: dict[str, float] = {}  # added to totals, which do not change when engines are added or removed
        self.oldest = 0  # version: engines with an older one get no requests
        self.on_serve: Callable[[], object] = lambda: None  # called when an engine serves a new version
        self.clock = Clock()
        self.resumed = asyncio.Event()
        self.resumed.set()
        self.now: Callable[[], float] = time.perf_counter
        for number, generator in enumerate(generators):
            self._adopt(generator, ActivityLog(f"engine {number}", self.now()))

    def use_clock(self, now: Callable[[], float]) -> None:
        """Let completions and activities have times of this clock."""
        self.now = now
        for generator in self.generators:
            self._adopt(generator, ActivityLog(generator.track, now()))

    def take_activity(self) -> list[Activity]:
        """What each engine did since the last call."""
        return [g.activity.take(self.now(), g.totals) for g in self.generators]

    def _adopt(self, generator: EngineReplica, activity: ActivityLog) -> None:
        generator.resumed, generator.now, generator.activity = self.resumed, self.now, activity

    def pause(self) -> None:
        """Let new requests wait until `resume`, while engines sleep or restart."""
        self.resumed.clear()
        self.clock.stop()
        for generator in self.generators:
            generator.activity.asleep.begin(self.now())

    def resume(self) -> None:
        """Send the waiting requests to the engines."""
        self.clock.start()
        self.resumed.set()
        for generator in self.generators:
            generator.activity.asleep.end(self.now())

    @property
    def max_num_seqs(self) -> int:
        """Sequences that all engines decode at once; 0 if that is unknown of one of them."""
        counts = [g.slots.count for g in self.generators]
        return sum(counts) if all(counts) else 0

    @property
    def alive(self) -> list[EngineReplica]:
        """Engines that get requests."""
        return [g for g in self.generators if g.alive and g.version >= self.oldest]

    @property
    def running(self) -> list[EngineReplica]:
        """Engines whose processes can be called, also if they get no requests yet, or none any more."""
        return [g for g in self.generators if g.started and not g.process.dead]

    @property
    def version(self) -> int:
        return min(g.version for g in self.alive or self.generators)

    @property
    def dead(self) -> WorkerDied | None:
        """Why the first engine died, if none is alive; in a supervised pool only if none will be."""
        if self._failure or self.supervised:
            return self._failure
        return None if self.alive else self.generators[0].process.dead

    def fail(self, died: WorkerDied) -> None:
        """Raise this error for all requests that wait for an engine."""
        self._failure = died
        self._changed.set()

    def serve(self, generator: EngineReplica) -> None:
        """Mark an engine of the pool as serving: from now on it gets requests, unless its version is too old."""
        generator.serving.set()
        self._changed.set()
        self.on_serve()

    async def wait_alive(self) -> None:
        """Wait until an engine is alive. Raises why none will be."""
        while not self.alive:
            if self.dead:
                raise self.dead
            self._changed.clear()
            await self._changed.wait()

    def change(self, add: Sequence[EngineReplica] = (), remove: Sequence[EngineReplica] = ()) -> None:
        """Add and remove engines. A successor takes the position of its predecessor."""
        before, logs = self.totals, [g.activity for g in remove]
        at = self.generators.index(remove[0]) if remove else len(self.generators)
        self.generators[at:at] = add
        self.generators[:] = [g for g in self.generators if g not in remove]
        for number, generator in enumerate(add):
            self._adopt(generator, logs[number] if logs else ActivityLog(f"engine {at + number}", self.now()))
        for name, value in self.totals.items():
            self._offsets[name] = self._offsets.get(name, 0.0) + before[name] - value

    def session(self) -> Session:
        """A `Session` for the requests of one episode."""
        return Session(self)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Sample a completion without a session."""
        return await self.session().generate(prompt_ids, sampling)

    def choose(self, current: EngineReplica | None) -> EngineReplica | None:
        """The engine for the next request of a session that uses `current`; None if no engine is alive."""
        alive = self.alive
        if not alive:
            return None
        least = min(alive, key=lambda g: g.pending_requests)
        # Random differences of load grow with the load.
        limit = least.pending_requests + max(SESSION_SLACK, least.pending_requests // 4)
        return current if current and current in alive and current.pending_requests <= limit else least

    async def call_all(self, call: Callable[[EngineWorker], Awaitable[Result]], doing: str) -> list[Result]:
        """Result of `call` on each running engine, without engines that die meanwhile.

        Raises the error of an engine, or `WorkerDied` if none is left.
        """
        calls = (g.wait_for(call(g.worker), doing) for g in self.running)
        results = await asyncio.gather(*calls, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, WorkerDied):
                raise result
        if self.dead:
            raise self.dead
        return [result for result in results if not isinstance(result, BaseException)]

    async def stats(self) -> dict[str, float]:
        """Ask all engines, and return `totals` as of now. Activity that `take_activity` has not taken yet is lost."""
        await asyncio.gather(*(g.stats() for g in self.running), return_exceptions=True)
        self.take_activity()
        return self.totals

    @property
    def totals(self) -> dict[str, float]:
        """Tokens as of the last publish or call of `stats`, and busy seconds as of the last `take_activity`."""
        busy = sum(g.activity.busy_s for g in self.generators) / max(1, len(self.generators))
        found = {"tokens": sum(g.totals["tokens"] for g in self.generators) + 0.0, "busy_s": busy}
        return {name: value + self._offsets.get(name, 0.0) for name, value in found.items()}

    async def longest_in_flight(self) -> int:
        """Tokens of the longest sequence in flight."""
        return max(await self.call_all(lambda engine: engine.longest_in_flight(), "count its tokens"), default=0)

    async def close(self) -> None:
        await close_at_once(*(g.close for g in self.generators))
