"""The `lora` link: publishes only the adapter, each version under its own name, to vLLM, which serves several at once.

A version is a PEFT directory whose files are in memory. Sequences in flight finish on the adapter that they started
with, new sequences take the newest, and vLLM decodes while it reads a version. This module has the trainer's end and
the file format; the engine's end is `generators.vllm.weights`.
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

from slipstream.config.schema import Config
from slipstream.model.device import dtype_of
from slipstream.model.paths import ADAPTER
from slipstream.sync.link import ConnectionInfo, Parameters, PublishHandle, Sender, shapes_of
from slipstream.sync.shared import allocate_shared_file, free_shared_file

WEIGHTS = "adapter_model.safetensors"
DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}  # in safetensors, for each `model.dtype`


class AdapterSender(Sender):
    """The trainer's end. The files on disk are symlinks to memory of this process, which the system frees at its end.

    All versions use the same memory: `stage` follows the `release` of the previous version.
    """

    trainer_free_after_send = one_trainer = independent_receivers = True

    def __init__(self, parameters: Parameters, config: Config, directory: Path, receivers: int) -> None:
        self._parameters, self._dtype = parameters, dtype_of(config)
        self._directory = directory / "adapters"
        shutil.rmtree(self._directory, ignore_errors=True)
        targets = {name.rpartition(".lora_")[0].rpartition(".")[2] for name in parameters}
        adapter_config = {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": config.model.path,
            "r": config.lora.rank, "lora_alpha": config.lora.alpha, "target_modules": sorted(targets), "bias": "none",
        }  # fmt: skip
        self._shapes = shapes_of(parameters)
        head, size = safetensors_header({peft_name(name): shape for name, shape in self._shapes.items()}, self._dtype)
        self._files = {ADAPTER: _create_file(json.dumps(adapter_config).encode()), WEIGHTS: _create_file(head, size)}
        path = self._files[WEIGHTS][1]
        memory = torch.from_file(path, shared=True, size=len(head) + size, dtype=torch.uint8)
        self._data = memory[len(head) :].view(self._dtype)

    def connection_info(self) -> ConnectionInfo:
        return {"shapes": self._shapes}

    @torch.no_grad()
    def stage(self, version: int) -> PublishHandle:
        """Write the adapter as PEFT saves it: one cast on the parameters' device, one copy into the file's memory."""
        self.release({})
        parameters = list(self._parameters.values())  # gathers each sharded parameter once
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

    def release(self, handle: PublishHandle) -> None:
        """Remove the directory: engines keep copies of the adapter."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def close(self) -> None:
        self.release({})
        for handle, memory in self._files.values():
            free_shared_file(handle, memory)


class Adapters:
    Sender, Receiver = AdapterSender, None  # vLLM loads adapters itself


def peft_name(name: str) -> str:
    """Name of an adapter parameter in PEFT's files: without the adapter's own name."""
    return name.replace(".default.", ".")


def safetensors_header(shapes: dict[str, list[int]], dtype: torch.dtype) -> tuple[bytes, int]:
    """Header of a safetensors file for tensors of these shapes, and the number of bytes of the tensors after it.

    The header is the length of a JSON text in 8 bytes, and that text, padded to a multiple of 8 bytes
    (https://github.com/huggingface/safetensors#format).
    """
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + prod(shape) * dtype.itemsize
        described[name] = {"dtype": DTYPE_NAMES[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, end


def _create_file(header: bytes, payload_size: int = 0) -> tuple[int, str]:
    """Descriptor and path of a shared file that starts with `header` and has `payload_size` more bytes."""
    handle, path = allocate_shared_file(len(header) + payload_size)
    os.write(handle, header)
    return handle, path


def read_adapter(version: Path, device: torch.device) -> dict[str, Tensor]:
    """The tensors of a version by PEFT's names, on `device`: views of one copy of the file that `stage` wrote."""
    path = version / WEIGHTS
    data = torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)
    start = 8 + int.from_bytes(data[:8].numpy().tobytes(), "little")
    described = json.loads(data[8:start].numpy().tobytes())
    described.pop("__metadata__")
    shapes = {name: one["shape"] for name, one in described.items()}
    kind = next(iter(described.values()))["dtype"]
    values = data[start:].view(next(dtype for dtype, name in DTYPE_NAMES.items() if name == kind))
    parts = torch.split(values.to(device, copy=True), [prod(shape) for shape in shapes.values()])
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
