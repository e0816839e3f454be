"""Memory of a process: its size, and garbage-collector tuning for processes that hold millions of small objects."""

from __future__ import annotations

import contextlib
import gc
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


def available_memory() -> int:
    """Available memory of this host, or what its cgroup leaves if that is less, in bytes; -1 if unknown."""
    found = []
    with contextlib.suppress(OSError, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")]
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        found.append(limit - used)  # "max" is no number
    return min(found, default=-1)


def freeze_heap() -> None:
    """Exclude all existing objects from garbage collection: a visit to those of libraries takes tenths of a second."""
    gc.collect()
    gc.freeze()


def raise_gc_thresholds() -> None:
    """Make full collections rare, for processes that create few reference cycles, such as vLLM's."""
    gc.set_threshold(*THRESHOLDS)
