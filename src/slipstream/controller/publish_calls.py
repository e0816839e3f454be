"""Errors of a publish, and waits for both of its ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Any

from slipstream.errors import UserError
from slipstream.generators.pool import EngineReplica
from slipstream.runtime.worker import succeeded

Replies = dict[EngineReplica, Any]


class PublishError(UserError):
    """An engine did not receive the published weights, or serves different ones."""


def differing(
    generator: EngineReplica, names: list[str], served: dict[str, int], published: dict[str, int], version: int
) -> PublishError | None:
    """The error of an engine that serves a parameter with another checksum than the published one, or None."""
    other = next((name for name in names if served[name] % 2**64 != published[name]), "")
    return (
        PublishError(
            f"{generator.process.name} serves {other} with other values than the trainer published as version "
            f"{version}; nothing was trained on them. Try another sync.link"
        )
        if other
        else None
    )


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
