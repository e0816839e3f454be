"""Slipstream: reinforcement-learning fine-tuning that generates and trains at the same time.

    import slipstream

    config = slipstream.load_config("examples/gsm8k.toml", ["--loop.max_lag", "2"])
    summary = slipstream.train(config)

Importing this package loads neither torch nor transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.config import Config, ConfigError, load_config
    from slipstream.rollout import Completion, Group, Rollout, Sampling, VersionSpan
    from slipstream.run import train

__version__ = "0.1.0"
# Type checkers read `__all__` only where it is written out.
__all__ = ["Completion", "Config", "ConfigError", "Group", "Rollout", "Sampling", "VersionSpan", "load_config", "train"]


def __getattr__(name: str) -> Any:
    """What is in `__all__` is loaded when it is first asked for."""
    if name not in __all__:
        raise AttributeError(f"module 'slipstream' has no attribute {name!r}")
    from importlib import import_module

    module = {"train": "run", "Config": "config", "ConfigError": "config", "load_config": "config"}.get(name, "rollout")
    return getattr(import_module(f"slipstream.{module}"), name)
