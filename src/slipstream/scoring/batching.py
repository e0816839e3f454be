"""Batch the requests to a reward model or teacher that arrive during a forward pass for the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Request = TypeVar("Request")
Result = TypeVar("Result")


class Batched(Generic[Request, Result]):
    """Calls `compute` once for all requests that have arrived; it returns one result for each."""

    def __init__(self, compute: Callable[[Sequence[Request]], Sequence[Result]]) -> None:
        self._compute = compute
        self._waiting: list[tuple[Request, asyncio.Future[Result]]] = []

    async def ask(self, request: Request) -> Result:
        """The result for this request. Raises what `compute` raises."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self.flush)  # after the calls that have arrived with this one
        future: asyncio.Future[Result] = loop.create_future()
        self._waiting.append((request, future))
        return await future

    def flush(self) -> None:
        """Compute all waiting requests now; cancelled requests are left out."""
        waiting, self._waiting = [w for w in self._waiting if not w[1].done()], []
        if not waiting:
            return
        try:
            results = self._compute([request for request, _ in waiting])
        except Exception as error:
            for _, future in waiting:
                future.set_exception(error)
            return
        for (_, future), result in zip(waiting, results, strict=True):
            future.set_result(result)
