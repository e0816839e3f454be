"""The layout of a run directory, and atomic checkpoints in it.

config.toml  metrics.jsonl  evaluations.jsonl  events.jsonl  rollouts/  checkpoints/step_N/  policy/  summary.json
logs/
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import tempfile
import time
import tomllib
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

from slipstream.config.loading import dump
from slipstream.config.schema import Config, ConfigError
from slipstream.config.toml import to_toml
from slipstream.errors import NO_SYSTEM
from slipstream.rollout import Group
from slipstream.runtime.addresses import RENDEZVOUS_PREFIX
from slipstream.runtime.closing import finish_in_thread
from slipstream.runtime.integrity import MANIFEST, STATE, Damaged, manifest, read_whole, sealed
from slipstream.runtime.run_files import options_by_name, read_options, read_summary
from slipstream.runtime.serialization import read_lines, write_lines

try:
    import fcntl
except ImportError:  # on Windows
    raise ConfigError(NO_SYSTEM) from None

LOCKING_S = 60.0  # within which a process locks the scratch directory that it has created
PARTIAL, DAMAGED = ".partial", ".damaged"
READY = "ready"  # key of the state that names the file of ready groups
STEP = "step_"  # and a number: the name of a complete checkpoint
LOCK = "lock"  # name of the locked file


class RunDirectory:
    """The directory of one run, locked by one process at a time. Paths are attributes; checkpoints are atomic."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.metrics = path / "metrics.jsonl"
        self.summary = path / "summary.json"
        self.policy = path / "policy"
        self._checkpoints = path / "checkpoints"
        self._lock: IO[str] | None = None
        self._made = False  # by this process

    @classmethod
    def create(cls, path: Path) -> RunDirectory:
        """Create and lock the directory of a new run. Raises `ConfigError` if it holds a run or is in use."""
        directory = cls(path)
        if directory.config.exists():
            raise ConfigError(
                f"run.dir = {str(path)!r} holds a run; resume it with `slipstream train --resume {path}` "
                "or name another"
            )
        directory._create_and_lock()
        return directory

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """Lock the directory of a run, and remove partial checkpoints. Raises `ConfigError` if empty or in use."""
        directory = cls(path)
        if not directory.config.exists():
            raise ConfigError(
                f"{path} holds no run to resume (no config.toml); start one with `slipstream train CONFIG`"
            )
        directory._create_and_lock()
        directory.remove_partial()
        return directory

    def changed_options(self, config: Config) -> list[str]:
        """Options of sections that differ from `config.toml`, as "loop.steps = 6 (before: 3)"; none without that file.

        Lists of tables, such as `[[policies]]`, are not compared.
        """
        before = options_by_name(read_options(self.path))
        return [
            f"{name} = {to_toml(value)} (before: {to_toml(before[name])})"
            for name, value in options_by_name(tomllib.loads(dump(config))).items()
            if value != before.get(name, value) and not name.endswith(".chosen")  # which a run writes
        ]

    def write_config(self, config: Config) -> None:
        """Replace `config.toml`."""
        write_atomically(self.config, dump(config))

    def remove_partial(self) -> None:
        """Remove checkpoints whose writing was interrupted."""
        for partial in list(self._checkpoints.glob(f"*{PARTIAL}")):
            # The trainer of a killed controller may write files under the old name for a moment longer.
            shutil.rmtree(partial.rename(partial.with_name(uuid4().hex + PARTIAL)))

    def checkpoints(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        found = [p for p in self._checkpoints.glob(f"{STEP}*") if p.name.removeprefix(STEP).isdecimal()]
        return sorted(found, key=lambda p: int(p.name.removeprefix(STEP)))

    def checkpoint(self, step: int) -> Path:
        return self._checkpoints / f"{STEP}{step}"

    @asynccontextmanager
    async def new_checkpoint(self, step: int, keep: int) -> AsyncIterator[Path]:
        """A temporary directory for the checkpoint of `step`, renamed when the block ends without error.

        Waits for the disk happen in a thread. The last `keep` checkpoints are kept.
        """
        final = self.checkpoint(step)
        partial = final.with_name(final.name + PARTIAL)
        await asyncio.to_thread(shutil.rmtree, partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        await finish_in_thread(self._name, partial, final, keep)

    def _name(self, partial: Path, final: Path, keep: int) -> None:
        """Sync all files, give the checkpoint its final name, and remove all but the last `keep` checkpoints."""
        write_atomically(partial / MANIFEST, manifest(partial))
        for file in [p for p in partial.rglob("*") if p.is_file()]:
            sync(file)
        partial.rename(final)
        sync(self._checkpoints)
        for old in self.checkpoints()[:-keep]:
            shutil.rmtree(old)

    def newest_whole(self) -> tuple[Path | None, dict[str, Any], list[str]]:
        """The newest undamaged checkpoint (None before the first one), its state, and a message for each newer one,
        which is renamed. Raises `ConfigError` if all are damaged, or those of a run that has ended are gone."""
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
                f"{path}: {why}, and all other checkpoints are damaged; remove {self._checkpoints} and {self.summary} "
                "to start the run again"
            )
        if read_summary(self.path).get("steps"):
            raise ConfigError(
                f"{self.path} has ended, and its checkpoints are gone: start a new run with "
                f"--model.path {self.policy}, or remove {self.summary} to start this one again"
            )
        return None, {}, []

    def close(self) -> None:
        """Release the lock. Removes the directory if this process made it and only the lock is there."""
        if not self._lock:
            return
        with contextlib.suppress(OSError):  # the user may have removed it
            if self._made and [path.name for path in self.path.iterdir()] == [LOCK]:
                (self.path / LOCK).unlink()
                self.path.rmdir()
        self._lock.close()

    def _create_and_lock(self) -> None:
        try:
            self._made = not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = lock(self.path / LOCK)
            if not (self.path / LOCK).exists():
                raise BlockingIOError  # the process that held it has just removed it
            for left in self.path.glob(f"{RENDEZVOUS_PREFIX}*"):  # by the trainer of a killed controller
                shutil.rmtree(left, ignore_errors=True)
        except BlockingIOError:
            raise ConfigError(f"{self.path} is in use by another process; stop that run first") from None
        except OSError as error:
            raise ConfigError(f"run.dir = {str(self.path)!r}: {error.strerror}; name another directory") from None


def lock(path: Path, mode: str = "w") -> IO[str]:
    """Open and lock a file until it is closed. Raises `BlockingIOError` if another process holds it, unless both have
    mode "r"."""
    file = path.open(mode)
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if mode == "r" else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise
    return file


@contextmanager
def scratch_directory(command: str) -> Iterator[Path]:
    """A temporary directory for a command without a run. After an exception, which may name a log, its `logs` stay.

    Also removes the directories of this user and `command` whose process was killed: their locks are free.
    """
    prefix = f"slipstream-{command}-"
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # it is locked, or has no lock: its logs were kept
            if left.lstat().st_uid == os.getuid() and time.time() - (left / "lock").stat().st_mtime > LOCKING_S:
                with lock(left / "lock", "r+"):
                    shutil.rmtree(left)
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    with lock(folder / "lock"):
        kept = ""
        try:
            yield folder
        except Exception:
            kept = "logs"
            raise
        finally:
            for path in [path for path in folder.iterdir() if path.name != kept]:
                path.unlink() if path.is_file() else shutil.rmtree(path)
            with contextlib.suppress(OSError):  # logs are kept
                folder.rmdir()


def write_atomically(path: Path, text: str | Iterable[str]) -> None:
    """Replace a file's text, which may come in parts, so that a reader sees either the old or the new text."""
    partial = path.with_name(path.name + PARTIAL)
    with partial.open("w", encoding="utf-8") as file:
        file.writelines((text,) if isinstance(text, str) else text)
    sync(partial)
    partial.replace(path)


def write_state(checkpoint: Path, state: dict[str, Any], ready: Sequence[Group]) -> None:
    """Write the run's state and its ready groups. The state names their file, so one rename replaces both."""
    before = list(checkpoint.glob("ready_*.jsonl"))
    number = max((int(path.stem.removeprefix("ready_")) for path in before), default=-1) + 1
    groups = checkpoint / f"ready_{number}.jsonl"
    write_lines(groups, ready)
    sync(groups)
    write_json(checkpoint / STATE, sealed(state | {READY: groups.name}, [groups]))
    for old in before:
        old.unlink()


def read_ready(checkpoint: Path, state: dict[str, Any]) -> list[Group]:
    """The ready groups (sampled, not trained on) of a checkpoint that `newest_whole` found.

    Raises `ValueError` or `OSError` for a file not written by `write_state`.
    """
    return read_lines(checkpoint / state[READY])


def _set_aside(checkpoint: Path, why: str) -> str:
    """Rename a damaged checkpoint. Returns a message for the user."""
    aside = checkpoint.with_name(checkpoint.name + DAMAGED)
    shutil.rmtree(aside, ignore_errors=True)
    checkpoint.rename(aside)
    return f"checkpoint {checkpoint.name} is damaged ({why}): renamed to {aside.name}, using the previous one"


def write_json(path: Path, value: Any) -> None:
    write_atomically(path, json.dumps(value, indent=1) + "\n")


def sync(path: Path) -> None:
    """Flush a file, or the entries of a directory, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
