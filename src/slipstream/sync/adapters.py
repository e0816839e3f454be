"""The `lora` link: adapters alone, each version under a name of its own, into an engine that serves several at once.

A version is a PEFT directory in memory. Sequences in flight finish on the adapter that they began with, new ones take
the newest, and no publish holds an engine. This is the trainer's end; the engine's is `generators.vllm_adapters`.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from slipstream.config import Config
from slipstream.sync.link import Parameters, Sender, Ticket, dtype_of, shapes_of

MEMORY = Path("/dev/shm")


class AdapterSender(Sender):
    """The trainer's end."""

    def __init__(self, parameters: Parameters, config: Config, directory: Path, receivers: int) -> None:
        self._parameters, self._dtype = parameters, dtype_of(config)
        self._directory = Path(tempfile.mkdtemp(prefix="slipstream-adapters-", dir=MEMORY if MEMORY.is_dir() else None))
        targets = {name.rpartition(".lora_")[0].rpartition(".")[2] for name in parameters}
        self._config = {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": config.model.path,
            "r": config.lora.rank, "lora_alpha": config.lora.alpha, "target_modules": sorted(targets), "bias": "none",
        }  # fmt: skip

    def offer(self) -> Ticket:
        return {"shapes": shapes_of(self._parameters)}

    def stage(self, version: int) -> Ticket:
        """The adapters as PEFT saves them."""
        path = self._directory / f"policy-v{version}"
        path.mkdir(exist_ok=True)
        tensors = {plain(name): p.detach().to("cpu", self._dtype) for name, p in self._parameters.items()}
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "adapter_model.safetensors")
        (path / "adapter_config.json").write_text(json.dumps(self._config))
        return {"version": version, "path": str(path)}

    def release(self, ticket: Ticket) -> None:
        """Engines have read it: they keep adapters themselves."""
        shutil.rmtree(ticket["path"])

    def close(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)


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
