"""A full disk, which libraries report in many ways, told in one line."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)
TEXTS = tuple(os.strerror(number) for number in FULL)  # as libraries in C++ and Rust pass them on
SAYS = "the disk is full"
LEAST = 2**16  # bytes; a disk with less has failed some write


class DiskFull(RuntimeError):
    """A file could not be written, since its disk is full or a quota is used up."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise `DiskFull` for whatever a block that writes to `path` raises because its disk is full."""
    try:
        yield
    except Exception as error:
        if full := describe_full_disk(error, path):
            raise DiskFull(full) from error
        raise


def describe_full_disk(error: BaseException, path: Path) -> str:
    """One line if the error, met while writing to `path`, is due to a full disk, else "".

    An error may say so, or follow from an earlier write that failed in silence: then the disk is full now.
    """
    if isinstance(error, DiskFull) or str(error).startswith(SAYS):  # the latter in another process
        return str(error)
    said = (isinstance(error, OSError) and error.errno in FULL) or any(text in str(error) for text in TEXTS)
    there = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    free = shutil.disk_usage(there).free
    if not said and free >= LEAST:
        return ""
    named = getattr(error, "filename", None) or path
    return f"{SAYS}: {named} can't be written, and {free / 1e6:.1f} MB are left there"
