"""Cost of one sandboxed call, and of 64 at once for the event loop, for each kind of isolation that works here.

    python benchmarks/sandbox.py [--calls 50] [--json FILE]

Every call is a program that prints one number, or a function with one assertion, which takes two sandboxes. Processor
time is that of all processes of a call; the time of day depends on other load, too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from lean import children_seconds
from work import at_least_one, conditions

from slipstream.config.schema import ConfigError
from slipstream.environments.code import grade
from slipstream.environments.sandbox import PYTHON, Sandbox, isolation

AT_ONCE = 64


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--calls", type=at_least_one, default=50)
    found.add_argument("--json", type=Path)
    return found


async def cost(call: Callable[[], Awaitable[Any]], calls: int) -> dict[str, float]:
    """Median milliseconds of calls one after another, and processor milliseconds of one."""
    processor, seconds = children_seconds(), []
    for _ in range(calls):
        began = time.perf_counter()
        await call()
        seconds.append(time.perf_counter() - began)
    used = (children_seconds() - processor) / calls
    return {"ms": round(statistics.median(seconds) * 1e3, 1), "processor_ms": round(used * 1e3, 1)}


async def at_once(box: Sandbox) -> dict[str, float]:
    """Seconds of 64 calls at once, and by how much the event loop was late meanwhile, in ms."""
    began, late = time.perf_counter(), []
    calls = asyncio.gather(*(box.python("print(1)") for _ in range(AT_ONCE)))
    while not calls.done():
        due = time.perf_counter() + 0.001
        await asyncio.sleep(0.001)
        late.append((time.perf_counter() - due) * 1e3)
    late.sort()
    return {"s": time.perf_counter() - began, "late_p99_ms": late[len(late) * 99 // 100], "late_max_ms": late[-1]}


async def measure(kind: str, calls: int) -> dict[str, Any]:
    box = Sandbox(kind=kind)
    tests = ["assert f(1) == 1"]
    return {
        "program": await cost(lambda: box.python("print(1)"), calls),
        "shell": await cost(lambda: box.shell("echo 1"), calls),
        "assertion": await cost(lambda: grade("def f(x): return x", tests, box), calls),
        "at_once": await at_once(box),
    }


async def bare() -> None:
    await asyncio.to_thread(subprocess.run, [PYTHON, "-c", "print(1)"], check=True, capture_output=True)


def main() -> None:
    options = parser().parse_args()
    found: dict[str, Any] = {"bare python": {"program": asyncio.run(cost(bare, options.calls))}}
    print("bare python:", found["bare python"])
    for kind in ("bwrap", "namespaces", "rlimits"):
        try:
            isolation(kind)
        except ConfigError as error:
            print(error)
            continue
        found[kind] = asyncio.run(measure(kind, options.calls))
        print(f"{kind}: {found[kind]}")
    if options.json:
        options.json.write_text(json.dumps({**conditions(), "kinds": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
