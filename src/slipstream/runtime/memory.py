"""Memory of a process: its size, and garbage-collector tuning for processes that hold millions of small objects."""

from __future__ import annotations

import contextlib
import gc
import math
import os
from pathlib import Path

PAGE = os.sysconf("SC_PAGE_SIZE")
# A full collection then runs after five million new containers. By default Python runs one after a growth of 25 %, and
# visits every token of every list. The smaller collections visit 50 and 200 objects: with 500, among them lists of
# 8,192 tokens, one takes over ten milliseconds, in which no other thread runs.
THRESHOLDS = (50, 4, 25_000)


def unshared_bytes(children: bool = False) -> int:
    """Resident memory without files and shared memory; with `children` of descendants, too; 0 without /proc.

    Memory that a forked process shares with its parent counts for both.
    """
    total, processes = 0, [os.getpid()]
    while processes:
        process = Path("/proc") / str(processes.pop())
        with contextlib.suppress(OSError):  # it ended meanwhile
            _, resident, shared, *_ = map(int, (process / "statm").read_text().split())
            total += (resident - shared) * PAGE
            for thread in (process / "task").iterdir() if children else ():
                processes += map(int, (thread / "children").read_text().split())
    return total


def available_bytes() -> float:
    """Memory of this host or container that processes can still take; infinity where the system does not say."""
    found, group = math.inf, Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, LookupError):
        values = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        found = 1024.0 * int(values["MemAvailable"].split()[0])
    with contextlib.suppress(OSError, LookupError, ValueError):  # "max" is no number
        used = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        found = min(found, float(int((group / "memory.max").read_text()) - int(used["anon"])))
    return found


def freeze_heap() -> None:
    """Exclude all existing objects from garbage collection: a visit to those of libraries takes tenths of a second."""
    gc.collect()
    gc.freeze()


def raise_gc_thresholds() -> None:
    """Make full collections rare, for processes that create few reference cycles, such as vLLM's."""
    gc.set_threshold(*THRESHOLDS)
