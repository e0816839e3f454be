"""An object in a process of its own, called with `await`.

The two ends talk over a private socket pair with plain data (token ids, numbers, paths; weights never pass here).
Calls made in one turn of the event loop travel in one message, in order. A process whose other end is gone ends; a
process that dies fails every call that waits for it, with the end of its log.

A process sends heartbeats with a count of its progress. One that owes an answer and is silent for too long, or makes no
progress, is ended and counts as dead.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import dis
import gc
import itertools
import logging
import multiprocessing.util
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from slipstream.heap import set_heap_aside
from slipstream.things import build, load_thing

Reply = Callable[[Any], None]
LOG_LINES, LOG_BYTES = 15, 2**16
OURS, SAID = "slipstream.", (ValueError, RuntimeError, OSError)  # where, and by what, failures are put into words
ORPHANED = 30.0  # seconds that a process without a controller has to end by itself
HEARTBEAT_S = 5.0  # between two heartbeats of a process
HEARTBEAT_TIMEOUT_S = 45.0  # of silence after which a process that owes an answer counts as hung: it was stopped
HEARTBEAT = -1  # in the place of a call's number
SHOWS = 0.2  # seconds after which the end of a process is known whose connection has ended
ENDS = 5.0  # seconds that a process is given to end when it is of no more use
# What `torchrun` tells a process of its place among others; a child process has one only if it is told so.
TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
            "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID")  # fmt: skip
READY = "ready"  # answered for every service once it is built


class ActorDied(RuntimeError):
    """The process or server behind an actor is gone, or of no more use, while it was needed."""


class ActorError(RuntimeError):
    """A call raised in the actor's process; the message is that of the exception, `details` its traceback.

    Where nobody has put the failure into words for users, a note says whose it is and shows the end of the traceback.
    """

    def __init__(self, message: str, kind: str, details: str, worded: bool = True, where: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.details = details
        if not worded:
            self.add_note(f"{where} failed:\n{_last_lines(details)}")


class Service(Protocol):
    """What runs inside the process. `handle` answers a call through `reply`, at once or from a later `tick`.

    It may have a `progress`: a count, of tokens or micro-batches say, that grows during calls and ticks that take long.
    """

    @property
    def busy(self) -> bool:
        """Whether `tick` has work to do without a new call."""
        ...

    def handle(self, method: str, arguments: tuple[Any, ...], reply: Reply) -> None: ...
    def tick(self) -> None: ...
    def close(self) -> None: ...


class Line(Connection):
    """What the two ends talk over, within a host: messages, and the arguments in them, are pickled."""

    host = ""  # the name of another, where the other end is on one

    @staticmethod
    def dumps(message: Any) -> bytes:
        return pickle.dumps(message)

    @staticmethod
    def loads(data: bytes) -> Any:
        return pickle.loads(data)

    @staticmethod
    def pieces(message: Any) -> list[bytes]:
        """What `dumps` returns, in pieces of which each holds the interpreter for less than a millisecond."""
        written = _Pieces()
        pickle.Pickler(written).dump(message)
        return written.pieces

    def recv_raw(self) -> bytes:
        """The next message as it was sent."""
        return self.recv_bytes()


class _Pieces:
    """A file for `pickle.Pickler`, which writes whenever it has 64 KiB; other threads run between two pieces."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def write(self, data: Any) -> None:
        self.pieces.append(bytes(data))


class Large:
    """Arguments of a call that are serialized once for many actors, in the first thread that sends them.

    Nothing may change them meanwhile.
    """

    def __init__(self, pieces: Callable[[Any], list[bytes]], arguments: tuple[Any, ...]) -> None:
        self._serialize, self._arguments = pieces, arguments
        self._lock = threading.Lock()
        self._pieces: list[bytes] | None = None

    def pieces(self) -> list[bytes]:
        """Raises what the serialization raises."""
        with self._lock:
            if self._pieces is None:
                self._pieces = self._serialize(self._arguments)
            return self._pieces


