"""`slipstream` and `python -m slipstream`.

Until a command handles Ctrl-C itself, Ctrl-C prints one line and ends the process. A `KeyboardInterrupt` during an
import would print a traceback, or libraries would take it for a missing module.
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
