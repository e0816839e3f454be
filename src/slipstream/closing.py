"""Closing of several things, where one that fails leaves none of the others open."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any


class CloseError(RuntimeError):
    """Something of the user's that could not be closed, in one line."""


@asynccontextmanager
async def closing(*closers: Callable[[], Awaitable[Any]]) -> AsyncIterator[None]:
    """Call all of these at the end, one after the other. Raises the first error, be it the body's or a closer's; others
    are printed."""
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
    """Call all of these at once, and wait for all. Raises the first error."""
    for answer in await asyncio.gather(*(close() for close in closers), return_exceptions=True):
        if isinstance(answer, BaseException):
            raise answer
