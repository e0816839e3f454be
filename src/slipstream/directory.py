"""A run's directory: what lies where, and how a checkpoint becomes whole or never was.

config.toml  metrics.jsonl  evaluations.jsonl  rollouts/  checkpoints/step_N/  policy/  summary.json  logs/
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Any

from slipstream.config import NO_SYSTEM, Config, ConfigError, dump
from slipstream.integrity import MANIFEST, STATE, Damaged, manifest, read_whole, sealed
from slipstream.rollout import Group
from slipstream.serialization import read_lines, write_lines

try:
    import fcntl
except ImportError:  # Windows has none
    raise ConfigError(NO_SYSTEM) from None

PARTIAL, DAMAGED = ".partial", ".damaged"
READY = "ready"  # in the state: the file of the ready groups
STEP = re.compile(r"step_\d+")  # a whole checkpoint's name


class RunDirectory:
    """The directory of one run, held by one process at a time. Paths are attributes; checkpoints are atomic."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.summary = path / "summary.json"
        self.policy = path / "policy"
        self._checkpoints = path / "checkpoints"
        self._lock: IO[str] | None = None

    @classmethod
    def create(cls, path: Path) -> RunDirectory:
        """A new run's directory; there is a run in it from `write_config` on. Raises `ConfigError` if there is one."""
        directory = cls(path)
        if directory.config.exists():
            raise ConfigError(
                f"run.dir = {str(path)!r} holds a run; go on with `slipstream train --resume {path}` or name another"
            )
        directory._hold()
        return directory

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """The directory of a run to go on with. Raises `ConfigError` where there is none or it is in use."""
        directory = cls(path)
        if not directory.config.exists():
            raise ConfigError(
                f"{path} holds no run to resume (no config.toml); start one with `slipstream train CONFIG`"
            )
        directory._hold()
        for partial in directory._checkpoints.glob(f"*{PARTIAL}"):
            shutil.rmtree(partial)
        return directory

    def write_config(self, config: Config) -> None:
        """This is the run's configuration from now on."""
        write_atomically(self.config, dump(config))

    def checkpoints(self) -> list[Path]:
        """Checkpoints that were written to their end, oldest first."""
        found = [p for p in self._checkpoints.glob("step_*") if STEP.fullmatch(p.name)]
        return sorted(found, key=lambda p: int(p.name.removeprefix("step_")))

    def checkpoint(self, step: int) -> Path:
        return self._checkpoints / f"step_{step}"

    @asynccontextmanager
    async def new_checkpoint(self, step: int, keep: int) -> AsyncIterator[Path]:
        """A directory to write the checkpoint of `step` into; it gets its name when the block ends without error.

        What waits for the disk does so in a thread.
        """
        final = self.checkpoint(step)
        partial = final.with_name(final.name + PARTIAL)
        await asyncio.to_thread(shutil.rmtree, partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        await asyncio.to_thread(self._name, partial, final, keep)

    def _name(self, partial: Path, final: Path, keep: int) -> None:
        """Give a checkpoint its name once all of it is on the disk, and remove those before the last `keep`."""
        write_atomically(partial / MANIFEST, manifest(partial))
        for file in [p for p in partial.rglob("*") if p.is_file()]:
            sync(file)
        partial.rename(final)
        sync(self._checkpoints)
        for old in self.checkpoints()[:-keep]:
            shutil.rmtree(old)

    def newest_whole(self) -> tuple[Path | None, dict[str, Any], list[str]]:
        """The newest checkpoint whose files are those that were written, its state, and what is wrong with newer ones,
        which are renamed; None before the first checkpoint. Raises `ConfigError` if all are damaged."""
        damaged: dict[Path, str] = {}
        for path in reversed(self.checkpoints()):
            try:
                state = read_whole(path)
            except Damaged as error:
                damaged[path] = str(error)
                continue
            return path, state, [_set_aside(path, why) for path, why in damaged.items()]
        if damaged:
            path, why = next(iter(damaged.items()))
            raise ConfigError(
                f"{path}: {why}, and no other checkpoint is whole; remove {self._checkpoints} to begin from the start"
            )
        return None, {}, []

    def close(self) -> None:
        if self._lock:
            self._lock.close()

    def _hold(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = lock(self.path / "lock")
        except BlockingIOError:
            raise ConfigError(f"{self.path} is in use by another process; stop that run first") from None
        except OSError as error:
            raise ConfigError(f"run.dir = {str(self.path)!r}: {error.strerror}; name another directory") from None


def lock(path: Path, mode: str = "w") -> IO[str]:
    """The file, locked for this process until it is closed. Raises `BlockingIOError` if another process holds it."""
    file = path.open(mode)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise
    return file


def write_atomically(path: Path, text: str) -> None:
    """Replace a file's text so that a reader sees the old or the new, whole."""
    partial = path.with_name(path.name + PARTIAL)
    partial.write_text(text, encoding="utf-8")
    sync(partial)
    partial.replace(path)


def write_state(checkpoint: Path, state: dict[str, Any], ready: Sequence[Group]) -> None:
    """Write what a checkpoint knows beside the weights, as `RunDirectory.newest_whole` and `read_ready` read it.

    The ready groups are in a file that the state names, so that both change at once.
    """
    before = list(checkpoint.glob("ready_*.jsonl"))
    number = max((int(path.stem.removeprefix("ready_")) for path in before), default=-1) + 1
    groups = checkpoint / f"ready_{number}.jsonl"
    write_lines(groups, ready)
    sync(groups)
    write_json(checkpoint / STATE, sealed(state | {READY: groups.name}, [groups]))
    for old in before:
        old.unlink()


def read_ready(checkpoint: Path, state: dict[str, Any]) -> list[Group]:
    """The ready groups of a checkpoint. Raises `ValueError` or `OSError` for what `write_state` has not written."""
    return read_lines(checkpoint / state[READY])


def _set_aside(checkpoint: Path, why: str) -> str:
    """Rename a damaged checkpoint. Returns what to tell the user."""
    aside = checkpoint.with_name(checkpoint.name + DAMAGED)
    shutil.rmtree(aside, ignore_errors=True)
    checkpoint.rename(aside)
    return f"checkpoint {checkpoint.name} is damaged ({why}): renamed to {aside.name}, the one before is taken"


def write_json(path: Path, value: Any) -> None:
    write_atomically(path, json.dumps(value, indent=1) + "\n")


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
