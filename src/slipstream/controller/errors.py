"""The error of a run that cannot continue."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from slipstream.errors import UserError
from slipstream.observe.recorder import RecordError
from slipstream.runtime.disk import DiskFull, describe_full_disk
from slipstream.runtime.worker import WorkerError


class RunError(UserError):
    """The run cannot continue. The message is written for the user; the run can be resumed from its directory."""


@contextlib.contextmanager
def report_full_disk(path: Path) -> Iterator[None]:
    """Turn errors caused by a full disk into a `RunError` with the command that resumes the run in `path`."""
    try:
        yield
    except RecordError:
        raise  # its message already names the full disk
    except (OSError, WorkerError, DiskFull) as error:
        if not (full := describe_full_disk(error, path)):
            raise
        again = f"slipstream train --resume {path}" if (path / "config.toml").exists() else "start the run again"
        raise RunError(f"{full}; free space, then: {again}") from None
