"""The device and the number format that a process computes in."""

from __future__ import annotations

import os

import torch

from slipstream.config.schema import DEVICE, NO_DEVICE, Config, ConfigError


def dtype_name(config: Config, gpus: int | None = None) -> str:
    """Name of the dtype of generation and training: "auto" is bfloat16 on GPUs, and float32 if either is on a CPU.

    `gpus` is the number of GPUs that the run has, by default those of this host.
    """
    if config.model.dtype != "auto":
        return config.model.dtype
    named = {device.partition(":")[0] for device in (config.generator.device, config.trainer.device)}
    on_gpus = (torch.cuda.is_available() if gpus is None else gpus) and "cpu" not in named
    return "bfloat16" if on_gpus or config.sync.link == "single_copy" else "float32"  # single_copy needs GPUs


def dtype_of(config: Config) -> torch.dtype:
    """The dtype of `dtype_name`; weights are published in it, too."""
    dtype: torch.dtype = getattr(torch, dtype_name(config))
    return dtype


def pick_device(option: str, name: str) -> torch.device:
    """The device that the value `option` of the option `name` selects; "auto" is a GPU if there is one.

    Raises `ConfigError` for an unknown device, or a GPU that this host lacks.
    """
    if option == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not DEVICE.fullmatch(option):
        raise ConfigError(f'{name} = "{option}": {NO_DEVICE}')
    device = torch.device(option)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f'{name} = "{option}", but there are {torch.cuda.device_count()} GPUs here; try "auto"')
    return device


def current_device() -> torch.device:
    """The device of an engine or trainer rank, which sees only its own GPUs: that of its `LOCAL_RANK`, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
