"""The `checkpoint` link: each version is a safetensors file that generators load.

The slowest link, for generators that share nothing with the trainer but a file system. A file gets its name only when
it is whole; it is read while the generator goes on decoding, each worker its own part, and only the copy into place
holds it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from slipstream.config import Config
from slipstream.models import dtype_of
from slipstream.sync.link import Parameters, Sender, Ticket, refuse_other_parameters, shapes_of


class CheckpointSender(Sender):
    """The trainer's end. Older files are removed once every generator has left them; `sync.keep` of them stay."""

    lets_go = True

    def __init__(self, parameters: Parameters, config: Config, directory: Path, receivers: int) -> None:
        dtype = dtype_of(config)
        self._parameters, self._dtype, self._keep = parameters, dtype, config.sync.keep
        self._directory = directory / "weights"
        self._directory.mkdir(parents=True, exist_ok=True)
        for path in self._directory.iterdir():  # of an earlier sitting, which may have restarted engines
            if version_of(path) < 0:
                remove(path)

    def offer(self) -> Ticket:
        return {"shapes": shapes_of(self._parameters)}

    def stage(self, version: int) -> Ticket:
        path = self._directory / f"version_{version}.safetensors"
        partial = path.with_suffix(".partial")
        tensors = {n: p.detach().to("cpu", self._dtype, copy=True) for n, p in self._parameters.items()}
        save_file(tensors, partial)
        partial.rename(path)
        return {"version": version, "path": str(path.resolve())}

    def release(self, ticket: Ticket) -> None:
        served = Path(ticket["path"])
        others = [path for path in self._directory.iterdir() if path.name != served.name]
        # What is not older is of an earlier sitting, and a kill took it back.
        older = newest_first(path for path in others if version_of(path) < ticket["version"])
        for path in set(others) - set(older[: max(1, self._keep) - 1]):
            remove(path)

    def close(self) -> None:
        for path in newest_first(self._directory.iterdir())[self._keep :]:
            remove(path)
        if not self._keep:
            self._directory.rmdir()


class CheckpointReceiver:
    """A generator's end: opens the file, of which only the parts that are asked for are read."""

    lasting = True

    def __init__(self, offer: Ticket, shapes: dict[str, list[int]], rank: int, device: torch.device) -> None:
        refuse_other_parameters(shapes, offer["shapes"])
        self._device = str(device)

    def prepare(self, ticket: Ticket) -> dict[str, Any]:
        path = ticket["path"]
        try:
            file: Any = safe_open(path, framework="pt", device=self._device)
        except FileNotFoundError:
            raise FileNotFoundError(
                f"run.dir must be on a file system that this host mounts at the same path: there is no {path} here"
            ) from None
        return {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118, for a file is no mapping

    def close(self) -> None: ...


class Checkpoint:
    """Both ends."""

    Sender, Receiver = CheckpointSender, CheckpointReceiver


def version_of(path: Path) -> int:
    """The version that a file holds, or a model's directory (`sync.restart`), or -1 for what is not whole."""
    number = path.name.removeprefix("version_").removesuffix(".safetensors")
    return int(number) if number.isdecimal() else -1


def newest_first(paths: Iterable[Path]) -> list[Path]:
    return sorted(paths, key=version_of, reverse=True)


def remove(path: Path) -> None:
    """Remove a published version, whichever it is, a file or a model's directory."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
