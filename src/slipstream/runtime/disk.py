"""Detection of a full disk, which libraries report in many ways, with a message of one line."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slipstream.errors import UserError

FULL = (errno.ENOSPC, errno.EDQUOT)
TEXTS = tuple(os.strerror(number) for number in FULL)  # in the messages of C++ and Rust libraries
MESSAGE = "the disk is full"
DENIED = re.compile(r"\[Errno \d+\] ([^:]+): '([^']+)'")  # the text of an `OSError`: reason and file
NAMED = re.compile(f"(?:{'|'.join(map(re.escape, TEXTS))}): '([^']+)'")  # the file, in the text of an `OSError`
SHARED_MEMORY = Path("/dev/shm")
FULL_BELOW_BYTES = 2**16  # free space


class DiskFull(UserError):
    """A file could not be written, since its disk is full or a quota is used up."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise `DiskFull` for an exception of the block that is due to a full disk at `path`."""
    try:
        yield
    except Exception as error:
        if full := describe_full_disk(error, path):
            raise DiskFull(full) from error
        raise


def describe_full_disk(error: BaseException, path: Path) -> str:
    """A message of one line if an error during a write to `path` is due to a full disk, else "".

    The error either reports the full disk, or follows an earlier write whose failure was not reported. In the second
    case the disk is still full.
    """
    if isinstance(error, DiskFull) or str(error).startswith(MESSAGE):  # the latter in another process
        return str(error)
    reported = (isinstance(error, OSError) and error.errno in FULL) or any(text in str(error) for text in TEXTS)
    has_other_reason = isinstance(error, OSError) and error.errno and not reported
    if has_other_reason or (not reported and free_bytes(path) >= FULL_BELOW_BYTES):
        return ""
    if found := NAMED.search(str(error)):
        named = Path(found[1])
    else:  # the write may have gone to memory or to temporary files
        named = next(
            (p for p in (path, SHARED_MEMORY, Path(tempfile.gettempdir())) if free_bytes(p) < FULL_BELOW_BYTES), path
        )
    return f"{MESSAGE}: {named} can't be written, and {free_bytes(named) / 1e6:.1f} MB are left there"


def describe_unusable_file(error: BaseException, directory: Path) -> str:
    """A message of one line if an `OSError`, of this process or of a worker, names a file in `directory`, else ""."""
    if (found := DENIED.search(str(error))) and Path(found[2]).absolute().is_relative_to(directory.absolute()):
        return f"{found[2]} can't be used ({found[1]})"
    return ""


def directory_bytes(path: Path) -> int:
    """Bytes of the files in a directory and its subdirectories."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def free_bytes(path: Path) -> int:
    """Free bytes of the file system of `path`, which need not exist."""
    return shutil.disk_usage(next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())).free
