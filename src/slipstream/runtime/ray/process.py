"""The controller's end of a worker's process on a Ray cluster."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from slipstream.runtime.pipe import Pipe
from slipstream.runtime.process import NOT_PLACED, TERMINATION_GRACE_S, Launch, LocalProcess, Process

SMALL = 2**15  # bytes of a message; longer ones are pieces of a batch
PIECES_IN_FLIGHT = 8
CONTROL_TIMEOUT_S = 30.0  # for the answer of a node to a call that ends a worker; the node may be lost


class RayConnection:
    """Messages over calls of a `WorkerActor`. `started` is the reference of its start; `limit` is in seconds."""

    def __init__(self, actor: Any, started: Any, limit: float, pending: Callable[[], str]) -> None:
        self._actor, self._started, self._limit, self._pending = actor, started, limit, pending
        self._numbers = itertools.count()
        self._sent: list[Any] = []  # references of messages that may be on their way
        self._messages: deque[bytes] = deque()
        self._is_started = False

    def send(self, message: Any) -> None:
        self.send_bytes(Pipe.dumps(message))

    def send_bytes(self, data: bytes) -> None:
        """As `Connection.send_bytes`. Waits while a message is on its way: the caller sends all later ones as one."""
        window = 1 if len(data) < SMALL else PIECES_IN_FLIGHT
        if len(self._sent) >= window:
            _, self._sent = ray.wait(self._sent, num_returns=len(self._sent) - window + 1)
        self._sent.append(self._actor.send.remote(next(self._numbers), data))

    def recv(self) -> Any:
        """As `Connection.recv`."""
        try:
            self._wait_for_start()
            if not self._messages:
                self._messages.extend(ray.get(self._actor.receive.remote()))
        except RayTaskError as error:
            raise EOFError(f"{error.cause}\n") from None
        except RayActorError as error:  # whose last line may be that of an import that failed
            reason = str(error).strip().splitlines()[-1]
            raise EOFError(
                f"Its node was lost, or its actor ended (`ray status` shows the nodes): {reason}\n"
            ) from None
        if not self._messages:
            raise EOFError
        return Pipe.loads(self._messages.popleft())

    def close(self) -> None: ...

    def _wait_for_start(self) -> None:
        if not self._is_started:
            try:
                ray.get(self._started, timeout=self._limit)
            except GetTimeoutError:
                raise EOFError(f"{NOT_PLACED} runtime.start_timeout = {self._limit:g} s: {self._pending()}\n") from None
            self._is_started = True


class RayProcess(Process):
    """A worker's process, started by its own actor."""

    def __init__(self, actor: Any, launch: Launch, limit: float, pending: Callable[[], str]) -> None:
        path = [entry or os.getcwd() for entry in sys.path]  # noqa: PTH109
        self._actor, self._started = actor, actor.start.remote(launch, path, os.getcwd())  # noqa: PTH109
        self.connection = RayConnection(actor, self._started, limit, pending)

    @property
    def pid(self) -> int:
        """Process id on its node."""
        pid: int = ray.get(self._started)
        return pid

    def disconnect(self) -> None:
        self._actor.control.remote(LocalProcess.disconnect)

    def was_killed(self) -> bool:
        return bool(self._call(LocalProcess.was_killed))

    def wait(self, seconds: float) -> None:
        self._call(LocalProcess.wait, seconds)

    def terminate(self) -> None:
        self._end(LocalProcess.terminate)

    def kill(self) -> None:
        self._end(LocalProcess.kill)

    def _end(self, method: Callable[..., None]) -> None:
        self._call(method)
        with contextlib.suppress(RayError):
            ray.kill(self._actor)

    def _call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Result of a call, or None if the node does not answer, or no process was started yet, or its start failed."""
        if not ray.wait([self._started], timeout=0)[0]:
            return None
        with contextlib.suppress(RayError):
            ray.get(self._started)  # a call to an actor that was killed before its start can wait for its whole limit
            waited = arguments[0] if arguments else TERMINATION_GRACE_S
            return ray.get(self._actor.control.remote(method, *arguments), timeout=CONTROL_TIMEOUT_S + waited)
        return None
