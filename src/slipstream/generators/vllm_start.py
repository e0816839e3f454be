"""How vLLM is started: what it may do, what it takes on a CPU, and what a user reads if it does not start."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

import torch

from slipstream.config import ConfigError

T = TypeVar("T")
Part = Literal["generator", "teacher"]
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a forked process could not use the GPU
}
CPU_ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # starts in seconds
CPU_ARGUMENTS = {"enforce_eager": True, "kv_cache_memory_bytes": 2**28}  # of which it would take a share of all memory
FAILURE = re.compile(r"\b((?:\w+\.)*\w*Error: .+)")
SHOWN = 300  # characters of why vLLM does not start
REMEDIES = {  # by what vLLM says
    "less than desired GPU memory utilization": "lower {memory}, or end what else is on the GPU",
    "out of memory": "lower {memory} or {slots}, end what else is on the GPU, or spread the model by {spread}",
    "No available memory for the cache": "raise {memory}, or spread the model by {spread}",
    "larger than the available KV cache memory": "raise {memory}, or lower generator.context",
    "address already in use": "another program took this port in this moment; start again",
}
OPTIONS = {
    "generator": {
        "memory": "generator.memory",
        "slots": "generator.slots",
        "spread": "generator.tensor_parallel",
    },
    "teacher": {
        "memory": "teacher.memory",
        "slots": "max_num_seqs in teacher.options",
        "spread": "tensor_parallel_size in teacher.options",
    },
}


def start_vllm(part: Part, build: Callable[[], T], log: Path | None) -> T:
    """What `build` returns, which starts vLLM for a part of the run whose process writes to `log`.

    Raises `ConfigError` that says why vLLM does not start, and which option to change.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(f'{part}.kind = "vllm" needs vLLM: pip install vllm')
    for name, value in (ENVIRONMENT | ({} if torch.cuda.is_available() else CPU_ENVIRONMENT)).items():
        os.environ.setdefault(name, value)
    logged = log.stat().st_size if log else 0
    try:
        return build()
    except ConfigError:
        raise
    except (RuntimeError, ValueError, TypeError, OSError) as error:
        raise ConfigError(f"vLLM does not start: {cause(part, error, log, logged)}") from error


def cause(part: Part, error: Exception, log: Path | None, start: int) -> str:
    """Why vLLM did not start, and what to change.

    What fails in a process of its own is told in the log alone, from byte `start` on.
    """
    said = str(error)
    if log and "root cause" in said:
        lines = log.read_bytes()[start:].decode(errors="replace").splitlines()
        named = [found[1] for line in lines if (found := FAILURE.search(line)) and "root cause" not in line]
        said = next(filter(_remedy, named), named[0]) if named else said
    said, remedy = " ".join(said.split()), _remedy(said).format_map(OPTIONS[part])
    where = f" (log: {log})" if log else ""
    return f"{said if len(said) <= SHOWN else said[:SHOWN] + '...'}{remedy and f'; {remedy}'}{where}"


def _remedy(said: str) -> str:
    """What to change where vLLM says this, if that is known."""
    return next((todo for words, todo in REMEDIES.items() if words in said), "")
