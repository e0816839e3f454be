"""Report progress while the processes of a run start, which takes minutes for large engines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from slipstream.observe.formatting import duration

FIRST_REPORT_S = 60.0  # the next report follows when this time has doubled
MAX_LINE = 160  # characters

Result = TypeVar("Result")


async def report_startup(starting: Coroutine[Any, Any, Result], note: Callable[[str], None], logs: Path) -> Result:
    """Await `starting` and return its result. Until then, `note` the last line of each log at growing intervals."""
    started, began, wait = asyncio.ensure_future(starting), time.monotonic(), FIRST_REPORT_S
    try:
        while not (await asyncio.wait((started,), timeout=wait))[0]:
            wait = time.monotonic() - began
            note(f"still starting after {duration(wait)}, with this at the end of the logs in {logs}:")
            for log in sorted(logs.glob("*.log")):
                note(f"  {log.name}: {_last_line(log)}")
        return started.result()
    except asyncio.CancelledError:
        started.cancel()
        await asyncio.wait((started,))  # until its child processes have ended
        raise


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").replace("\r", "\n").split("\n")
    return next((line.strip()[:MAX_LINE] for line in reversed(lines) if line.strip()), "(nothing)")
