"""What a person is told while a run's processes start: an engine takes minutes, or for ever if something hangs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from slipstream.observe.figures import duration

FIRST = 60.0  # seconds until something is said; then whenever it has taken twice as long
LONGEST = 160  # characters of what is shown of a log

Result = TypeVar("Result")


async def told_of(starting: Coroutine[Any, Any, Result], tell: Callable[[str], None], logs: Path) -> Result:
    """What `starting` returns. As long as it takes, tell now and then what each of the `logs` has said last."""
    started, began, wait = asyncio.ensure_future(starting), time.monotonic(), FIRST
    try:
        while not (await asyncio.wait((started,), timeout=wait))[0]:
            wait = time.monotonic() - began
            tell(f"still starting after {duration(wait)}, with this at the end of the logs in {logs}:")
            for log in sorted(logs.glob("*.log")):
                tell(f"  {log.name}: {_last_line(log)}")
        return started.result()
    except asyncio.CancelledError:
        started.cancel()
        await asyncio.wait((started,))  # until nothing that it has begun is left
        raise


def _last_line(log: Path) -> str:
    said = log.read_text(errors="replace").replace("\r", "\n").split("\n")
    return next((line.strip()[:LONGEST] for line in reversed(said) if line.strip()), "(nothing)")
