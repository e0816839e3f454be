"""Calls to vLLM's workers that nobody waits for: they are made between two passes, and steps go on meanwhile."""

from __future__ import annotations

import os
import sys
import threading
import time
import uuid
from concurrent.futures import Future
from typing import Any

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


def post(llm: Any, method: str, *arguments: Any) -> Future[list[Any]]:
    """Have all workers call a method between two passes, without waiting for the pass that is under way.

    It is `LLMEngine.collective_rpc` without its wait. Where vLLM lacks the parts for that, or runs in this process, it
    is called and waited for.
    """
    core = llm.engine_core
    answer: Future[list[Any]] = Future()
    if hasattr(core, "utility_results") and hasattr(core, "_send_input"):
        from vllm.v1.engine import EngineCoreRequestType

        number = uuid.uuid1().int >> 64
        core.utility_results[number] = answer
        core._send_input(EngineCoreRequestType.UTILITY, (0, number, "collective_rpc", (method, None, arguments, None)))
    else:
        answer.set_result(llm.collective_rpc(method, args=arguments))
    return answer


def core_died(llm: Any) -> bool:
    """Whether vLLM's core, if it is a process of its own, has ended."""
    return bool(getattr(getattr(llm.engine_core, "resources", None), "engine_dead", False))


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
