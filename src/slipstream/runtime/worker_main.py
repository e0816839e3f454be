"""The main program of a worker's process: build the worker, run its methods when they are called, send heartbeats."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import gc
import logging
import multiprocessing.util
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from slipstream.config.plugins import build, load_object
from slipstream.errors import UserError
from slipstream.runtime.memory import freeze_heap, unshared_bytes
from slipstream.runtime.priority import lower_priority_as_asked
from slipstream.runtime.worker import Worker, succeeded

# Environment variables: what this process imports before its worker is built (the argument of `preload`), and whether
# it gets the rest of its environment, and its log, after that.
PRELOAD, PRESTARTED = "SLIPSTREAM_PRELOAD", "SLIPSTREAM_PRESTARTED"
LOG = "SLIPSTREAM_LOG"  # environment variable: the log of a prestarted worker, for processes of its fork server
VISIBLE, CUDA_NOT_INITIALIZED = "CUDA_VISIBLE_DEVICES", 3  # the latter is an error code of the driver
HEARTBEAT = -1  # in the place of a call's number: the value is a count of progress, and `unshared_bytes`
START = 0  # number of the first call, which builds the worker
STOP_GRACE_S = 30.0  # more than any grace of `WorkerProcess.stop`, after which a live controller kills the worker
Call = tuple[int, str | None, Any]  # number, method (None cancels the call), serialized arguments


class WorkerServer:
    """The worker's end of a connection with the controller."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._count = 0  # calls that began or ended
        self._worker: Any = None
        self._background: asyncio.Future[Any] | None = None
        self._ending = asyncio.Event()  # the controller is gone, or the background work has failed
        self._closed = threading.Event()
        self._parent = os.getppid()

    async def serve(self) -> None:
        """Run calls until the controller is gone. Raises what the worker's background work raises."""
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, name="calls", daemon=True).start()
        if reference := os.environ.pop(PRELOAD, ""):
            preload(reference)
        try:
            await self._ending.wait()
            if self._background and self._background.done():
                self._background.result()
        finally:
            if close := getattr(self._worker, "close", None):
                close()
            self._closed.set()

    async def _start(self, reference: str, arguments: bytes, required: Sequence[str], heartbeat_s: float) -> None:
        """Build the worker, and start its heartbeats and its background work."""
        self._worker = build(import_class(reference), pickle.loads(arguments), required)
        freeze_heap()
        threading.Thread(target=self._send_heartbeats, args=(heartbeat_s,), name="heartbeats", daemon=True).start()
        if run := getattr(self._worker, "run", None):
            self._background = asyncio.ensure_future(run())
            self._background.add_done_callback(self._end_if_failed)

    def _end_if_failed(self, background: asyncio.Future[Any]) -> None:
        if not succeeded(background):
            self._ending.set()

    def _read(self) -> None:
        """Receive calls in a thread, also while the worker computes. Ends the process if it outlives its controller."""
        with contextlib.suppress(EOFError, OSError, RuntimeError):  # the last: the loop is closed
            while True:
                calls = [self._complete(call) for call in self._connection.recv()]
                self._loop.call_soon_threadsafe(self._begin_all, calls)
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._ending.set)
        grace = getattr(self._worker, "orphan_grace_s", Worker.orphan_grace_s)
        if not self._closed.wait(grace):
            stopping = os.getppid() == self._parent  # on Ray that is not the controller
            if not stopping or not self._closed.wait(STOP_GRACE_S - grace):
                end_process_group()

    def _complete(self, call: Call) -> Call:
        """A call with its arguments, which follow in pieces if it has only their number."""
        number, method, arguments = call
        if isinstance(arguments, int):
            arguments = b"".join(self._connection.recv_bytes() for _ in range(arguments))
        return number, method, arguments

    def _begin_all(self, calls: Sequence[Call]) -> None:
        """Start the calls of one message together, so that no background work runs between them.

        A call without a method cancels the call of its number.
        """
        for number, method, arguments in calls:
            if method is None:
                if call := self._calls.get(number):
                    call.cancel()
                continue
            self._count += 1
            call = self._calls[number] = asyncio.ensure_future(self._call(number, method, arguments))
            call.add_done_callback(partial(self._end, number))

    def _end(self, number: int, _: object) -> None:
        self._count += 1
        del self._calls[number]

    async def _call(self, number: int, method: str, arguments: bytes) -> None:
        """Run a method and send its result or its error.

        No variable refers to the exception afterwards: its frames would keep connections of a failed transfer open.
        """
        try:
            function = self._start if number == START else getattr(self._worker, method)
            answer = number, False, await function(*pickle.loads(arguments))
        except BaseException as error:
            call = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and call and call.cancelling():
                return
            answer = number, True, describe_error(error)
        with contextlib.suppress(OSError):  # the controller is gone
            try:
                self._send(answer)
            except (TypeError, AttributeError, pickle.PicklingError) as error:  # the result can't be serialized
                self._send((number, True, describe_error(error)))

    def _send(self, message: tuple[int, bool, Any]) -> None:
        with self._sending:
            self._connection.send([message])

    def _send_heartbeats(self, interval_s: float) -> None:
        with contextlib.suppress(OSError, ValueError):  # the controller is gone, or this process closes
            while True:
                progress = self._count + getattr(self._worker, "progress", 0)
                self._send((HEARTBEAT, False, (progress, unshared_bytes(children=True))))
                time.sleep(interval_s)


