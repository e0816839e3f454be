"""The `lora` link: adapters alone, each version under a name of its own, into an engine that serves several at once.

A version is a PEFT directory whose files lie in memory. Sequences in flight finish on the adapter that they began with,
new ones take the newest, and no publish holds an engine. This is the trainer's end; the engine's is
`generators.vllm_adapters`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save

from slipstream.config import Config
from slipstream.sync.link import Parameters, Sender, Ticket, dtype_of, shapes_of
from slipstream.sync.shared import allocate, free


class AdapterSender(Sender):
    """The trainer's end. On disk there are links to its memory, which goes with the process however that ends."""

    lets_go = True

    def __init__(self, parameters: Parameters, config: Config, directory: Path, receivers: int) -> None:
        self._parameters, self._dtype = parameters, dtype_of(config)
        self._directory = directory / "adapters"
        shutil.rmtree(self._directory, ignore_errors=True)
        self._memory: list[tuple[int, str]] = []
        targets = {name.rpartition(".lora_")[0].rpartition(".")[2] for name in parameters}
        self._config = {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": config.model.path,
            "r": config.lora.rank, "lora_alpha": config.lora.alpha, "target_modules": sorted(targets), "bias": "none",
        }  # fmt: skip

    def offer(self) -> Ticket:
        return {"shapes": shapes_of(self._parameters)}

    def stage(self, version: int) -> Ticket:
        """The adapters as PEFT saves them."""
        self.release({})
        path = self._directory / f"policy-v{version}"
        path.mkdir(parents=True)
        tensors = {plain(name): p.detach().to("cpu", self._dtype) for name, p in self._parameters.items()}
        self._write(path / "adapter_model.safetensors", save({name: t.contiguous() for name, t in tensors.items()}))
        self._write(path / "adapter_config.json", json.dumps(self._config).encode())
        return {"version": version, "path": str(path.resolve())}

    def _write(self, path: Path, data: bytes) -> None:
        handle, memory = allocate(len(data))
        self._memory.append((handle, memory))
        with open(handle, "wb", closefd=False) as file:
            file.write(data)
        path.symlink_to(memory)

    def release(self, ticket: Ticket) -> None:
        """Engines have read it: they keep adapters themselves."""
        shutil.rmtree(self._directory, ignore_errors=True)
        for handle, memory in self._memory:
            free(handle, memory)
        self._memory = []

    def close(self) -> None:
        self.release({})


class Adapters:
    """Both ends; the engine loads adapters by itself."""

    Sender, Receiver = AdapterSender, None


def plain(name: str) -> str:
    """PEFT names the adapter in use in its parameters, but not in its files."""
    return name.replace(".default.", ".")


def loaded(path: Path) -> dict[str, torch.Tensor]:
    """A version's parameters by the trainer's names."""
    tensors = load_file(path / "adapter_model.safetensors")
    return {name.replace(".weight", ".default.weight"): tensor for name, tensor in tensors.items()}
