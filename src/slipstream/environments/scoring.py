"""Reward functions that are not async run here: in processes of their own, which can be killed.

A reward that computes for a second would hold up every episode if it ran in the controller; one that never returns, or
takes its process down, costs one rollout here, and a fresh process takes the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from slipstream.environments.base import Task
from slipstream.rollout import Completion

Reward = Callable[[Task, Completion], Any]


class ScoringError(RuntimeError):
    """A reward function failed on one completion. `reason` is short enough to be counted by."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class ScorerPool:
    """`processes` workers that call the function `reference` ("module:function" or "file.py:function").

    Started on the first use. `options` are bound to the function as keyword arguments.
    """

    def __init__(self, reference: str, options: dict[str, Any], processes: int, time_limit: float) -> None:
        self._job = (reference, options)
        self._time_limit = time_limit
        self._free: asyncio.Queue[_Worker | None] = asyncio.Queue()
        self._workers: set[_Worker] = set()
        for _ in range(processes):
            self._free.put_nowait(None)

    async def score(self, task: Task, completion: Completion) -> Any:
        """What the function returns for this completion. Raises `ScoringError`."""
        worker = await self._free.get()
        answered = False
        try:
            if worker is None:
                worker = _Worker(self._job)
                self._workers.add(worker)
                await worker.ready
            async with asyncio.timeout(self._time_limit):
                error, value = await worker.ask((task, completion))
            answered = True
        except TimeoutError:
            raise ScoringError("reward time limit", f"the reward took longer than {self._time_limit:g} s") from None
        except EOFError:
            raise ScoringError("reward process died", "the reward function took its process down") from None
        finally:
            if not answered:  # it may still be at work on a completion that nobody waits for
                self._discard(worker)
            self._free.put_nowait(worker if answered else None)
        if error:
            raise ScoringError(*value)
        return value

    async def close(self) -> None:
        for worker in list(self._workers):
            self._discard(worker)

    def _discard(self, worker: _Worker | None) -> None:
        """Kill a worker; None takes its place among the free ones, and a new one is started when it is needed."""
        if worker:
            self._workers.discard(worker)
            worker.kill()


class _Worker:
    """One process, seen from the event loop."""

    def __init__(self, job: tuple[str, dict[str, Any]]) -> None:
        ours, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "slipstream.environments.scoring", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(p or "." for p in sys.path)},
        )
        theirs.close()
        self._connection = Connection(ours.detach())
        self.ready = asyncio.ensure_future(self._exchange(job))

    def ask(self, question: Any) -> asyncio.Future[tuple[bool, Any]]:
        return asyncio.ensure_future(self._exchange(question))

    async def _exchange(self, message: Any) -> Any:
        loop, answered = asyncio.get_running_loop(), asyncio.Event()
        self._connection.send(message)
        loop.add_reader(self._connection.fileno(), answered.set)
        try:
            await answered.wait()
        finally:
            if not self._connection.closed:
                loop.remove_reader(self._connection.fileno())
        try:
            return self._connection.recv()
        except OSError:
            raise EOFError from None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._connection.close()


def serve(connection: Connection) -> None:
    """A worker's life: load the function, then answer one question after another."""
    from slipstream.environments.load import load_thing

    reference, options = connection.recv()
    reward: Reward = load_thing(reference)
    connection.send((False, None))
    while True:
        task, completion = connection.recv()
        try:
            value = reward(task, completion, **options)
            connection.send((False, float(value) if not isinstance(value, dict) else value))
        except Exception as error:
            lines = traceback.format_exc().splitlines()[-8:]
            connection.send((True, (type(error).__name__, "\n".join(lines))))


def main() -> None:
    with contextlib.suppress(EOFError):  # the controller is gone
        serve(Connection(int(sys.argv[1])))


if __name__ == "__main__":
    main()