def describe_error(error: BaseException) -> tuple[str, str, str, bool]:
    """The message, class name and traceback of an error, and whether it is written for users. Prints the traceback."""
    details = "".join(traceback.format_exception(error))
    with contextlib.suppress(OSError):  # the disk of the log may be full
        print(details, file=sys.stderr, flush=True)
    return str(error), type(error).__name__, details, isinstance(error, UserError)


def import_class(reference: str) -> Any:
    """The class or function that "module:attribute" or "file.py:attribute" names. Raises `LoadError`.

    The garbage collector is off during imports, where it takes a fifth of the time, and ignores their objects later.
    """
    gc.disable()
    try:
        return load_object(reference, "service")
    finally:
        gc.freeze()
        gc.enable()


def preload(reference: str) -> None:
    """Import a worker's class before it is built; or run a function `preload`, which imports it. Prints errors."""
    if reference.partition(":")[0].endswith(".py"):  # the code of a file would run twice
        return
    try:
        found = import_class(reference)
        if reference.endswith(":preload"):
            found()
    except (Exception, SystemExit):  # raised again when the worker is built
        traceback.print_exc()


def wait_for_launch(connection: Connection) -> None:
    """Import what a worker needs. Then take the environment and the log that the controller sends."""
    del os.environ[PRESTARTED]
    preload(os.environ.pop(PRELOAD))
    environment, log = connection.recv()
    visible = os.environ.get(VISIBLE)
    os.environ.update(environment)
    paths = environment["PYTHONPATH"].split(os.pathsep)
    sys.path[:] = [*paths, *(path for path in sys.path if path not in paths)]
    os.environ[LOG] = log
    write_to(log)
    if os.environ.get(VISIBLE) != visible and cuda_is_initialized():  # by an import; CUDA reads the variable only once
        multiprocessing.util._exit_function()  # type: ignore[attr-defined]
        os.execv(sys.executable, [sys.executable, "-m", "slipstream.runtime.worker_main", *sys.argv[1:]])


def write_to(log: str) -> None:
    """Append what this process writes to its standard output and error to a file."""
    with Path(log).open("ab") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)


def cuda_is_initialized() -> bool:
    """Whether this process has initialized the CUDA driver."""
    try:
        status: int = ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(ctypes.c_int()))
    except OSError:  # no driver
        return False
    return status != CUDA_NOT_INITIALIZED


def fast_exit() -> None:
    """Exit at once: freeing all modules takes a second. Runs the exit handlers of this file's own imports first."""
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(hasattr(sys, "last_value"))  # 1 after an exception that nothing caught


def end_process_group() -> None:
    """Kill this process and its children."""
    if os.getpgid(0) == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def main() -> None:
    atexit.register(fast_exit)  # before workers register handlers: handlers run in reverse order
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(int(sys.argv[1]))
    try:
        if PRESTARTED in os.environ:
            wait_for_launch(connection)
        lower_priority_as_asked()
        asyncio.run(WorkerServer(connection).serve())
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    except UserError as error:  # of background work; the controller shows the end of the log
        print(error, file=sys.stderr)
        sys.last_value = error


if __name__ == "__main__":
    main()
