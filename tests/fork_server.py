"""A process that has imported what workers and commands need, and forks one whenever it is asked to.

Imports cost a process of the suite seconds. A forked process has what a started one has: standard streams, environment,
working directory, signal handlers, exit status and log.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import pickle
import random
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MESSAGE_BYTES = 2**20  # at most, of a request


@dataclass(frozen=True)
class Request:
    """What to run. With it come files: for its status, standard input, output and error, and a connection if any."""

    words: Sequence[str]  # as after `python`: -m MODULE ARGUMENTS, or -c CODE ARGUMENTS; of a server: modules to import
    kind: str = "worker"  # or "command", or "server"
    environment: Mapping[str, str] | None = None
    directory: str = "."


class ForkServer:
    """Serves requests of one client until it is gone."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._children: dict[int, socket.socket] = {}  # where the exit status of each is sent

    def serve(self) -> Callable[[], object]:
        """Returns in forked processes only: what they are to run."""
        signal.signal(signal.SIGCHLD, self._reap)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # A signal that arrives just before a call that blocks would be handled after the call: this wakes it up.
        self._wakeup, self._writer = socket.socketpair()
        for end in (self._wakeup, self._writer):
            end.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        events = select.poll()
        for waited in (self._connection, self._wakeup):
            events.register(waited, select.POLLIN)
        while True:
            ready = {file for file, _ in events.poll()}
            with contextlib.suppress(BlockingIOError):
                self._wakeup.recv(4096)
            if self._connection.fileno() not in ready:
                continue
            data, files, _, _ = socket.recv_fds(self._connection, MESSAGE_BYTES, 8)
            if not data:
                os._exit(0)
            if job := self._fork(pickle.loads(data), files):
                return job

    def _fork(self, request: Request, files: list[int]) -> Callable[[], object] | None:
        status = socket.socket(fileno=files[0])
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        if pid := os.fork():
            self._children[pid] = status
            for file in files[1:]:
                os.close(file)
        else:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)
            for one in (self._connection, self._wakeup, self._writer, status, *self._children.values()):
                one.close()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        if not pid:
            return lambda: _run(request, files[1:])
        with contextlib.suppress(OSError):  # the client is gone
            status.send(str(pid).encode())
        return None

    def _reap(self, *_: object) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, code = ended
                with self._children.pop(pid) as status, contextlib.suppress(OSError):
                    status.send(str(os.waitstatus_to_exitcode(code)).encode())


def _run(request: Request, files: list[int]) -> object:
    if request.kind == "server":
        return _serve(request.words, socket.socket(fileno=files[0]))
    for number, file in enumerate(files[:3]):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request.directory)
    os.environ.clear()
    os.environ.update(request.environment or {})
    paths = [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
    sys.path[:0] = [request.directory, *(p for text in paths for p in text.split(os.pathsep))]
    random.seed()
    if request.kind == "worker":
        os.setsid()
        sys.argv = [*request.words, str(files[3])]
        from slipstream.runtime import worker_main

        return worker_main.main()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with _workers_forked():
        return _interpret(*request.words)


def _serve(modules: Sequence[str], connection: socket.socket) -> object:
    """Import modules, and fork processes that have them."""
    for name in modules:
        with contextlib.suppress(ImportError):  # of an extra
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    return ForkServer(connection).serve()()


@contextlib.contextmanager
def _workers_forked() -> Any:
    """Context in which workers that this process starts are forked from it as it is now."""
    from slipstream.runtime.process import LocalProcess
    from tests.warm import Forks

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = os.fork()
    if not server:
        ours.close()
        sys.exit(ForkServer(theirs).serve()())
    theirs.close()
    LocalProcess._start = staticmethod(Forks(ours).start)  # type: ignore[method-assign]
    try:
        yield
    finally:
        ours.close()
        os.waitpid(server, 0)


def _interpret(how: str, what: str, *arguments: str) -> object:
    """Run what follows `python` in a command line."""
    sys.argv = ["-c" if how == "-c" else f"{what}.py", *arguments]
    if how == "-c":
        return exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    if what == "slipstream":
        from slipstream.__main__ import stop

        signal.signal(signal.SIGINT, stop)
        what = "slipstream.cli"
    return sys.exit(importlib.import_module(what).main())


def main() -> None:
    """The first argument is the file number of the connection, the others are modules to import."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    try:
        _serve(sys.argv[2:], connection)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException as error:
        sys.last_value = error  # as an interpreter does, for exit handlers
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
