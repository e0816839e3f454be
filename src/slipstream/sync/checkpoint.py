"""The `checkpoint` link: each version is a safetensors file that generators load.

The slowest link, for generators that share nothing with the trainer but a file system. A file gets its name only when
it is whole; it is read while the generator goes on decoding, and only the copy into place holds it.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.config import Config
from slipstream.sync.link import Parameters, Sender, Ticket, dtype_of, refuse_other_parameters, shapes_of


class CheckpointSender(Sender):
    """The trainer's end. The file of the version before is removed once every generator has left it."""

    def __init__(self, parameters: Parameters, config: Config, directory: Path, receivers: int) -> None:
        dtype = dtype_of(config)
        self._parameters, self._dtype = parameters, dtype
        self._directory = directory / "weights"
        self._directory.mkdir(parents=True, exist_ok=True)

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
        for path in self._directory.iterdir():
            if path.name != Path(ticket["path"]).name:
                path.unlink()

    def close(self) -> None:
        for path in self._directory.iterdir():
            path.unlink()
        self._directory.rmdir()


class CheckpointReceiver:
    """A generator's end: reads the file."""

    lasting = True

    def __init__(self, offer: Ticket, shapes: dict[str, list[int]], rank: int, device: torch.device) -> None:
        refuse_other_parameters(shapes, offer["shapes"])
        self._device = str(device)

    def prepare(self, ticket: Ticket) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = load_file(ticket["path"], self._device)
        return tensors

    def close(self) -> None: ...


class Checkpoint:
    """Both ends."""

    Sender, Receiver = CheckpointSender, CheckpointReceiver
