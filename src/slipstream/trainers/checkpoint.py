"""A trainer's state on disk, and the policy as others load it.

The caller makes a checkpoint atomic: it has the parts written into a directory that gets its name only when whole.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from slipstream.models import detached_state


def save(
    path: Path, parameters: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer, step: int, tokens: int
) -> None:
    """Write parameters, optimizer, counts of steps and trained tokens, and random state into `path`."""
    path.mkdir(parents=True)
    save_file({n: p.detach().to("cpu", copy=True) for n, p in parameters.items()}, path / "parameters.safetensors")
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    state = {"optimizer": optimizer.state_dict(), "step": step, "tokens": tokens}
    torch.save(state | {"random": torch.get_rng_state(), "random_cuda": cuda}, path / "optimizer.pt")


def restore(path: Path, parameters: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Load what `save` wrote in place and return the counts. Raises `ValueError` for another model's state."""
    saved = load_file(path / "parameters.safetensors")
    if saved.keys() != parameters.keys():
        raise ValueError(f"{path} holds other parameters than the model; was model.path or lora changed?")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(saved[name])
    state = torch.load(path / "optimizer.pt", weights_only=True)
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["random"])
    if state["random_cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["random_cuda"][: torch.cuda.device_count()])
    return int(state["step"]), int(state["tokens"])


def export(path: Path, model: Any, parameters: dict[str, nn.Parameter]) -> None:
    """Save `model` with these values of its `parameters` as `from_pretrained` (or PEFT) loads it."""
    if hasattr(model, "get_base_model"):
        model.save_pretrained(path)
        return
    # Parameters may be views of one shared buffer, which save_pretrained would take for tied weights.
    state = detached_state(model)
    masters = {name: p.detach().to("cpu", copy=True) for name, p in parameters.items() if p.dtype != state[name].dtype}
    model.save_pretrained(path, state_dict=state | masters)
