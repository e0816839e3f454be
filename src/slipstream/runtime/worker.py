"""Workers: objects in separate processes, called through typed handles: `await handle(Trainer, process).step(batch)`.

Calls reach the worker in the order in which they are made, awaited or not. Cancelling the future cancels the method in
the worker. What a method raises is raised here as `WorkerError`; a call to a process that ended raises `WorkerDied`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

from slipstream.errors import UserError

LOG_LINES = 15

W = TypeVar("W")
Method = TypeVar("Method", bound=Callable[..., Any])


class WorkerDied(UserError):
    """The process or server behind a handle ended, or was terminated, while it was needed."""


class WorkerError(UserError):
    """A method raised in its worker. `kind` is the class name of the exception, `details` its traceback.

    An exception whose message is not written for users gets a note with `where` and the end of the traceback.
    """

    def __init__(self, message: str, kind: str, details: str, user_facing: bool = True, where: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.details = details
        if not user_facing:
            self.add_note(f"{where} failed:\n{last_lines(details)}")


class Worker:
    """Base class of workers; a user's class with the same methods works as well.

    `progress` counts work units (tokens, micro-batches, bytes) and grows during long calls: a worker that has pending
    calls and whose count stays the same for `runtime.progress_timeout` is hung. A worker that runs
    `orphan_grace_s` after the death of its controller is killed: a rank may wait for another that is gone, and hold its
    GPU.
    """

    orphan_grace_s = 5.0

    @property
    def progress(self) -> int:
        return 0

    async def run(self) -> None:
        """Background work, such as decoding. If it raises, the process ends."""

    def close(self) -> None:
        """Called when the controller is gone."""


class Transport(Protocol):
    """What carries the calls of a handle to a worker."""

    def call(self, method: str, arguments: tuple[Any, ...], large: bool = False) -> asyncio.Future[Any]:
        """Send a call. `large` arguments are serialized off the event loop."""
        ...


def handle(kind: type[W], transport: Transport) -> W:
    """A proxy with the methods of `kind`, each of which is called in the worker at the other end of `transport`."""
    return cast(W, _Handle(kind, transport))


def large_arguments(method: Method) -> Method:
    """Mark a method whose arguments are many megabytes: they are serialized off the controller's event loop."""
    method.large_arguments = True  # type: ignore[attr-defined]
    return method


def methods_of(kind: type[Any]) -> list[str]:
    """Names of the methods that a worker of this kind has to have: the public ones, but those of `Worker` itself."""
    names = {name for base in kind.__mro__ for name, value in vars(base).items() if callable(value)}
    return sorted(name for name in names - vars(Worker).keys() if not name.startswith("_"))


def succeeded(done: asyncio.Future[Any]) -> bool:
    """Whether a finished future has a result. As a callback, it marks an exception as retrieved."""
    return not done.cancelled() and done.exception() is None


def fail_unawaited(future: asyncio.Future[Any], error: Exception) -> None:
    """Fail a future whose caller may be gone, and mark the exception as retrieved: asyncio logs all others."""
    future.set_exception(error)
    future.exception()


def last_lines(text: str) -> str:
    """The end of a log or traceback."""
    return "\n".join(text.splitlines()[-LOG_LINES:])


def describe_death(failure: Exception) -> str:
    """The message of a `WorkerDied` in one line: what died, whether it was killed, and the last line of its log.

    After SIGKILL that line is omitted: the process wrote it before the signal, and it does not say what the cause was.
    """
    first, *rest = str(failure).splitlines()
    killed = [line for line in rest[:1] if line.startswith("It was killed")]
    logged = [] if killed and "SIGKILL" in killed[0] else rest[-1:]
    return " ".join(dict.fromkeys([f"{first}:" if rest else first, *killed, *logged])).rstrip(".")


class _Handle:
    def __init__(self, kind: type[Any], transport: Transport) -> None:
        self._kind, self._transport = kind, transport

    def __getattr__(self, name: str) -> Callable[..., asyncio.Future[Any]]:
        large = hasattr(getattr(self._kind, name), large_arguments.__name__)
        return lambda *arguments: self._transport.call(name, arguments, large)
