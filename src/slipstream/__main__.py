"""`slipstream` and `python -m slipstream`. Until a command handles Ctrl-C itself, Ctrl-C ends the process in one line.

`KeyboardInterrupt` can't do that: raised in an import it is a traceback, and libraries take it for a missing module.
"""

import os
import signal
import sys


def stop(_number: int, _frame: object) -> None:
    """End the process at once with the exit status of Ctrl-C."""
    os.write(2, b"slipstream: stopped at once\n")
    os._exit(128 + signal.SIGINT)


signal.signal(signal.SIGINT, stop)

from slipstream.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
