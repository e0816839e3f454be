"""The operating system's process of a worker: a child process of the controller, or one on another host."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

from slipstream.runtime.event_loop import yield_to_loop
from slipstream.runtime.worker_main import PRELOAD, PRESTARTED

NOT_PLACED = "It was not placed within"  # begins the reason of a process that no node of a cluster could hold
EXIT_STATUS_S = 10.0  # in which the exit status of a process becomes known after its connection ended
TERMINATION_GRACE_S = 5.0  # between SIGTERM and SIGKILL


@dataclass(frozen=True)
class Launch:
    """What a process is started with: log file (None: no log), environment variables in addition to inherited ones."""

    name: str
    log: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


class Process(Protocol):
    """A started process, at the other end of a stream socket. All methods but `disconnect` may block the thread."""

    connection: socket.socket

    def disconnect(self) -> None:
        """End both directions of the connection: threads that wait for a message get the end of it."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()

    def describe_end(self) -> str:
        """A line on the end of a process that could not print one, such as one killed by SIGKILL, or "".

        Waits up to `EXIT_STATUS_S` for the exit status.
        """
        ...

    def terminate(self, grace: float = 0.0) -> None:
        """Let the process end by itself for `grace` seconds, then end it and all that it started: send SIGTERM, and
        SIGKILL after `TERMINATION_GRACE_S`."""
        ...

    def kill(self) -> None: ...


Launcher = Callable[[Launch], Process]


class LocalProcess(Process):
    """A child process in its own session and process group, connected by a socket pair."""

    def __init__(self, launch: Launch, given: socket.socket | None = None) -> None:
        """With a `given` socket the worker sends its messages there.

        Then `connection` carries no messages, and only shows that the process has ended.
        """
        if launch.log:
            launch.log.parent.mkdir(parents=True, exist_ok=True)
        if not given and (prestarted := _take_prestarted(launch)):
            self.connection, self._process = prestarted
        else:
            self.connection, theirs = socket.socketpair()
            with theirs, given or contextlib.nullcontext():
                self._process = self._start(launch, *((given, theirs) if given else (theirs,)))
        self.pid = self._process.pid
        self._ended = False  # the process and all that it started; the number of its process group may be reused

    @staticmethod
    def _start(launch: Launch, *sockets: socket.socket) -> subprocess.Popen[bytes]:
        """Start the process, which inherits the sockets; the first carries its messages."""
        with (launch.log or Path(os.devnull)).open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "slipstream.runtime.worker_main", str(sockets[0].fileno())],
                pass_fds=[each.fileno() for each in sockets],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the controller, which stops workers in order
                env=child_environment(launch),
            )

    def describe_end(self) -> str:
        self._wait(EXIT_STATUS_S)
        killed = self._process.poll() == -signal.SIGKILL
        return "It was killed by SIGKILL, as the system does when the host's memory is used up.\n" if killed else ""

    def terminate(self, grace: float = 0.0) -> None:
        """As `Process.terminate`. A process that ends on SIGTERM frees its named shared memory."""
        self._wait(grace)
        last = time.monotonic() + TERMINATION_GRACE_S
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)  # a stopped process handles no signal until it continues
        while not self._has_ended() and time.monotonic() < last:
            time.sleep(0.02)
        self.kill()

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._ended = True

    def _wait(self, seconds: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def _signal(self, number: int) -> None:
        if not self._ended:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS permits no signal to a zombie
                os.killpg(self.pid, number)

    def _has_ended(self) -> bool:
        """Whether the process and all that it started have ended."""
        self._ended = self._ended or (self._process.poll() is not None and not process_group_alive(self.pid))
        return self._ended


_prestarted: list[tuple[str, socket.socket, subprocess.Popen[bytes]]] = []


def prestart(reference: str) -> None:
    """Start a process that runs `worker_main.preload` of this reference. The next launch that asks for that gets it."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = LocalProcess._start(Launch(reference, environment={PRELOAD: reference, PRESTARTED: "1"}), theirs)
    _prestarted.append((reference, ours, process))


def _take_prestarted(launch: Launch) -> tuple[socket.socket, subprocess.Popen[bytes]] | None:
    """A running process of `prestart`, with its connection, that becomes the one to launch; None without one."""
    for found in [one for one in _prestarted if one[0] == launch.environment.get(PRELOAD)]:
        _prestarted.remove(found)
        _, connection, process = found
        if process.poll() is not None:
            connection.close()
        else:
            with contextlib.suppress(OSError), Connection(os.dup(connection.fileno())) as duplicate:
                duplicate.send((child_environment(launch), str(launch.log or os.devnull)))
            return connection, process
    return None


def stop_prestarted() -> None:
    """Kill the processes of `prestart` that no launch has taken."""
    while _prestarted:
        _, connection, process = _prestarted.pop()
        with contextlib.suppress(ProcessLookupError, PermissionError):  # as in `LocalProcess._signal`
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        connection.close()


def child_environment(launch: Launch) -> dict[str, str]:
    """The environment of a child process, which imports from the same places as this process."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(p or "." for p in sys.path), **launch.environment}


def process_group_alive(group: int) -> bool:
    """Whether a process of this process group is alive and no zombie."""
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):  # macOS permits no signal to a zombie
        return False
    if not Path("/proc/self/stat").exists():
        return True
    for path in Path("/proc").glob("[0-9]*/stat"):
        yield_to_loop()
        with contextlib.suppress(OSError):  # the process ended meanwhile
            state, _, its_group = path.read_text(errors="replace").rpartition(")")[2].split()[:3]
            if int(its_group) == group and state != "Z":
                return True
    return False
