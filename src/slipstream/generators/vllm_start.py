"""How vLLM is started: what it may do, what it takes on a CPU, and what a user reads if it does not start."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from slipstream.config import ConfigError
from slipstream.models import heads_of

T = TypeVar("T")
Part = Literal["generator", "teacher"]
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a forked process could not use the GPU
}
CPU_ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # starts in seconds
CACHE = 2**28  # bytes of keys and values on a CPU, beside those of one sequence as long as the context
FAILURE = re.compile(r"\b((?:\w+\.)*\w*Error: .+)")
SHOWN = 300  # characters of why vLLM does not start
REMEDIES = {  # by what vLLM says
    "less than desired GPU memory utilization": "lower {memory}, or end what else is on the GPU",
    "less than desired CPU memory utilization": "lower {memory}, or end what else takes memory",
    "less than requested memory for kv": "give {memory} a share that is free, and holds the model, too",
    "out of memory": "lower {memory} or {slots}, end what else is on the GPU, or spread the model by {spread}",
    "No available memory for the cache": "raise {memory}, or spread the model by {spread}",
    "larger than the available KV cache memory": "raise {memory}, or lower generator.context",
    "vocab size must be": 'train all weights (lora.rank = 0), or set generator.kind = "torch"',
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


def refuse_head_size(path: str, supported: Sequence[int]) -> None:
    """Raise `ConfigError` for a model whose heads vLLM's attention on a CPU refuses in its first pass only."""
    from transformers import AutoConfig

    size = heads_of(AutoConfig.from_pretrained(path)).size
    if supported and size and size not in supported:
        raise ConfigError(
            f"model.path = {path!r} has a head dimension of {size}, and vLLM on a CPU supports "
            f'{", ".join(map(str, supported))}; set generator.kind = "torch", or give another model'
        )


def cpu_arguments(path: str, dtype: torch.dtype, context: int, memory: float) -> dict[str, Any]:
    """What vLLM is told on a CPU: where `memory` is set, it takes that share of the host's as it does of a GPU's.

    Else room for keys and values of one sequence of `context` tokens (0: the model's own limit), but at most a quarter
    of the memory, and some more.
    """
    if memory:
        return {"enforce_eager": True}
    quarter = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
    return {"enforce_eager": True, "kv_cache_memory_bytes": CACHE + min(_cache_of_one(path, dtype, context), quarter)}


def _cache_of_one(path: str, dtype: torch.dtype, context: int) -> int:
    """Bytes of keys and values of one sequence, at most."""
    from transformers import AutoConfig

    it = AutoConfig.from_pretrained(path).get_text_config()
    heads, tokens = heads_of(it), context or getattr(it, "max_position_embeddings", 0)
    return int(2 * it.num_hidden_layers * heads.keys * heads.size * dtype.itemsize * tokens)


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
