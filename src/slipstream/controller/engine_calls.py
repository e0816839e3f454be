"""Calls to engines during a publish: receive a version, swap to it, compare checksums; and their errors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping
from contextlib import nullcontext
from typing import Any

from slipstream.errors import UserError
from slipstream.generators.base import Interruption
from slipstream.generators.pool import EngineReplica
from slipstream.runtime.worker import succeeded
from slipstream.sync.link import PublishHandle

Replies = dict[EngineReplica, Any]
Pause = tuple[str, float, float]  # track of an engine, start and end on the pool's clock


class PublishError(UserError):
    """An engine did not receive the published weights, or serves different ones."""


class NotServed(PublishError):
    """A version did not arrive, or its swap was rolled back: the engine serves the version before it."""


async def prepare_version(engine: EngineReplica, handle: PublishHandle, written: int | None = None) -> None:
    """Let an engine receive a version. Raises `NotServed` if it did not arrive.

    `written` is the version that this writes into the served weights, if it does. The engine is quarantined before.
    """
    if written is not None:
        engine.quarantine(written)
    if why := await engine.worker.prepare(handle):
        raise NotServed(f"{engine.process.name}: {why}")


async def swap_version(engine: EngineReplica, version: int, in_flight: Interruption) -> Pause:
    """Swap to a staged version, and set `engine.version`. Returns the pause, in which the engine sampled nothing.

    The pause has the duration that the engine reports. Its end is set to the end of the call. With `in_flight` "drain"
    the engine admits no request during the call. Completions with tokens of this version are withheld until
    `engine.release`. Raises `NotServed` if the swap was rolled back.
    """
    engine.quarantine(version)
    with engine.slots.closed() if in_flight == "drain" else nullcontext():
        swapped = await engine.worker.swap(version)
    if swapped is None:
        engine.release()
        raise NotServed(f"{engine.process.name} had other values after the swap to version {version} than were sent")
    pause, stats = swapped
    engine.count(stats)
    engine.version = version
    ended = engine.now()
    return engine.track, ended - pause, ended


def find_difference(
    engine: EngineReplica, served: Mapping[str, int], published: Mapping[str, int], version: int
) -> PublishError | None:
    """The error for an engine that serves other values than were published, by checksums; None if it does not."""
    for name, value in served.items():
        if value % 2**64 != published[name]:
            return PublishError(
                f"{engine.process.name} serves {name} with other values than the trainer published as version "
                f"{version}; nothing was trained on them. Try another sync.link"
            )
    return None


async def receive_while_sending(sent: asyncio.Future[float], receiving: Awaitable[Replies]) -> Replies:
    """Wait for the receivers. Returns their replies. Raises as soon as sending fails: they would wait without end."""
    received = asyncio.ensure_future(receiving)
    received.add_done_callback(succeeded)  # an error of the sender takes precedence
    try:
        await asyncio.wait((sent, received), return_when=asyncio.FIRST_COMPLETED)
        if sent.done() and not received.done():
            sent.result()
        return await received
    finally:
        received.cancel()


async def duration(call: Awaitable[Any]) -> float:
    """Await a call. Returns its duration in seconds."""
    began = time.perf_counter()
    await call
    return time.perf_counter() - began
