"""The `checkpoint` link: each version is a safetensors file that generators load.

The slowest link, for generators that share nothing with the trainer but a file system. A file gets its name only when
it is whole; it is read while the generator goes on decoding, and only the copy into place holds it.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.sync.link import Parameters, Ticket
from slipstream.sync.shared import refuse_other_parameters


class CheckpointSender:
    """The trainer's end. The file of the version before is removed once every generator has left it."""

    def __init__(self, parameters: Parameters, dtype: torch.dtype, directory: Path) -> None:
        self._parameters, self._dtype = parameters, dtype
        self._directory = directory / "weights"
        self._directory.mkdir(parents=True, exist_ok=True)

    def offer(self) -> Ticket:
        return {"shapes": {name: list(p.shape) for name, p in self._parameters.items()}} | self.stage(0)

    def before_update(self) -> None:
        pass

    def stage(self, version: int) -> Ticket:
        path = self._directory / f"version_{version}.safetensors"
        partial = path.with_suffix(".partial")
        tensors = {n: p.detach().to("cpu", self._dtype, copy=True) for n, p in self._parameters.items()}
        save_file(tensors, partial)
        partial.rename(path)
        return {"version": version, "path": str(path)}

    def release(self, ticket: Ticket) -> None:
        for path in self._directory.iterdir():
            if path != Path(ticket["path"]):
                path.unlink()

    def close(self) -> None:
        for path in self._directory.iterdir():
            path.unlink()
        self._directory.rmdir()


class CheckpointReceiver:
    """A generator's end: reads the file in `prepare`, copies it into the parameters in `apply`."""

    def __init__(self, parameters: Parameters, offer: Ticket) -> None:
        refuse_other_parameters(parameters, offer["shapes"])
        self._parameters = parameters
        self._loaded: dict[str, Tensor] = {}
        self.prepare(offer)

    def prepare(self, ticket: Ticket) -> None:
        self._loaded = load_file(ticket["path"])

    @torch.no_grad()
    def apply(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(self._loaded[name])
        self._loaded = {}

    def close(self) -> None:
        self._loaded = {}
