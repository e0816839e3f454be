"""Memory of this process and its children."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

PAGE = os.sysconf("SC_PAGE_SIZE")


def resident_bytes(children: bool = False) -> int:
    """Resident memory of this process, without shared pages; with that of its descendants if `children`.

    0 on systems without /proc.
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
