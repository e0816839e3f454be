"""The controller's end of a worker: starts its process, carries calls, and detects death and hangs.

Processes send heartbeats with a count of progress. A process with pending calls that is silent for too long, or makes
no progress, is hung: it is terminated and counts as dead. A death fails every pending call, with the end of its log.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from weakref import WeakSet

from slipstream.runtime.event_loop import call_throttled
from slipstream.runtime.pipe import Large, Pipe
from slipstream.runtime.process import Launch, Launcher, LocalProcess, Process
from slipstream.runtime.worker import WorkerDied, WorkerError, fail_unawaited, handle, last_lines, methods_of, succeeded
from slipstream.runtime.worker_main import HEARTBEAT, START

LOG_BYTES = 2**16
HEARTBEAT_S = 2.5  # between two heartbeats
HEARTBEAT_TIMEOUT_S = 15.0  # of silence after which a process with pending calls counts as hung

W = TypeVar("W")


class WorkerProcess:
    """The controller's end of a worker; `launcher` starts its process."""

    def __init__(
        self,
        name: str,
        log: Path | None = None,
        launcher: Launcher = LocalProcess,
        environment: Mapping[str, str] | None = None,
        progress_timeout: float | None = None,
        essential: bool = True,
    ) -> None:
        """`progress_timeout` is in seconds; without it the process is not watched for hangs. Calls of a method for
        which `excused` is true need no progress at present. Work that is not `essential` is no progress of the run."""
        self.name = name
        self._essential = essential
        self.excused: Callable[[str], bool] = lambda method: False
        self.heartbeats = 0
        self.finished = 0  # calls
        self._progress_timeout = progress_timeout
        self._progress: Any = None  # as of the last heartbeat
        self.memory_bytes = 0  # resident and not shared, with its children, as of the last heartbeat
        self._progressed = time.monotonic()
        self._pending: dict[int, tuple[str, float]] = {}  # method and start time of each pending call
        self._launch = Launch(name, log, environment or {})
        self._launcher = launcher
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count(START + 1)
        self._outgoing: list[tuple[int, str | None, bytes | Large]] = []
        self._writer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.dead: WorkerDied | None = None
        self.ended = asyncio.Event()  # set with `dead`
        self.process: Process | None = None
        self._watching: asyncio.Task[None] | None = None

    async def start(self, kind: type[W], reference: str, *arguments: Any) -> W:
        """Start the process and build the worker ("module:Class") in it. Returns its handle, typed as `kind`.

        Raises what the constructor raises as `WorkerError`.
        """
        self.process = self._launcher(self._launch)
        if self._essential:
            _started.add(self)
        self._connection = self.process.connection
        self._loop = asyncio.get_running_loop()
        writing = threading.Thread(target=self._write, name=f"to {self.name}", daemon=True)
        writing.start()
        threading.Thread(target=self._read, args=(writing,), name=f"from {self.name}", daemon=True).start()
        built = self._expect(START, "start")
        self._writer.put((reference, Pipe.dumps(arguments), methods_of(kind), HEARTBEAT_S))
        await built
        if self._progress_timeout is not None:
            self._watching = supervise(self._watch(self._progress_timeout), self.name, self.terminate)
        return handle(kind, self)

    def call(self, method: str, arguments: tuple[Any, ...], large: bool = False) -> asyncio.Future[Any]:
        """As `Transport.call`. The future raises `WorkerError` or `WorkerDied`."""
        return self.call_serialized(method, Large(Pipe.pieces, arguments) if large else Pipe.dumps(arguments))

    def call_serialized(self, method: str, arguments: bytes | Large) -> asyncio.Future[Any]:
        """As `call`, with arguments that `Pipe` has serialized, once for several processes."""
        if self.dead:
            future = self._loop.create_future()
            fail_unawaited(future, self.dead)
            return future
        number = next(self._numbers)
        self._send(number, method, arguments)
        return self._expect(number, method)

    def _expect(self, number: int, method: str) -> asyncio.Future[Any]:
        """The future of a call. If it is cancelled, the worker cancels the call."""
        future = self._calls[number] = self._loop.create_future()
        self._pending[number] = method, time.monotonic()

        def forget(_: object) -> None:
            del self._calls[number], self._pending[number]
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
        if self.process:
            self._die(f"{self.name} was stopped")
            await asyncio.to_thread(self.process.wait, grace)
            await asyncio.to_thread(self.process.terminate)

    def terminate(self, why: str) -> WorkerDied:
        """Begin to end the process. Returns what its callers get, which is the earlier reason if it is dead already."""
        self._die(why)
        if self.process:
            self._in_thread(self.process.terminate)
        assert self.dead
        return self.dead

    def kill(self) -> None:
        """Begin to end the process at once."""
        if self.process:
            self._die(f"{self.name} was killed")
            self._in_thread(self.process.kill)

    async def _watch(self, progress_timeout: float) -> None:
        """Terminate the process if it has pending calls and is silent, or makes no progress, for too long.

        Intervals are counted, so that time in which this process itself was stopped does not count.
        """
        silent = idle = 0
        while not self.dead:
            heartbeats, progress = self.heartbeats, self._progress
            await asyncio.sleep(HEARTBEAT_S)
            pending = list(self._pending.values())
            wanted = [call for call in pending if not self.excused(call[0])]
            silent = silent + 1 if pending and self.heartbeats == heartbeats else 0
            idle = idle + 1 if wanted and self._progress == progress else 0
            if silent * HEARTBEAT_S >= HEARTBEAT_TIMEOUT_S:
                self._hang(f"has been silent for {silent * HEARTBEAT_S:.3g} s, as if it were stopped,", pending)
            elif idle * HEARTBEAT_S >= progress_timeout:
                limit = f"runtime.progress_timeout = {progress_timeout:g}"
                self._hang(f"has made no progress for {idle * HEARTBEAT_S:.3g} s ({limit})", wanted)

    def _hang(self, found: str, pending: Sequence[tuple[str, float]]) -> None:
        """Terminate the process as hung; `pending` are the calls that wait for it."""
        calls = f"pending calls: {_describe_calls(pending)}"
        self.terminate(f"{self.name} {found} with {calls} ({self._where})\n{self.log_tail()}".rstrip())

    def _in_thread(self, end: Callable[[], None]) -> None:
        """End the process in a thread: waiting for it, or walking through /proc, would block the event loop."""
        threading.Thread(target=end, name=f"end of {self.name}").start()

    def _send(self, number: int, method: str | None, arguments: bytes | Large) -> None:
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing.append((number, method, arguments))

    def _flush(self) -> None:
        calls, self._outgoing = self._outgoing, []
        self._writer.put(calls)

    def _write(self) -> None:
        """Send in a thread: sending to a process that is busy would block the event loop."""
        with contextlib.suppress(OSError):
            while (message := self._writer.get()) is not None:
                if not isinstance(message, list):
                    self._connection.send(message)
                    continue
                while not self._writer.empty():  # by this thread alone
                    if (more := self._writer.get()) is None:
                        return
                    message += more
                for large, calls in itertools.groupby(message, lambda call: isinstance(call[2], Large)):
                    if large:
                        for call in calls:
                            self._send_large(*call)
                    else:
                        self._connection.send(list(calls))

    def _send_large(self, number: int, method: str, arguments: Large) -> None:
        """Send a call with the number of pieces of its arguments, then the pieces."""
        try:
            pieces = arguments.pieces()
        except Exception as error:  # these arguments can't be serialized
            self._in_loop(self._fail, number, error)
            return
        self._connection.send([(number, method, len(pieces))])
        for piece in pieces:
            self._connection.send_bytes(piece)

    def _read(self, writing: threading.Thread) -> None:
        """Receive in a thread: a message may be long, or its sender stopped in the middle of it."""
        try:
            while True:
                for answer in self._connection.recv():
                    self._in_loop(self._receive, *answer)
        except (EOFError, OSError) as error:
            if not self.dead:
                reason = str(error) if isinstance(error, EOFError) else ""
                why = f"{self.name} died ({self._where})\n{reason or self._killed()}{self.log_tail()}".rstrip()
                self._in_loop(self._die, why)
        except Exception as error:  # such as a class that can't be unpickled here
            why = f"{self.name} answered with what can't be read: {type(error).__name__}: {error}"
            self._in_loop(self.terminate, why)
        self._writer.put(None)
        writing.join()
        self._connection.close()

    def _in_loop(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function in the event loop, if it is not closed, after the earlier ones.

        `call_throttled` spreads hundreds of simultaneous completions over several iterations.
        """
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call_throttled, function, *arguments)

    def _receive(self, number: int, failed: bool, value: Any) -> None:
        if number == HEARTBEAT:
            progress, self.memory_bytes = value
            if progress != self._progress:
                self._progressed = time.monotonic()
            self.heartbeats, self._progress = self.heartbeats + 1, progress
            return
        future = self._calls.get(number)
        if future is None or future.done():
            return
        if failed:
            message, kind, details, user_facing = value
            where = f"{self.name} ({self._where})"
            future.set_exception(WorkerError(message, kind, details, user_facing, where))
        else:
            future.set_result(value)

    def _fail(self, number: int, error: Exception) -> None:
        future = self._calls.get(number)
        if future and not future.done():
            future.set_exception(error)

    @property
    def _where(self) -> str:
        return f"log: {self._launch.log}" if self._launch.log else "it has no log"

    def _killed(self) -> str:
        """A line for the message of a process that was killed and could print nothing."""
        if self.process and self.process.was_killed():
            return "It was killed by SIGKILL, as the system does when the host's memory is used up.\n"
        return ""

    def _die(self, why: str) -> None:
        if self.dead:
            return
        self.dead = WorkerDied(why)
        self.ended.set()
        if self._watching:
            self._watching.cancel()
        if self.process:
            self.process.disconnect()
        for future in list(self._calls.values()):
            if not future.done():
                fail_unawaited(future, self.dead)

    @property
    def pending_calls(self) -> str:
        """The pending calls, with the age of the oldest: "2 x generate for 12 s"; "" without one."""
        return _describe_calls(list(self._pending.values())) if self._pending else ""

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


def _describe_calls(pending: Sequence[tuple[str, float]]) -> str:
    """Pending calls by method, and the age of the oldest."""
    counts = Counter(method for method, _ in pending)
    what = ", ".join(f"{count} x {method}" if count > 1 else method for method, count in counts.items())
    return f"{what} for {time.monotonic() - min(since for _, since in pending):.3g} s"


def supervise(watch: Coroutine[Any, Any, None], name: str, terminate: Callable[[str], Any]) -> asyncio.Task[None]:
    """Run a watch in a task. If the watch itself raises, terminate what it watches: a hang would go unnoticed."""

    def end(task: asyncio.Task[None]) -> None:
        if not succeeded(task) and not task.cancelled():
            error = task.exception()
            terminate(f"{name} can't be watched any more: {type(error).__name__}: {error}")

    watching = asyncio.create_task(watch)
    watching.add_done_callback(end)
    return watching
