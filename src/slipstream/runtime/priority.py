"""Lower priority for processes that can wait, such as trackers: controller, engines and trainer run first."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from pathlib import Path

VARIABLE = "SLIPSTREAM_NICENESS"  # environment variable of workers, which call `lower_priority_as_asked`
ENVIRONMENT_NICENESS = 5  # of workers that play episodes or compute rewards: the controller goes first 3:1
OBSERVER_NICENESS = 10  # of trackers, advice and the server of `slipstream watch`
SESSION_TRIES = 100


def at_niceness(niceness: int) -> dict[str, str]:
    """Environment variables of a worker with at least this niceness."""
    return {VARIABLE: str(niceness)}


def lower_priority_as_asked() -> None:
    """As `lower_process_priority`, with the niceness that the environment variable names, if any."""
    if niceness := os.environ.get(VARIABLE):
        lower_process_priority(int(niceness))


def lower_process_priority(niceness: int) -> None:
    """Give this process at least this niceness, on Linux; and its session, if it leads one.

    Linux often divides processors among sessions first, and among the processes of a session by their niceness.
    Threads that are already running keep their niceness.
    """
    if sys.platform != "linux":
        return
    os.setpriority(os.PRIO_PROCESS, 0, max(niceness, os.getpriority(os.PRIO_PROCESS, 0)))
    if os.getsid(0) == os.getpid():
        threading.Thread(target=_lower_session, args=(niceness,), name="priority", daemon=True).start()


def _lower_session(niceness: int) -> None:
    """Try again while Linux refuses: processes without privileges may do this ten times a second altogether."""
    delays = random.Random()  # not the module's generator, which a user's environment may have seeded
    for _ in range(SESSION_TRIES):
        try:
            Path("/proc/self/autogroup").write_text(str(niceness))
        except BlockingIOError:
            time.sleep(delays.uniform(0.1, 1.0))
            continue
        except OSError:  # this kernel doesn't divide processors among sessions
            pass
        return
