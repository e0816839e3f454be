"""Generators and trainers whose processes are forked from one that has imported what they need, which takes seconds.

They are processes all the same, with logs, signals and an end of their own. What commands start, and all other actors,
starts as it does for users.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from slipstream import actor

MODULES = [
    "slipstream.runtime.training", "slipstream.runtime.generating", "slipstream.generators.torch",
    "transformers.models.qwen3.modeling_qwen3", "transformers.models.auto.tokenization_auto", "slipstream.runtime.vllm",
]  # fmt: skip
launch_anew = actor.Actor._launch
forked = multiprocessing.get_context("forkserver")
forked.set_forkserver_preload(MODULES)


def begin() -> None:
    """Start the process that they are forked from, which is no test's own."""
    resource_tracker.ensure_running()
    forkserver.ensure_running()


class Forked:
    """What an actor asks of a `subprocess.Popen`."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process
        assert process.pid
        self.pid = process.pid
        self._turn = threading.Lock()  # what is told of its end is told once
        with contextlib.suppress(ProcessLookupError):
            while self.poll() is None and os.getpgid(self.pid) != self.pid:
                time.sleep(0.001)  # until it leads a group, which can be sent signals

    def poll(self) -> int | None:
        with self._turn:
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        last = math.inf if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > last:
                raise subprocess.TimeoutExpired("an actor", timeout or 0.0)
            time.sleep(0.005)
        return code

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def launch(self: actor.Actor) -> socket.socket:
    """In the place of `Actor._launch`."""
    if not self.name.startswith(("generator", "trainer")):
        return launch_anew(self)
    ours, theirs = socket.socketpair()
    if self._log:
        self._log.parent.mkdir(parents=True, exist_ok=True)
    said, environment = self._log or Path(os.devnull), self._child_environment()
    connection = Connection(theirs.detach())
    process = forked.Process(target=live, args=(connection, said, environment))
    process.start()
    multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]  # nobody waits for it at the end
    connection.close()
    self._process = Forked(process)  # type: ignore[assignment]
    return ours


def live(connection: Connection, said: Path, environment: dict[str, str]) -> None:
    """The life of an actor's process, and its end as that of an interpreter."""
    os.setsid()
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]  # which would live as long
    multiprocessing.set_start_method(None, force=True)
    with said.open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["slipstream.actor", str(connection.fileno())]
    try:
        actor.main()
    except BaseException as error:
        sys.last_value = error  # as an interpreter notes it, for those who are called at its end
        traceback.print_exc()
    atexit._run_exitfuncs()
