"""The controller's end of a worker: starts its process, carries calls, and detects death and hangs.

Messages are lists of calls and lists of answers, pickled, which is safe because both ends are processes of one run.
Large arguments follow their message in pieces, of which the call has the number. Weights never pass here.

Processes send heartbeats with a count of progress. A process with pending calls that is silent for too long, or makes
no progress, is hung: it is terminated and counts as dead. A death fails every pending call, with the end of its log.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar
from weakref import WeakSet

from slipstream.config.schema import RuntimeConfig
from slipstream.runtime.event_loop import call_throttled, yield_to_loop
from slipstream.runtime.messages import MessageStream
from slipstream.runtime.process import Launch, Launcher, LocalProcess, Process
from slipstream.runtime.worker import WorkerDied, WorkerError, fail_unawaited, handle, last_lines, methods_of, succeeded
from slipstream.runtime.worker_main import HEARTBEAT, PRELOAD, START

LOG_BYTES = 2**16
HEARTBEAT_S = 2.5  # between two heartbeats
HEARTBEAT_TIMEOUT_S = 15.0  # of silence after which a process with pending calls counts as hung
SERIALIZER = ThreadPoolExecutor(2, "serializer")  # of arguments of many megabytes
# These threads start processes and threads: the event loop would wait until the system has let them begin.
PROCESS_STARTER = ThreadPoolExecutor(1, "starter of processes")
THREAD_STARTER = ThreadPoolExecutor(1, "starter of threads")

Large = Future[list[bytes]]  # serialized arguments, in pieces, for one or several processes

W = TypeVar("W")


class PendingCall(NamedTuple):
    """A call without an answer yet, and the time at which it began."""

    method: str
    since: float
    answer: asyncio.Future[Any]


class WorkerProcess:
    """The controller's end of a worker; `launcher` starts its process."""

    def __init__(
        self,
        name: str,
        log: Path | None = None,
        launcher: Launcher = LocalProcess,
        environment: Mapping[str, str] | None = None,
        limits: RuntimeConfig | None = None,
        essential: bool = True,
    ) -> None:
        """Without `limits` the process is not watched for hangs. Calls of a method for which `excused` is true need no
        progress at present. Work that is not `essential` is no progress of the run."""
        self.name = name
        self._essential = essential
        self.excused: Callable[[str], bool] = lambda method: False
        self.heartbeats = 0
        self.finished = 0  # calls
        self._limits = limits
        self._progress: Any = None  # as of the last heartbeat
        self.memory_bytes = 0  # resident and not shared, with its children, as of the last heartbeat
        self._progressed = time.monotonic()
        self._launch = Launch(name, log, environment or {})
        self._launcher = launcher
        self._calls: dict[int, PendingCall] = {}
        self._numbers = itertools.count(START)
        self._outgoing: list[tuple[int, str | None, bytes | Large]] = []
        self.dead: WorkerDied | None = None
        self.dying = False  # its connection ended; `dead` is set once the exit status is known
        self.ended = asyncio.Event()  # set with `dead`
        self.process: Process | None = None
        self._watching: asyncio.Task[None] | None = None

    async def start(self, kind: type[W], reference: str, *arguments: Any) -> W:
        """Start a process, unless `launch` did, and build the worker "module:Class" (`reference`) in it.

        Returns its handle, typed as `kind`. Raises `WorkerError` if the constructor raises, and `WorkerDied` if the
        process ends first.
        """
        if not self.process:
            await self.launch(reference)
        if self._limits:
            self._watching = supervise(self._watch(self._limits), self.name, self.terminate)
        await self.call("start", (reference, pickle.dumps(arguments), methods_of(kind), HEARTBEAT_S))
        return handle(kind, self)

    async def launch(self, reference: str) -> None:
        """Start a process. It runs `worker_main.preload` of the reference, and then waits for `start`."""
        self._loop = asyncio.get_running_loop()
        self._launch = replace(self._launch, environment={**self._launch.environment, PRELOAD: reference})
        self.process = await self._start_process()
        if self._essential:
            _started.add(self)
        self._stream = MessageStream(self.process.connection, self._receive, self._reject, self._lose)

    async def _start_process(self) -> Process:
        """Start the process in a thread. It is killed if this is cancelled or the worker ends meanwhile."""
        starting = PROCESS_STARTER.submit(self._launcher, self._launch)
        try:
            process = await asyncio.shield(asyncio.wrap_future(starting))
        except asyncio.CancelledError:
            if not starting.cancel():  # it has begun, and may end after the event loop
                starting.add_done_callback(self._kill_started)
            raise
        if self.dead:
            self._kill_started(starting)
            raise self.dead
        return process

    def _kill_started(self, starting: Future[Process]) -> None:
        if not starting.exception():
            threading.Thread(target=starting.result().kill, name=f"end of {self.name}").start()

    def call(self, method: str, arguments: tuple[Any, ...], large: bool = False) -> asyncio.Future[Any]:
        """As `Transport.call`. The future raises `WorkerError` or `WorkerDied`."""
        return self.call_serialized(method, serialize(arguments, large))

    def call_serialized(self, method: str, arguments: bytes | Large) -> asyncio.Future[Any]:
        """As `call`, with arguments that are serialized once for several processes."""
        future = self._loop.create_future()
        if self.dead:
            fail_unawaited(future, self.dead)
            return future
        number = next(self._numbers)
        self._calls[number] = PendingCall(method, time.monotonic(), future)
        self._send(number, method, arguments)

        def forget(_: object) -> None:
            del self._calls[number]
            self.finished, self._progressed = self.finished + 1, time.monotonic()
            if future.cancelled() and not self.dead:
                self._send(number, None, b"")

        future.add_done_callback(forget)
        return future

    async def raise_death(self) -> NoReturn:
        """Wait until the process is dead, and raise its `WorkerDied`."""
        await self.ended.wait()
        assert self.dead
        raise self.dead

    async def stop(self, grace: float = 10.0) -> None:
        """Let the process end by itself, or terminate it after `grace` seconds."""
        self._die(f"{self.name} was stopped")
        if self.process:
            await asyncio.to_thread(self.process.terminate, grace)

    def terminate(self, why: str) -> WorkerDied:
        """Begin to end the process. Returns what its callers get, which is the earlier reason if it is dead already."""
        self._die(why)
        if self.process:
            self._in_thread(self.process.terminate)
        assert self.dead
        return self.dead

    def kill(self) -> None:
        """Begin to end the process at once."""
        self._die(f"{self.name} was killed")
        if self.process:
            self._in_thread(self.process.kill)

    async def _watch(self, limits: RuntimeConfig) -> None:
        """Terminate the process if its start takes too long, or if it has pending calls and is silent, or makes no
        progress, for too long. A start sends no heartbeats: imports and compilation may hold the interpreter.

        Intervals are counted, so that time in which this process itself was stopped does not count.
        """
        starting = silent = idle = 0
        while not self.dead:
            heartbeats, progress = self.heartbeats, self._progress
            await asyncio.sleep(HEARTBEAT_S)
            if self.starting:
                starting += 1
                if starting * HEARTBEAT_S > limits.start_timeout:  # not at the limit, which Ray reports with a reason
                    limit = f"runtime.start_timeout = {limits.start_timeout:g} s"
                    found = f"has not started within {limit}; raise that if it loads or compiles for longer"
                    self._terminate_as_hung(found)
                continue
            pending = self._calls.values()
            wanted = [call for call in pending if not self.excused(call.method)]
            silent = silent + 1 if pending and self.heartbeats == heartbeats else 0
            idle = idle + 1 if wanted and self._progress == progress else 0
            if silent * HEARTBEAT_S >= HEARTBEAT_TIMEOUT_S:
                calls = f"as if it were stopped, with pending calls: {_describe_calls(pending)}"
                self._terminate_as_hung(f"has been silent for {silent * HEARTBEAT_S:.3g} s, {calls}")
            elif idle * HEARTBEAT_S >= limits.progress_timeout:
                limit = f"runtime.progress_timeout = {limits.progress_timeout:g}"
                calls = f"with pending calls: {_describe_calls(wanted)}"
                self._terminate_as_hung(f"has made no progress for {idle * HEARTBEAT_S:.3g} s ({limit}) {calls}")

    def _terminate_as_hung(self, symptom: str) -> None:
        """Terminate the process. `symptom` continues its name in the message: "has been silent for 45 s"."""
        self.terminate(f"{self.name} {symptom} ({self._where})\n{self.log_tail()}".rstrip())

    def _in_thread(self, end: Callable[[], None], *, daemon: bool = False) -> None:
        """End the process in a thread: waiting for it, or walking through /proc, would block the event loop.

        The starter's thread does the work if the system refuses another thread.
        """
        thread = threading.Thread(target=end, name=f"end of {self.name}", daemon=daemon)

        def begin() -> None:
            try:
                thread.start()
            except RuntimeError:
                thread.run()

        THREAD_STARTER.submit(begin)

    def _send(self, number: int, method: str | None, arguments: bytes | Large) -> None:
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing.append((number, method, arguments))

    def _flush(self) -> None:
        """Send the queued calls as one message, once their large arguments are serialized."""
        for _, _, arguments in self._outgoing:
            if not isinstance(arguments, bytes) and not arguments.done():
                arguments.add_done_callback(lambda _: self._in_loop(self._flush))
                return
        message: list[tuple[int, str | None, bytes | int]] = []
        pieces: list[bytes] = []
        for number, method, arguments in self._outgoing:
            if isinstance(arguments, bytes):
                message.append((number, method, arguments))
            elif error := arguments.exception():
                self._answer(number, True, error)
            else:
                message.append((number, method, len(arguments.result())))
                pieces += arguments.result()
        self._outgoing = []
        self._stream.send([pickle.dumps(message), *pieces])

    def _receive(self, answers: Sequence[tuple[int, bool, Any]]) -> None:
        """Take a message of the worker: heartbeats now, and only a few answers in one iteration of the event loop."""
        for number, failed, value in answers:
            if number != HEARTBEAT:
                call_throttled(self._answer, number, failed, value)
                continue
            progress, self.memory_bytes = value
            if progress != self._progress:
                self._progressed = time.monotonic()
            self.heartbeats, self._progress = self.heartbeats + 1, progress

    def _reject(self, error: Exception) -> None:
        why = f"{self.name} answered with what can't be read: {type(error).__name__}: {error}"
        call_throttled(self.terminate, why)

    def _lose(self) -> None:
        """Called when the connection ends. A thread waits for the exit status, then the worker is marked as dead."""

        def describe(process: Process) -> None:
            why = f"{self.name} died ({self._where})\n{process.describe_end()}{self.log_tail()}".rstrip()
            self._in_loop(call_throttled, self._die, why)

        if not self.dead and self.process:
            self.dying = True
            self._in_thread(partial(describe, self.process), daemon=True)

    def _in_loop(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function in the event loop, if it is not closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    def _answer(self, number: int, failed: bool, value: Any) -> None:
        call = self._calls.get(number)
        if call is None or (future := call.answer).done():
            return
        if not failed:
            future.set_result(value)
        elif isinstance(value, Exception):
            future.set_exception(value)
        else:
            message, kind, details, user_facing = value
            where = f"{self.name} ({self._where})"
            future.set_exception(WorkerError(message, kind, details, user_facing, where))

    @property
    def _where(self) -> str:
        return f"log: {self._launch.log}" if self._launch.log else "it has no log"

    def _die(self, why: str) -> None:
        if self.dead:
            return
        self.dead = WorkerDied(why)
        self.ended.set()
        if self._watching:
            self._watching.cancel()
        if self.process:
            self.process.disconnect()
        for call in list(self._calls.values()):
            if not call.answer.done():
                fail_unawaited(call.answer, self.dead)

    @property
    def pending_calls(self) -> str:
        """As `_describe_calls`."""
        return _describe_calls(self._calls.values())

    @property
    def starting(self) -> bool:
        """Whether the worker is being built."""
        return START in self._calls

    @property
    def activity(self) -> tuple[int, Any]:
        """Two values of which at least one changes with any progress."""
        return self.finished, self._progress

    @property
    def seconds_since_progress(self) -> float:
        """Seconds since a call ended or a heartbeat reported progress."""
        return time.monotonic() - self._progressed

    def log_tail(self) -> str:
        """The end of the log."""
        with contextlib.suppress(OSError), (self._launch.log or Path(os.devnull)).open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_BYTES))
            return last_lines(log.read().decode(errors="replace"))
        return ""


