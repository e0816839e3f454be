"""End concurrent work: close several resources although one fails, cancel tasks that others make useless."""

from __future__ import annotations

import asyncio
import ctypes
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from slipstream.errors import UserError
from slipstream.runtime.event_loop import new_event_loop

TASK_END_S = 5.0  # after the end of the main task
Result = TypeVar("Result")


@asynccontextmanager
async def closing(*closers: Callable[[], Awaitable[Any]]) -> AsyncIterator[None]:
    """Call all closers after the body, one after the other. Raises the first error and prints the others."""
    errors: list[BaseException] = []
    try:
        yield
    except BaseException as error:
        errors.append(error)
    for close in closers:
        try:
            await close()
        except BaseException as error:
            errors.append(error)
    for later in errors[1:]:
        print(f"slipstream: and then: {type(later).__name__}: {later}", file=sys.stderr)
    if errors:
        raise errors[0]


async def close_at_once(*closers: Callable[[], Awaitable[Any]]) -> None:
    """Call all closers concurrently and wait for all. Raises the first error."""
    for answer in await asyncio.gather(*(close() for close in closers), return_exceptions=True):
        if isinstance(answer, BaseException):
            raise answer


async def gather_all(coroutines: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """The results of all coroutines, in order. Raises the first error, and cancels the others."""
    tasks = [asyncio.ensure_future(one) for one in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def wait_first(*waits: Awaitable[object]) -> None:
    """Wait until one of these is done, and cancel the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


async def finish_in_thread(function: Callable[..., Result], *arguments: Any) -> Result:
    """As `asyncio.to_thread`. If it is cancelled, it still waits for the thread, which can't be interrupted."""
    thread = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(thread)
    except asyncio.CancelledError:
        await asyncio.wait((thread,))
        raise


def run_bounded(main: Coroutine[Any, Any, Result]) -> Result:
    """`asyncio.run`, which waits for `TASK_END_S` for other tasks that swallow their cancellation.

    Raises `KeyboardInterrupt` if `main` was cancelled, as by Ctrl-C, and `UserError` in a running event loop.
    """
    if asyncio._get_running_loop():
        main.close()
        raise UserError(
            "a run can't start in a thread whose event loop is running, such as that of a notebook; start it in "
            "another process (slipstream train), or in another thread: asyncio.to_thread(slipstream.train, config)"
        )
    own: list[asyncio.Task[Any] | None] = []

    async def body() -> Result:
        own.append(asyncio.current_task())
        return await main

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        try:
            return runner.run(body())
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        finally:
            runner.get_loop().run_until_complete(_end_tasks(own))


async def _end_tasks(own: Collection[asyncio.Task[Any] | None]) -> None:
    """Cancel all tasks. Wait for `own` without a limit, and up to `TASK_END_S` for the others, then abandon these."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if main := tasks.intersection(own):
        await asyncio.wait(main)
    if tasks:
        for task in (await asyncio.wait(tasks, timeout=TASK_END_S))[1]:
            abandon(task)


def abandon(task: asyncio.Task[Any]) -> None:
    """Exclude a task that does not end from the end of the event loop.

    The task is never freed: that would raise `GeneratorExit` in code that swallows every exception."""
    asyncio._unregister_task(task)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(task))
