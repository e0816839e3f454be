"""Slipstream: reinforcement-learning fine-tuning that generates and trains at the same time.

    import slipstream

    config = slipstream.load_config("examples/gsm8k.toml", ["--loop.max_lag", "2"])
    summary = slipstream.train(config)

    run = slipstream.attach("runs/gsm8k-20260101-120000")  # from any process
    print(run.status()["step"], run.generate("2 + 2 =").text)

    records = slipstream.load_run("runs/gsm8k-20260101-120000")  # also of a run that is over
    print(records.metrics[-1]["reward/mean"], len(records.rollouts(step=1)))

Importing this package loads neither torch nor transformers, nor any other module: until `__main__` has set its handler,
Ctrl-C is a traceback.
"""

TYPE_CHECKING = False  # as in typing, which loads slowly
if TYPE_CHECKING:
    from typing import Any

    from slipstream.client import RunHandle, attach
    from slipstream.config.loading import load_config
    from slipstream.config.schema import Config, ConfigError
    from slipstream.observe.run_data import Run, load_run
    from slipstream.rollout import Completion, Group, Rollout, Sampling, VersionSpan
    from slipstream.run import train

__version__ = "0.1.0"
# Type checkers read `__all__` only where it is written out.
__all__ = [
    "Completion", "Config", "ConfigError", "Group", "Rollout", "Run", "RunHandle", "Sampling", "VersionSpan",
    "attach", "load_config", "load_run", "train",
]  # fmt: skip


def __getattr__(name: str) -> "Any":
    """Import a name of `__all__` at its first use."""
    if name not in __all__:
        raise AttributeError(f"module 'slipstream' has no attribute {name!r}")
    from importlib import import_module

    module = {
        "train": "run",
        "attach": "client",
        "RunHandle": "client",
        "Config": "config.schema",
        "ConfigError": "config.schema",
        "load_config": "config.loading",
        "Run": "observe.run_data",
        "load_run": "observe.run_data",
    }.get(name, "rollout")
    return getattr(import_module(f"slipstream.{module}"), name)
