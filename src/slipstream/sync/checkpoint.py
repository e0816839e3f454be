"""The `checkpoint` link: each version is a safetensors file that generators load.

The slowest link, for engines that share only a file system with the trainer. A file is renamed to its final name when
it is complete. Each worker reads its own part while the engine decodes; only the copy into the served weights pauses
it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from slipstream.config.schema import Config
from slipstream.errors import InvalidInput
from slipstream.model.device import dtype_of
from slipstream.sync.link import ConnectionInfo, Parameters, PublishHandle, Receiver, Sender, Shapes, shapes_of


class CheckpointSender(Sender):
    """The trainer's end. Removes unfinished files of an earlier run at the start.

    `release` keeps the served version and the newest older ones, `sync.keep_versions` in total but at least one. It
    removes newer files, which a run that resumed at an older version has left. `close` keeps the newest
    `sync.keep_versions`, so none for 0.
    """

    trainer_free_after_send = independent_receivers = True

    def __init__(self, parameters: Parameters, config: Config, directory: Path, receivers: int) -> None:
        self._parameters, self._dtype, self._keep = parameters, dtype_of(config), config.sync.keep_versions
        self._directory = directory / "weights"
        self._directory.mkdir(parents=True, exist_ok=True)
        for path in self._directory.iterdir():  # an unfinished write of an earlier run
            if version_of(path) < 0:
                remove(path)

    def connection_info(self) -> ConnectionInfo:
        return {"shapes": shapes_of(self._parameters)}

    def stage(self, version: int) -> PublishHandle:
        path = self._directory / f"version_{version}.safetensors"
        partial = path.with_suffix(".partial")
        tensors = {n: p.detach().to("cpu", self._dtype, copy=True) for n, p in self._parameters.items()}
        save_file(tensors, partial)
        partial.rename(path)
        return {"version": version, "path": str(path.resolve())}

    def release(self, handle: PublishHandle) -> None:
        served = Path(handle["path"])
        others = [path for path in self._directory.iterdir() if path.name != served.name]
        # Newer files are from before a kill: the run has resumed at an older version.
        older = newest_first(path for path in others if version_of(path) < handle["version"])
        for path in set(others) - set(older[: max(1, self._keep) - 1]):
            remove(path)

    def close(self) -> None:
        for path in newest_first(self._directory.iterdir())[self._keep :]:
            remove(path)
        if not self._keep:
            self._directory.rmdir()


class CheckpointReceiver(Receiver):
    """The engine's end: maps the safetensors file of a version. Indexing a tensor reads only the indexed part."""

    rebindable = True

    def __init__(self, connection_info: ConnectionInfo, shapes: Shapes, rank: int, device: torch.device) -> None:
        self._device = str(device)

    def prepare(self, handle: PublishHandle) -> dict[str, Any]:
        try:
            file: Any = safe_open(handle["path"], framework="pt", device=self._device)
        except FileNotFoundError:
            remedy = "run.dir must be on a file system that this host mounts at the same path"
            raise InvalidInput(f"{remedy}: there is no {handle['path']} here") from None
        return {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)


class Checkpoint:
    Sender, Receiver = CheckpointSender, CheckpointReceiver


def version_of(path: Path) -> int:
    """Version in the name of a published file or (`sync.restart`) model directory; -1 for any other name."""
    number = path.name.removeprefix("version_").removesuffix(".safetensors")
    return int(number) if number.isdecimal() else -1


def newest_first(paths: Iterable[Path]) -> list[Path]:
    """Published versions, the newest first."""
    return sorted(paths, key=version_of, reverse=True)


def remove(path: Path) -> None:
    """Remove a published version: a file, or (`sync.restart`) a model directory."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
