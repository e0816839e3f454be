"""`slipstream` and `python -m slipstream`. Until a command handles Ctrl-C itself, Ctrl-C ends the process in one line.

`KeyboardInterrupt` can't do that: raised in an import it is a traceback, and libraries take it for a missing module.
"""

import os
import sys


def stop(*_: object) -> None:
    """End the process at once with the exit status of Ctrl-C."""
    os.write(2, b"slipstream: stopped at once\n")
    os._exit(130)


try:
    import signal  # which loads `enum`

    signal.signal(signal.SIGINT, stop)
except KeyboardInterrupt:
    stop()

from slipstream.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
