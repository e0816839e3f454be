"""Simulated engines and trainer, which compute nothing: for measurements of the controller.

They run at the lowest priority, and import no tensor library, so that hundreds of them start in seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from pathlib import Path
from typing import Any

from slipstream.rollout import Completion, VersionSpan
from slipstream.runtime.worker import Worker
from slipstream.step_stats import StepStats

VOCABULARY = 4096
NICE = 19
RATE = "SLIPSTREAM_SIMULATED_RATE"  # environment variable: tokens/s of each sequence; unset: answers at once


def lower_priority() -> None:
    """Give this process the lowest priority, and its session too: Linux may divide processors among sessions first."""
    os.nice(NICE)
    if hasattr(os, "SCHED_IDLE"):  # it runs while no other process wants the processor
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with contextlib.suppress(OSError):  # a kernel that shares by process only
        Path("/proc/self/autogroup").write_text(str(NICE))


class Engine(Worker):
    """An `EngineWorker` that answers each request with as many random tokens as it asks for."""

    def __init__(self, *_: Any) -> None:
        lower_priority()
        draw = random.Random(os.getpid())
        self._tokens = [draw.randrange(VOCABULARY) for _ in range(4 * 8192)]
        self._logprobs = [-draw.random() for _ in self._tokens]
        self._draw, self._version, self._count = draw, 0, 0
        self._rate = float(os.environ.get(RATE, "inf"))

    async def generate(self, prompt: Any, sampling: Any) -> Completion:
        count = sampling.max_tokens
        await asyncio.sleep(count / self._rate * self._draw.uniform(0.8, 1.2))
        first = self._draw.randrange(len(self._tokens) - count + 1)
        self._count += count
        spans = (VersionSpan(self._version, 0, count),)
        tokens, logprobs = (tuple(all_[first : first + count]) for all_ in (self._tokens, self._logprobs))
        return Completion(prompt, tokens, logprobs, spans, "length", sampling.temperature)

    async def swap(self, version: int) -> tuple[float, dict[str, float]]:
        self._version = version
        return 0.0, await self.stats()

    async def stats(self) -> dict[str, float]:
        return {"tokens": self._count, "tokens_discarded": 0, "busy_s": 0.0}

    async def connect(self, connection_info: Any, rank: int) -> None: ...

    async def prepare(self, handle: Any) -> None: ...

    async def checksums(self, names: Any) -> dict[str, int]:
        return dict.fromkeys(names, 0)

    async def longest_in_flight(self) -> int:
        return 0

    async def sleep(self, level: int) -> None: ...

    async def wake(self, tags: Any) -> None: ...

    async def export_ipc_handles(self, shapes: Any) -> list[dict[str, str]]:
        return []

    async def set_version(self, version: int) -> None: ...


class Student(Worker):
    """A `TrainerWorker` that answers at once, without training."""

    def __init__(self, *_: Any) -> None:
        lower_priority()
        self._steps = 0

    async def open_link(self, receivers: int) -> dict[str, Any]:
        return {"shapes": {"weight": [1]}, "receivers": receivers}

    async def stage(self, version: int) -> dict[str, Any]:
        return {"version": version}

    async def score(self, completions: Any) -> list[list[float]]:
        return [list(c.logprobs) for c in completions]

    async def step(self, batch: Any) -> StepStats:
        self._steps += 1
        numbers: dict[str, Any] = dict.fromkeys(StepStats.__slots__, 0.0)
        numbers |= {"step": self._steps, "tokens": batch.tokens, "policies": {}}
        return StepStats(**numbers)

    async def save(self, path: Path, *_: Any) -> None:
        path.mkdir()
        (path / "weights").write_bytes(bytes(2**20))

    async def send(self, handle: Any) -> None: ...

    async def release(self, handle: Any) -> None: ...

    async def check_connection(self) -> None: ...

    async def checksums(self, names: Any) -> dict[str, int]:
        return dict.fromkeys(names, 0)

    async def shapes(self) -> dict[str, list[int]]:
        return {"weight": [1]}

    async def compute_on(self, handles: Any) -> None: ...

    async def restore(self, path: Path) -> None: ...

    async def export(self, path: Path) -> None: ...

    async def offload(self) -> None: ...

    async def onload(self) -> None: ...


class Idle(Worker):
    """A worker that is started and killed, like a reward worker."""
