"""Digests that detect damaged files of a checkpoint.

`manifest.json` lists the files in the subdirectories of a checkpoint, which never change. `run.json` changes in place:
it holds its own digest, and the digests of the files in its directory that it names.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from slipstream.errors import InvalidInput

MANIFEST, STATE = "manifest.json", "run.json"
SEAL = "sealed"


class Damaged(InvalidInput):
    """A checkpoint with a damaged or missing file. The message names the file."""


def manifest(checkpoint: Path) -> str:
    """The text of the manifest: size and digest of each file in the checkpoint's subdirectories."""
    files = [path for path in checkpoint.glob("*/**/*") if path.is_file()]
    names = [path.relative_to(checkpoint).as_posix() for path in files]
    return json.dumps(dict(sorted(zip(names, _sizes_and_digests(files), strict=True))), indent=1)


def sealed(state: dict[str, Any], files: Iterable[Path] = ()) -> dict[str, Any]:
    """`state` with a digest of its JSON and of `files`, which are in the same directory."""
    digests = {path.name: _size_and_digest(path) for path in files}
    return {**state, SEAL: {"files": digests, "digest": _digest_of_text(json.dumps([state, digests]))}}


def read_whole(checkpoint: Path) -> dict[str, Any]:
    """The state of a checkpoint, once all its files are compared with their digests. Raises `Damaged`."""
    try:
        listed = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        state: dict[str, Any] = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
        seal = state.pop(SEAL)
        if _digest_of_text(json.dumps([state, seal["files"]])) != seal["digest"]:
            raise Damaged(f"{STATE} has other bytes than were written")
        if listed == {}:
            raise Damaged(f"{MANIFEST} lists no file")
        listed |= seal["files"]
        for name, found in zip(listed, _sizes_and_digests([checkpoint / name for name in listed]), strict=True):
            if found != listed[name]:
                raise Damaged(f"{name} has other bytes than were written")
    except OSError as error:
        raise Damaged(f"{error.filename} can't be read: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise error if isinstance(error, Damaged) else Damaged(f"{STATE} or {MANIFEST} is damaged: {error}") from None
    return state


def _sizes_and_digests(paths: list[Path]) -> list[list[Any]]:
    with ThreadPoolExecutor() as threads:  # a digest of a large file is computed without the interpreter's lock
        return list(threads.map(_size_and_digest, paths))


def _size_and_digest(path: Path) -> list[Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return [file.tell(), digest]


def _digest_of_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
