"""Base classes of errors whose message is written for users: what was found, where, and what to do.

The command line prints such a message without a traceback. Of any other exception, a worker reports the traceback, too.
"""

NO_SYSTEM = "Slipstream runs on Linux, and on macOS on the CPU; on Windows use WSL 2"


class UserError(RuntimeError):
    """An error whose message is all that a user needs."""


class InvalidInput(UserError, ValueError):
    """An option, a model, a file or a value that the run can't use."""


class RunError(UserError):
    """The run cannot continue. It can be resumed from its directory."""
