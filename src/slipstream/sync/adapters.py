"""The `lora` link: adapters alone, each version under a name of its own, into an engine that serves several at once.

A version is a PEFT directory whose files lie in memory. Sequences in flight finish on the adapter that they began with,
new ones take the newest, and no sequence waits for a publish to be read. This is the trainer's end; the engine's is
`generators.vllm_adapters`.
"""

from __future__ import annotations

import json
import os
import shutil
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.config import Config
from slipstream.models import ADAPTER, dtype_of
from slipstream.sync.link import Parameters, Sender, Ticket, shapes_of
from slipstream.sync.pages import PageLock
from slipstream.sync.shared import allocate, free

WEIGHTS = "adapter_model.safetensors"
NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}  # that safetensors has for number formats of `model.dtype`


class AdapterSender(Sender):
    """The trainer's end. On disk there are links to its memory, which goes with the process however that ends.

    All versions lie in the same memory, one after the other: none is staged before every engine has read the one before
    and its checksums were compared.
    """

    lets_go = True

    def __init__(self, parameters: Parameters, config: Config, directory: Path, receivers: int) -> None:
        self._parameters, self._dtype = parameters, dtype_of(config)
        self._directory = directory / "adapters"
        shutil.rmtree(self._directory, ignore_errors=True)
        targets = {name.rpartition(".lora_")[0].rpartition(".")[2] for name in parameters}
        described = {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": config.model.path,
            "r": config.lora.rank, "lora_alpha": config.lora.alpha, "target_modules": sorted(targets), "bias": "none",
        }  # fmt: skip
        self._shapes = shapes_of(parameters)
        head, size = head_of({plain(name): shape for name, shape in self._shapes.items()}, self._dtype)
        self._files = {
            ADAPTER: _file(json.dumps(described).encode()),
            WEIGHTS: _file(head, size),
        }
        path = self._files[WEIGHTS][1]
        memory = torch.from_file(path, shared=True, size=len(head) + size, dtype=torch.uint8)
        self._data, self._locked = memory[len(head) :].view(self._dtype), PageLock(memory)

    def offer(self) -> Ticket:
        return {"shapes": self._shapes}

    @torch.no_grad()
    def stage(self, version: int) -> Ticket:
        """The adapters as PEFT saves them: one cast where the parameters are, and one copy into the file's memory."""
        self.release({})
        parameters = list(self._parameters.values())  # what ranks hold is gathered by this, each once
        device = parameters[0].device
        flat = self._data if device == self._data.device else torch.empty_like(self._data, device=device)
        parts = torch.split(flat, [p.numel() for p in parameters])
        torch._foreach_copy_([part.view(p.shape) for part, p in zip(parts, parameters, strict=True)], parameters)
        if flat is not self._data:
            self._data.copy_(flat)
        path = self._directory / f"policy-v{version}"
        path.mkdir(parents=True)
        for name, (_, memory) in self._files.items():
            (path / name).symlink_to(memory)
        return {"version": version, "path": str(path.resolve())}

    def release(self, ticket: Ticket) -> None:
        """Engines have read it: they keep adapters themselves."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def close(self) -> None:
        self.release({})
        self._locked.release()
        for handle, memory in self._files.values():
            free(handle, memory)


class Adapters:
    """Both ends; the engine loads adapters by itself."""

    Sender, Receiver = AdapterSender, None


def plain(name: str) -> str:
    """PEFT names the adapter in use in its parameters, but not in its files."""
    return name.replace(".default.", ".")


def head_of(shapes: dict[str, list[int]], dtype: torch.dtype) -> tuple[bytes, int]:
    """How a safetensors file of tensors of these shapes starts, and the bytes of tensors that follow, without gaps.

    It starts with the length of a JSON text, 8 bytes of it, and that text, which ends at a multiple of 8 bytes
    (https://github.com/huggingface/safetensors#format).
    """
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + prod(shape) * dtype.itemsize
        described[name] = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, end


def _file(start: bytes, room: int = 0) -> tuple[int, str]:
    """Memory that starts so, with room for so many bytes more, as `allocate` gives it."""
    handle, path = allocate(len(start) + room)
    os.write(handle, start)
    return handle, path


class AdapterFile:
    """The file of versions that a reader has open: all of them lie in the same memory. `values` are its tensors' own,
    one after the other, as they are now."""

    def __init__(self, version: Path) -> None:
        path = version / WEIGHTS
        self._identity = identity(path)
        data = torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)
        start = 8 + int.from_bytes(data[:8].numpy().tobytes(), "little")
        described = json.loads(data[8:start].numpy().tobytes())
        described.pop("__metadata__")
        self._shapes = {name: one["shape"] for name, one in described.items()}
        kind = next(iter(described.values()))["dtype"]
        self.values = data[start:].view(next(dtype for dtype, name in NAMES.items() if name == kind))
        self._locked = PageLock(data)

    def is_of(self, version: Path) -> bool:
        """Whether this version lies in the same memory."""
        return identity(version / WEIGHTS) == self._identity

    def named(self, values: Tensor) -> dict[str, Tensor]:
        """The tensors in `values`, which is this file's or a copy of them, by their names."""
        parts = torch.split(values, [prod(shape) for shape in self._shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}

    def close(self) -> None:
        self._locked.release()


def identity(path: Path) -> tuple[int, int]:
    """Of what a path leads to, as long as that is open: names of memory are given again."""
    found = path.stat()
    return found.st_dev, found.st_ino
