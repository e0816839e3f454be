"""Calls to vLLM's workers that nobody waits for: they are made between two passes, and steps go on meanwhile."""

from __future__ import annotations

import os
import sys
import threading
import time
from concurrent.futures import Future
from typing import Any

from slipstream.vllm_releases import core_died, post

LOOK = 0.5  # seconds between two looks whether the core lives
POLL = 0.002  # seconds from one question to the workers to the same again


class Answer:
    """What the workers answer to a question that is put, once they have answered the call before it, again and again
    until each of them knows. Nothing waits for it."""

    def __init__(self, llm: Any, method: str, before: Future[list[Any]]) -> None:
        self._llm, self._method, self._before = llm, method, before
        self._pending: Future[list[Any]] | None = None
        self._asked = 0.0

    def get(self) -> list[Any] | None:
        """The answers, or None as long as one is missing. Raises what went wrong."""
        if not _done(self._before, self._llm):
            return None
        if self._pending is None:
            if time.perf_counter() - self._asked < POLL:
                return None
            self._pending, self._asked = post(self._llm, self._method), time.perf_counter()
        if not _done(self._pending, self._llm):
            return None
        answers, self._pending = self._pending.result(), None
        return None if any(answer is None for answer in answers) else answers


def end_with_core(llm: Any) -> threading.Event:
    """End this process soon after vLLM's core has died, for whose answers calls of vLLM wait for ever.

    Not any more once the event is set that is returned, as it has to be before vLLM is shut down.
    """
    over = threading.Event()

    def watch() -> None:
        while not over.wait(LOOK):
            if core_died(llm) and not over.is_set():
                print("vLLM's engine core died; what it said of that is above", file=sys.stderr, flush=True)
                os._exit(1)

    threading.Thread(target=watch, name="end with vLLM's core", daemon=True).start()
    return over


def _done(answer: Future[list[Any]], llm: Any) -> bool:
    """Whether it is there. Raises what went wrong; vLLM itself answers nothing once its core is dead."""
    if not answer.done() and core_died(llm):
        raise RuntimeError("vLLM's engine core died")
    return answer.done() and answer.result() is not None
