"""Workers and commands whose processes are forked from one that has imported what they need, which takes seconds.

They are processes all the same, with logs, signals and an end of their own. Reward workers, which need few imports, and
all that `subprocess` starts in tests, start as they do for users.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from slipstream.runtime.process import Launch, LocalProcess, child_environment
from slipstream.runtime.worker_main import PRELOAD
from tests.fork_server import Request

MODULES = [
    "slipstream.trainers.trainer_worker", "slipstream.generators.torch.engine", "slipstream.generators.vllm.engine",
    "transformers.models.qwen3.modeling_qwen3", "slipstream.runtime.worker_main",
    "transformers.models.auto.tokenization_auto", "slipstream.run", "slipstream.__main__", "pyarrow.parquet",
    "slipstream.scoring.teacher", "slipstream.scoring.model", "slipstream.tools.verify", "tests.warm",
    "slipstream.generators.torch.adapters", "torch.distributed.checkpoint._fsspec_filesystem", "pandas",
]  # fmt: skip
VLLM = ["vllm", "vllm.v1.engine.llm_engine", "vllm.v1.worker.cpu_worker", "tests.vllm_in_process"]
NEW = ("reward worker",)
start_new = LocalProcess._start
_servers: dict[str, Forks] = {}


class Forks:
    """A client of a fork server."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def fork(self, request: Request, *files: int) -> Forked:
        """`files` as in `Request`, without the first."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(self._connection, [pickle.dumps(request)], [theirs.fileno(), *files])
        return Forked(ours)

    def start(self, launch: Launch, *sockets: socket.socket) -> Any:
        """Replaces `LocalProcess._start`."""
        if launch.name.startswith(NEW):
            return start_new(launch, *sockets)
        with (launch.log or Path(os.devnull)).open("ab") as log, Path(os.devnull).open("rb") as nothing:
            request = Request(["slipstream.runtime.worker_main"], "worker", child_environment(launch), str(Path.cwd()))
            process = self.fork(request, *(file.fileno() for file in (nothing, log, log, *sockets)))
        with contextlib.suppress(ProcessLookupError):
            while process.poll() is None and os.getpgid(process.pid) != process.pid:
                time.sleep(0.001)  # until it leads a group, which can be sent signals
        return process


class Forked:
    """What a worker asks of a `subprocess.Popen`."""

    def __init__(self, status: socket.socket) -> None:
        self._status = status
        self.pid = int(status.recv(64))
        self._lock = threading.Lock()
        self._ended = select.poll()
        self._ended.register(status, select.POLLIN)
        self._code: int | None = None

    def poll(self) -> int | None:
        with self._lock:
            if self._code is None and self._ended.poll(0):
                try:
                    told = self._status.recv(64)
                except OSError:  # closed with a command that nobody has waited for
                    told = b""
                self._code = int(told) if told else -signal.SIGKILL  # its server was killed
                self._status.close()
            return self._code

    def wait(self, timeout: float | None = None) -> int:
        last = math.inf if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > last:
                raise subprocess.TimeoutExpired("a worker", timeout or 0.0)
            time.sleep(0.005)
        return code

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


class Command(subprocess.Popen[str]):
    """A `subprocess.Popen` of Python that is forked, with `-m slipstream` or a `-c` program, and its workers too."""

    def _execute_child(self, args: Any, *given: Any) -> None:  # type: ignore[override]
        _executable, _preexec, _close, _pass, cwd, env = given[:6]
        theirs, pipes = (given[9], given[12], given[14]), given[9:15]
        environment = dict(os.environ if env is None else env)
        python, *words = map(str, args)
        assert python == sys.executable
        with Path(os.devnull).open("rb") as nothing:
            files = [ours if file < 0 else file for file, ours in zip(theirs, (nothing.fileno(), 1, 2), strict=True)]
            server = server_of("vllm" if any("vllm" in word for word in words) else "")
            self._forked = server.fork(Request(words, "command", environment, str(cwd or Path.cwd())), *files)
        self.pid = self._forked.pid
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None:
            self.returncode = self._forked.poll()  # type: ignore[assignment]
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        self.returncode = self._forked.wait(timeout)
        return self.returncode


def server_of(kind: str) -> Forks:
    """The server of processes that need vLLM, or of all others. Starts it if none has needed it before."""
    if kind not in _servers:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            if kind:
                assert server_of("").fork(Request(VLLM, "server"), theirs.fileno()).pid
            else:
                command = [sys.executable, "-m", "tests.fork_server", str(theirs.fileno()), *MODULES]
                paths = {"PYTHONPATH": os.pathsep.join(p or "." for p in sys.path)}
                root = Path(__file__).parents[1]
                subprocess.Popen(command, pass_fds=[theirs.fileno()], env=os.environ | paths, cwd=root)
        _servers[kind] = Forks(ours)
    return _servers[kind]


def start(launch: Launch, *sockets: socket.socket) -> Any:
    """Replaces `LocalProcess._start` in the process of the tests."""
    return server_of("vllm" if "vllm" in launch.environment.get(PRELOAD, "") else "").start(launch, *sockets)