class Actor:
    """The controller's end of a process, which it starts, or of a `guest`: one that has called here by itself."""

    def __init__(
        self,
        name: str,
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
        guest: Line | None = None,
        progress_timeout: float | None = None,
    ) -> None:
        """Seconds without progress on what it owes, after which the process counts as hung, are `progress_timeout`;
        without that it is not watched. What `excused` says of a method needs no progress now."""
        self.name = name
        self.excused: Callable[[str], bool] = lambda method: False
        self.heartbeats = 0
        self._progress_timeout = progress_timeout
        self._progress: Any = None  # as of the last heartbeat
        self._owed: dict[int, tuple[str, float]] = {}  # the method of each call, and since when it waits
        self._guest = guest
        self.dumps, self.pieces = (guest or Line).dumps, (guest or Line).pieces
        self._environment = environment or {}
        self._log = log
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._outgoing: list[tuple[int, str, bytes | Large]] = []
        self._writer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.dead: ActorDied | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._gone = False  # with all that it has started: what has its number now is another

    async def start(self, service: str, *arguments: Any) -> None:
        """Start the process, build the service ("module:function") in it, and wait until it is there."""
        self._connection = self._guest or Line(self._launch().detach())
        self._loop = asyncio.get_running_loop()
        self._socket = socket.socket(fileno=os.dup(self._connection.fileno()))  # wakes both threads when it is shut
        writing = threading.Thread(target=self._write, name=f"to {self.name}", daemon=True)
        writing.start()
        threading.Thread(target=self._read, args=(writing,), name=f"from {self.name}", daemon=True).start()
        if self._guest:
            self._writer.put(dict(self._environment))
        self._writer.put((service, self.dumps(arguments), HEARTBEAT_S))
        await self.call(READY)
        if self._progress_timeout is not None:
            self._watching = keep_watch(self._watch(self._progress_timeout), self.name, self.give_up)

    def _launch(self) -> socket.socket:
        """Start the process. Returns this end of a connection with it."""
        ours, theirs = socket.socketpair()
        if self._log:
            self._log.parent.mkdir(parents=True, exist_ok=True)
        with (self._log or Path(os.devnull)).open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "slipstream.actor", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the controller, which stops the others in order
                env=self._child_environment(),
            )
        theirs.close()
        return ours

    def _child_environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if name not in TORCHRUN}
        return inherited | {**self._environment, "PYTHONPATH": os.pathsep.join(p or "." for p in sys.path)}

    def call(self, method: str, *arguments: Any) -> asyncio.Future[Any]:
        """Call a method of the service. Raises what it raised as `ActorError`, or `ActorDied`.

        Calls reach the process in the order in which they are made, whether they are awaited or not.
        """
        return self.call_dumped(method, self.dumps(arguments))  # here, where what can't be is the caller's error

    def call_large(self, method: str, *arguments: Any) -> asyncio.Future[Any]:
        """As `call`, with arguments of many megabytes, which are serialized off the event loop."""
        return self.call_dumped(method, Large(self.pieces, arguments))

    def call_dumped(self, method: str, arguments: bytes | Large) -> asyncio.Future[Any]:
        """As `call`, with a tuple of arguments that `dumps` was given already, once for many actors."""
        future = self._loop.create_future()
        if self.dead:
            future.set_exception(self.dead)
            return future
        number = next(self._numbers)
        self._send(number, method, arguments)
        self._calls[number] = future
        self._owed[number] = method, time.monotonic()
        future.add_done_callback(lambda _: (self._calls.pop(number, None), self._owed.pop(number, None)))
        return future

    def post(self, method: str, *arguments: Any) -> None:
        """Call a method whose answer nobody needs."""
        if not self.dead:
            self._send(next(self._numbers), method, self.dumps(arguments))

    async def stop(self, grace: float = 10.0) -> None:
        """Let the process end by itself, or end it after `grace` seconds; a guest ends by itself."""
        if self._process or self._guest:
            self._die(f"{self.name} was stopped")
        if self._process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, grace)
            await asyncio.to_thread(self._end)

    def give_up(self, why: str) -> ActorDied:
        """Begin to end a process that is of no more use. Returns what its callers are told, which is that it died if it
        did."""
        self._die(why)
        self._in_thread(self._end)
        assert self.dead
        return self.dead

    async def _watch(self, progress_timeout: float) -> None:
        """Give the process up if it owes an answer and is silent, or makes no progress, for too long.

        Intervals are counted, so that time in which this process stood still itself is none of them.
        """
        silent = idle = 0
        while not self.dead:
            heartbeats, progress = self.heartbeats, self._progress
            await asyncio.sleep(HEARTBEAT_S)
            owed = list(self._owed.values())
            wanted = [call for call in owed if not self.excused(call[0])]
            silent = silent + 1 if owed and self.heartbeats == heartbeats else 0
            idle = idle + 1 if wanted and self._progress == progress else 0
            if silent * HEARTBEAT_S >= HEARTBEAT_TIMEOUT_S:
                self._hang(f"has been silent for {silent * HEARTBEAT_S:.3g} s, as if it were stopped,", owed)
            elif idle * HEARTBEAT_S >= progress_timeout:
                limit = f"runtime.progress_timeout = {progress_timeout:g}"
                self._hang(f"has made no progress for {idle * HEARTBEAT_S:.3g} s ({limit})", wanted)

    def _hang(self, found: str, owed: Sequence[tuple[str, float]]) -> None:
        """Give the process up as hung; `owed` are the calls that wait for it."""
        counts = Counter(method for method, _ in owed)
        what = ", ".join(f"{count} x {method}" if count > 1 else method for method, count in counts.items())
        waited = time.monotonic() - min(since for _, since in owed)
        self.give_up(
            f"{self.name} {found} and has owed {what} for {waited:.3g} s ({self._where})\n{self._log_tail()}".rstrip()
        )

    def _in_thread(self, end: Callable[[], None]) -> None:
        """End the process in a thread: the event loop must wait neither for a process nor for a walk through /proc."""
        if self._process:
            threading.Thread(target=end, name=f"end of {self.name}").start()

    def _end(self) -> None:
        """Ask the process, and what it has started, to end: memory that has a name is freed so. Then make it."""
        last = time.monotonic() + ENDS
        self._signal(signal.SIGTERM)
        while not self._over() and time.monotonic() < last:
            time.sleep(0.02)
        self._kill()

    def kill(self) -> None:
        """Begin to end the process at once; a guest ends when it sees that nobody is here."""
        if self._process or self._guest:
            self._die(f"{self.name} was killed")
        self._in_thread(self._kill)

    def _kill(self) -> None:
        assert self._process
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._gone = True

    def _signal(self, number: int) -> None:
        """Send a signal to the process and whatever it has started itself, if any of them is left."""
        assert self._process
        if not self._over():
            with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS permits no signal to a zombie
                os.killpg(self._process.pid, number)

    def _over(self) -> bool:
        """Whether the process and all that it has started have ended."""
        assert self._process
        self._gone = self._gone or (self._process.poll() is not None and not group_lives(self._process.pid))
        return self._gone

    def _send(self, number: int, method: str, arguments: bytes | Large) -> None:
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing.append((number, method, arguments))

    def _flush(self) -> None:
        calls, self._outgoing = self._outgoing, []
        self._writer.put(calls)

    def _write(self) -> None:
        """Send from a thread of its own: the event loop must not wait for a process that is busy."""
        with contextlib.suppress(OSError):
            while (message := self._writer.get()) is not None:
                if not isinstance(message, list):
                    self._connection.send(message)
                    continue
                for large, calls in itertools.groupby(message, lambda call: isinstance(call[2], Large)):
                    if large:
                        for call in calls:
                            self._send_large(*call)
                    else:
                        self._connection.send(list(calls))

    def _send_large(self, number: int, method: str, arguments: Large) -> None:
        """Send a call with the number of pieces that its arguments are, then these."""
        try:
            pieces = arguments.pieces()
        except Exception as error:  # the caller's, whose arguments can't be sent
            self._later(self._fail, number, error)
            return
        self._connection.send([(number, method, len(pieces))])
        for piece in pieces:
            self._connection.send_bytes(piece)

    def _read(self, writing: threading.Thread) -> None:
        """Receive in a thread of its own, too: a message may be long, or its sender stopped in the middle of it."""
        try:
            while True:
                self._later(self._answer, self._connection.recv())
        except (EOFError, OSError):
            if not self.dead:
                why = f"{self.name} died ({self._where})\n{self._killed()}{self._log_tail()}".rstrip()
                self._later(self._die, why)
        except Exception as error:  # a class, say, that this process can't make an object of
            self._later(self.give_up, f"{self.name} answered with what can't be read: {type(error).__name__}: {error}")
        self._writer.put(None)
        writing.join()
        self._connection.close()

    def _later(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function in the event loop, if there still is one."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    def _answer(self, answers: list[tuple[int, bool, Any]]) -> None:
        for number, error, value in answers:
            if number == HEARTBEAT:
                self.heartbeats, self._progress = self.heartbeats + 1, value
                continue
            future = self._calls.get(number)
            if future is None or future.done():
                continue
            if error:
                message, kind, details, told = value
                where = f"{self.name} ({self._where})"
                future.set_exception(ActorError(message, kind, details, told, where))
            else:
                future.set_result(value)

    def _fail(self, number: int, error: Exception) -> None:
        future = self._calls.get(number)
        if future and not future.done():
            future.set_exception(error)

    @property
    def _where(self) -> str:
        return f"log: {self._log}" if self._log else "what it said is where it was started"

    def _killed(self) -> str:
        """What to say of a process that had no time to say anything."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self._process and self._process.wait(SHOWS) == -signal.SIGKILL:
                return "It was killed by SIGKILL, as the system does when the host's memory is used up.\n"
        return ""

    def _die(self, why: str) -> None:
        if self.dead:
            return
        self.dead = ActorDied(why)
        if self._watching:
            self._watching.cancel()
        if not hasattr(self, "_connection"):  # a guest that was never spoken to
            return
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(self.dead)

    def _log_tail(self) -> str:
        with contextlib.suppress(OSError), (self._log or Path(os.devnull)).open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_BYTES))
            return _last_lines(log.read().decode(errors="replace"))
        return ""


def _last_lines(text: str) -> str:
    return "\n".join(text.splitlines()[-LOG_LINES:])


def keep_watch(watch: Coroutine[Any, Any, None], name: str, give_up: Callable[[str], Any]) -> asyncio.Task[None]:
    """Run a watch in a task. If the watch itself fails, give up what it watches: nothing would find a hang any more."""

    def end(task: asyncio.Task[None]) -> None:
        if not went_well(task) and not task.cancelled():
            error = task.exception()
            give_up(f"{name} can't be watched any more: {type(error).__name__}: {error}")

    watching = asyncio.create_task(watch)
    watching.add_done_callback(end)
    return watching


def went_well(done: asyncio.Future[Any]) -> bool:
    """Whether it did; a failure counts as told, so as a callback this says that nobody need hear of one."""
    return not done.cancelled() and done.exception() is None


def group_lives(group: int) -> bool:
    """Whether a process of this group is left that does more than wait for somebody to see that it has ended."""
    if not Path("/proc/self/stat").exists():
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS permits no signal to a zombie
            os.killpg(group, 0)
            return True
        return False
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it is gone by now
            state, _, its_group = path.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state != "Z":
                return True
    return False


def serve(connection: Line, only: str = "") -> None:
    """The process's life: build the service (`only` this one, if it is named), then answer calls and tick until the
    controller is gone."""
    replies: list[tuple[int, bool, Any]] = []
    sending, calls, ticks = threading.Lock(), 0, 0

    def answer(number: int, value: Any) -> None:
        if isinstance(value, BaseException):
            details = "".join(traceback.format_exception(value))
            with contextlib.suppress(OSError):  # the log's disk may be full, and who asked is told all of it
                print(details, file=sys.stderr, flush=True)
            replies.append((number, True, (str(value), type(value).__name__, details, worded(value))))
        else:
            replies.append((number, False, value))

    def send(messages: list[tuple[int, bool, Any]]) -> None:
        with sending:
            connection.send(messages)

    def send_heartbeats() -> None:
        with contextlib.suppress(OSError, ValueError):  # the controller is gone, or this process closes
            while True:
                send([(HEARTBEAT, False, calls + getattr(service, "progress", ticks))])
                time.sleep(heartbeat_s)

    name, arguments, heartbeat_s = connection.recv()
    try:
        if only and name != only:
            raise ValueError(f"{name} is asked for, and this process is there for {only} alone")
        service: Service = build(imported(name), connection.loads(arguments), ("busy", "handle", "tick", "close"))
    except Exception as error:
        answer(0, error)
        connection.send(replies)
        return
    set_heap_aside()
    threading.Thread(target=send_heartbeats, name="heartbeats", daemon=True).start()
    try:
        while True:
            while connection.poll(0 if replies or service.busy else None):
                for number, method, given in connection.recv():
                    follow = given if isinstance(given, int) else 0  # as pieces
                    arguments = b"".join(connection.recv_raw() for _ in range(follow)) or given
                    try:
                        if method == READY:
                            answer(number, None)
                        else:
                            service.handle(method, connection.loads(arguments), partial(answer, number))
                    except Exception as error:
                        answer(number, error)
                    calls += 1
            if service.busy:
                service.tick()
                ticks += 1
            calls += len(replies)
            for reply in replies:  # each by itself: many completions at once are many megabytes
                send([reply])
            replies.clear()
    finally:
        service.close()


def worded(error: BaseException) -> bool:
    """Whether we say in it what is wrong, and not somebody else's code, or an oversight in ours."""
    if type(error).__module__.startswith(OURS):
        return True
    last = error.__traceback__
    while last and last.tb_next:
        last = last.tb_next
    if last is None or not isinstance(error, SAID):
        return False
    frame = last.tb_frame
    raised = dis.opname[frame.f_code.co_code[last.tb_lasti]] == "RAISE_VARARGS"  # here, not in C++ that we called
    return raised and frame.f_globals["__name__"].startswith(OURS)


def imported(name: str) -> Any:
    """What "module:attribute" or "file.py:attribute" names, imported without garbage collection, which takes a fifth of
    the time."""
    gc.disable()
    try:
        return load_thing(name, "service")
    finally:
        gc.freeze()  # modules stay
        gc.enable()


def be_guest(connection: Line, only: str = "") -> None:
    """Serve the controller at the other end, in the environment that it sends first, until it is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C, and what `torchrun` passes on, are for the controller
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        os.environ |= connection.recv()
        serve(connection, only)
    gc.unfreeze()  # libraries complain of what is not freed at the end


def leave() -> None:
    """End now: to free what every module holds piece by piece takes a second, and the system does it at once.

    What this file's own imports have registered for the end comes after it, and is done here.
    """
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(hasattr(sys, "last_value"))  # of an exception that nobody caught


def end_with(parent: int) -> None:
    """End this process, and what it has started, some time after the controller has: one that waits for something that
    never comes does not see that nobody is there any more."""
    while os.getppid() == parent:
        time.sleep(1)
    time.sleep(ORPHANED)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def main() -> None:
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    atexit.register(leave)  # before services register what is done at the end, which is done in the opposite order
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        serve(Line(int(sys.argv[1])))


if __name__ == "__main__":
    main()
