"""Slipstream: reinforcement-learning fine-tuning that generates and trains at the same time.

    import slipstream

    config = slipstream.load_config("examples/gsm8k.toml", ["--loop.max_lag", "2"])
    summary = slipstream.train(config)

Importing this package loads neither torch nor transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slipstream.rollout import Completion, Group, Rollout, Sampling, VersionSpan

if TYPE_CHECKING:
    from slipstream.config import Config, ConfigError
    from slipstream.config import load as load_config
    from slipstream.run import train

__version__ = "0.1.0"
__all__ = [
    "Completion",
    "Config",
    "ConfigError",
    "Group",
    "Rollout",
    "Sampling",
    "VersionSpan",
    "load_config",
    "train",
]

_LAZY = {
    "Config": ("slipstream.config", "Config"),
    "ConfigError": ("slipstream.config", "ConfigError"),
    "load_config": ("slipstream.config", "load"),
    "train": ("slipstream.run", "train"),
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'slipstream' has no attribute {name!r}")
    from importlib import import_module

    module, attribute = _LAZY[name]
    return getattr(import_module(module), attribute)
