"""Base classes of errors whose message is written for users: what was found, where, and what to do.

The command line prints such a message without a traceback. Of any other exception, a worker reports the traceback, too.
"""


class UserError(RuntimeError):
    """An error whose message is all that a user needs."""


class InvalidInput(UserError, ValueError):
    """An option, a model, a file or a value that the run can't use."""