_started: WeakSet[WorkerProcess] = WeakSet()


def alive_workers() -> list[WorkerProcess]:
    """All essential workers that this process has started and that are alive, by name."""
    return sorted((worker for worker in list(_started) if not worker.dead), key=lambda worker: worker.name)


def _describe_calls(pending: Collection[PendingCall]) -> str:
    """Pending calls by method, and the age of the oldest: "2 x generate for 12 s"; "" without one."""
    if not pending:
        return ""
    counts = Counter(call.method for call in pending)
    what = ", ".join(f"{count} x {method}" if count > 1 else method for method, count in counts.items())
    return f"{what} for {time.monotonic() - min(call.since for call in pending):.3g} s"


def supervise(watch: Coroutine[Any, Any, None], name: str, terminate: Callable[[str], Any]) -> asyncio.Task[None]:
    """Run a watch in a task. If the watch itself raises, terminate what it watches: a hang would go unnoticed."""

    def end(task: asyncio.Task[None]) -> None:
        if not succeeded(task) and not task.cancelled():
            error = task.exception()
            terminate(f"{name} can't be watched any more: {type(error).__name__}: {error}")

    watching = asyncio.create_task(watch)
    watching.add_done_callback(end)
    return watching


def serialize(arguments: tuple[Any, ...], large: bool) -> bytes | Large:
    """The arguments as a pickle. `large` ones are pickled in a thread, and must not change meanwhile."""
    return SERIALIZER.submit(pickle_in_pieces, arguments) if large else pickle.dumps(arguments)


def pickle_in_pieces(value: Any) -> list[bytes]:
    """A pickle in pieces, each of which holds the GIL for less than a millisecond."""
    written = _Pieces()
    pickle.Pickler(written).dump(value)
    return written.pieces


class _Pieces:
    """A file for `pickle.Pickler`, which writes 64 KiB at a time; other threads run between two writes."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def write(self, data: Any) -> None:
        yield_to_loop()
        self.pieces.append(bytes(data))
