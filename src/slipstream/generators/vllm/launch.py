"""Starts vLLM: environment, engine arguments, memory on a CPU, and the error shown to a user if it does not start."""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from slipstream.config.engine_args import DEFAULT_MEMORY, MAX_LORA_RANK, SHARED_MEMORY
from slipstream.config.schema import Config, ConfigError
from slipstream.generators.vllm.compat import (
    call_workers,
    cpu_head_sizes,
    fork_core,
    has_mamba_kernel,
    validate_experts_returned,
)
from slipstream.generators.vllm.preload import OWN_PROCESS, set_environment
from slipstream.generators.vllm.worker_methods import WorkerMethods
from slipstream.model.device import dtype_name, dtype_of
from slipstream.model.images import image_processor
from slipstream.model.inspection import attention_heads, has_experts, model_type
from slipstream.model.loading import load_causal_lm

T = TypeVar("T")
Part = Literal["generator", "teacher"]
CPU_ENVIRONMENT = {OWN_PROCESS: "0"}  # starts in seconds
EXTENSION = "slipstream.generators.vllm.worker_extension.WorkerExtension"
SCHEDULER = "slipstream.generators.vllm.scheduler.create_scheduler"
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, MAX_LORA_RANK)  # values that vLLM accepts as max_lora_rank
MAMBA_TYPES = ("falcon_mamba", "jamba", "mamba")  # model types with layers of the first version of Mamba
ENGINE_BYTES = 6 * 2**30  # of activations and CUDA graphs at most; of a small share at most a quarter
CACHE_MARGIN = 1.1
QUANTIZED_BYTES = {"bitsandbytes": 0.6, "fp8": 1.0}  # of an element of a matrix, by the beginning of vLLM's name
MIN_CPU_CACHE_BYTES = 2**28  # of keys and values, in addition to one sequence of the whole context
FAILURE = re.compile(r"\b((?:\w+\.)*\w*Error: .+)")
MAX_REASON_CHARS = 300
REMEDIES = {  # by a part of vLLM's error message
    "less than desired GPU memory utilization": "lower {memory}, or end what else is on the GPU",
    "less than desired CPU memory utilization": "lower {memory}, or end what else takes memory",
    "less than requested memory for kv": "give {memory} a share that is free, and holds the model, too",
    "out of memory": "lower {memory} or {slots}, end what else is on the GPU, or spread the model by {spread}",
    "No available memory for the cache": "raise {memory}, or spread the model by {spread}",
    "larger than the available KV cache memory": "raise {memory}, or lower generator.max_model_len",
    "incompatible with pipeline parallelism": "set algorithm.replay_routing = false",
    "vocab size must be": 'train all weights (lora.rank = 0), or set generator.engine = "torch"',
    "does not support LoRA": "train all weights (lora.rank = 0), or give another model",
    "address already in use": "another program took this port in this moment; start again",
}
OPTIONS = {
    "generator": {
        "memory": "generator.gpu_memory_utilization",
        "slots": "generator.max_num_seqs",
        "spread": "generator.tensor_parallel_size",
    },
    "teacher": {
        "memory": "teacher.gpu_memory_utilization",
        "slots": "max_num_seqs in teacher.engine_args",
        "spread": "tensor_parallel_size in teacher.engine_args",
    },
}


def start_vllm(part: Part, build: Callable[[], T], log: Path | None, engine_args: Mapping[str, Any]) -> T:
    """Result of `build`, which starts vLLM for a part of the run whose process writes to `log`.

    `engine_args` are the user's. Raises `ConfigError` with the reason why vLLM does not start, and what to change.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(f'{part}.engine = "vllm" needs vLLM: pip install vllm')
    set_environment(_gpu_environment() if torch.cuda.is_available() else CPU_ENVIRONMENT)
    if _can_fork_core() and not engine_args.get("numa_bind"):  # which vLLM applies to spawned processes only
        fork_core()
    logged = log.stat().st_size if log else 0
    try:
        return build()
    except ConfigError:
        raise
    except (RuntimeError, ValueError, TypeError, OSError) as error:
        raise ConfigError(f"vLLM does not start: {cause(part, error, log, logged)}") from error


def _can_fork_core() -> bool:
    """Whether vLLM's core gets a process, on a GPU; vLLM on a CPU sets variables later that the core needs."""
    return torch.cuda.is_available() and os.environ.get(OWN_PROCESS) != "0"


def _gpu_environment() -> dict[str, str]:
    """The directory of all compiled kernels, which belongs to vLLM's cache; empty if the home directory is unknown.

    By default a start that compiles layers uses another directory than a start that loads them. The second start would
    compile vLLM's own kernels again, for 13 s.
    """
    root = os.environ.get("VLLM_CACHE_ROOT") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "vllm"
    try:
        return {"TRITON_CACHE_DIR": str(Path(root).expanduser() / "triton")}
    except RuntimeError:
        return {}


def new_engine(config: Config, sharers: int) -> Any:
    """A vLLM `LLMEngine`; `sharers` as in `engine_arguments`."""
    from vllm import EngineArgs, LLMEngine

    arguments = engine_arguments(config, sharers)
    if not torch.cuda.is_available():
        validate_on_cpu(arguments["model"])
    # With pipeline stages, a core in this process could not be paused: it returns from a step with batches in flight.
    stages, workers = config.generator.pipeline_parallel_size, config.generator.gpus_per_engine
    staged_on_cpu = stages > 1 and not torch.cuda.is_available()
    if staged_on_cpu:  # by default vLLM binds each stage to another NUMA node
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // workers)))
    engine = LLMEngine.from_engine_args(EngineArgs(**arguments), enable_multiprocessing=stages > 1)
    if staged_on_cpu:
        engine.collective_rpc("execute_dummy_batch")  # allocates the tensors that a stage receives
    call_workers(engine, WorkerMethods.slipstream_sample_in_one_pass)
    warm_up(engine)
    return engine


def warm_up(engine: Any) -> None:
    """Sample a token with its log-probability, so that kernels are compiled before the first request.

    Raises `ConfigError` if it is not finite: evaluations record none, and would not see that.
    """
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=1, logprobs=0, flat_logprobs=True, detokenize=False)
    engine.add_request("warm-up", {"prompt_token_ids": [0]}, sampling)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if not math.isfinite(output.outputs[0].logprobs.logprobs[0]):
                raise ConfigError("model.path has weights with logits that are not finite; give another model")


def engine_arguments(config: Config, sharers: int) -> dict[str, Any]:
    """vLLM's engine arguments; `generator.engine_args` overrides them.

    `sharers` is the number of processes on the engine's GPU, itself included.
    """
    generator, on_cpu = config.generator, not torch.cuda.is_available()
    share = generator.gpu_memory_utilization or memory_share(config, sharers)
    arguments = {
        "model": config.model.path,
        "dtype": dtype_name(config),
        "tensor_parallel_size": generator.tensor_parallel_size,
        "max_num_seqs": generator.max_num_seqs,
        "max_model_len": generator.max_model_len or None,
        "gpu_memory_utilization": share,
        "enable_sleep_mode": config.sync.placement == "colocated" and not on_cpu,
        "logprobs_mode": "processed_logprobs",  # of the distribution that tokens are sampled from
        "max_logprobs": max(20, config.largest_top_k),
        "worker_extension_cls": EXTENSION,
        "scheduler_cls": SCHEDULER,
        "disable_log_stats": True,
        "seed": config.loop.seed,
        **feature_arguments(config, on_cpu),
    }
    if on_cpu:
        dtype, memory = dtype_of(config), generator.gpu_memory_utilization
        arguments |= cpu_arguments(config.model.path, dtype, generator.max_model_len, memory)
        arguments |= {"async_scheduling": False}
    elif sharers > 1 and config.sync.placement != "colocated" and "kv_cache_memory_bytes" not in generator.engine_args:
        arguments |= shared_gpu_arguments(config, share)
    return arguments | generator.engine_args


def feature_arguments(config: Config, on_cpu: bool) -> dict[str, Any]:
    """vLLM's engine arguments for images, adapters, vLLM's own weight transfer, and recorded routing, if used."""
    arguments: dict[str, Any] = {}
    if image_processor(config.model.path):
        arguments["limit_mm_per_prompt"] = {"video": 0}
    if config.sync.link == "lora":
        arguments |= adapter_arguments(config, on_cpu)
    if config.sync.link == "nccl_direct":
        from vllm.config import WeightTransferConfig

        arguments["weight_transfer_config"] = WeightTransferConfig(backend="nccl")
    if config.algorithm.replay_routing and has_experts(config.model.path):
        validate_experts_returned(on_cpu)
        arguments["enable_return_routed_experts"] = True
    return arguments


def adapter_arguments(config: Config, on_cpu: bool) -> dict[str, Any]:
    """vLLM's engine arguments for adapters.

    Each policy gets an adapter slot for each version that may be in use, and one for the next. On CPUs vLLM applies the
    last slot to sequences without an adapter, so it stays empty.
    """
    rank = next(r for r in LORA_RANKS if r >= config.lora.rank)
    slots = (config.loop.max_lag + 3) * max(1, len(config.policies)) + on_cpu
    return {"enable_lora": True, "max_lora_rank": rank, "max_loras": slots}


def memory_share(config: Config, sharers: int) -> float:
    """Default share of a GPU's memory for an engine that is one of this number of processes on the GPU."""
    if config.sync.placement == "colocated":
        return share_in_turns(config, gpu_bytes() if torch.cuda.is_available() else 0)
    return DEFAULT_MEMORY if sharers == 1 else round(SHARED_MEMORY / sharers, 3)


def shared_gpu_arguments(config: Config, share: float) -> dict[str, Any]:
    """vLLM's engine arguments for this share of a GPU, which other processes use at the same time.

    vLLM compares the utilization with the free memory only, while the trainer compiles with more memory than its steps
    take. Therefore the utilization is at most 0.01, and the cache has a size in bytes. Raises `ConfigError` if the
    share leaves no memory for the cache.
    """
    cache = shared_cache_bytes(config, share, gpu_bytes())
    return {"kv_cache_memory_bytes": cache, "gpu_memory_utilization": min(share, 0.01)}


def shared_cache_bytes(config: Config, share: float, memory: int) -> int:
    """Bytes for keys and values in this share of a GPU with `memory` bytes, which other processes use, too.

    vLLM would measure how much memory its start takes, and count what other processes allocate meanwhile. Raises
    `ConfigError` if nothing is left.
    """
    own, held = share * memory, held_bytes(config)
    cache = int(own - held - min(ENGINE_BYTES, own / 4))
    if cache <= 0:
        raise ConfigError(
            f"the engine's share of its GPU is {own / 1e9:.1f} GB; weights and adapters ({held / 1e9:.1f} GB) and "
            "activations leave no room for keys and values; raise generator.gpu_memory_utilization if the trainer "
            "needs less, or spread the model by generator.tensor_parallel_size"
        )
    return cache


def held_bytes(config: Config) -> float:
    """Bytes of weights and adapter slots on a GPU of the engine. A pipeline stage may hold all embeddings."""
    generator, size = config.generator, dtype_of(config).itemsize
    kind = str(generator.engine_args.get("quantization"))
    quantized = next((each for name, each in QUANTIZED_BYTES.items() if kind.startswith(name)), size)
    model = load_causal_lm(config.model.path, device=torch.device("meta"), dtype=torch.float32)
    ends = {id(e.weight) for e in (model.get_input_embeddings(), model.get_output_embeddings()) if e is not None}
    matrices = [p for p in model.parameters() if p.dim() > 1 and id(p) not in ends]
    others = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in matrices)
    held: float = size * others / generator.tensor_parallel_size
    held += quantized * sum(p.numel() for p in matrices) / generator.gpus_per_engine
    if config.sync.link == "lora":
        slots = adapter_arguments(config, on_cpu=False)
        held += size * slots["max_loras"] * slots["max_lora_rank"] * sum(sum(p.shape) for p in matrices if p.dim() == 2)
    return held


def gpu_bytes() -> int:
    """Memory of the first GPU. Unlike torch's call, vLLM's starts no CUDA context in this process."""
    from vllm.platforms import current_platform

    return int(current_platform.get_device_total_memory())


def share_in_turns(config: Config, memory: int) -> float:
    """Share of a GPU's memory, in all `memory` bytes, for an engine that takes turns with the trainer.

    It is enough for the weights, and for keys and values of all sequences at their full length: a larger share would
    make more of the trainer's state leave the GPU in each turn. Larger than `DEFAULT_MEMORY` only if the user says so.
    """
    generator, path = config.generator, Path(config.model.path)
    weights = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    if generator.gpu_memory_utilization or not (memory and weights):
        return generator.gpu_memory_utilization or DEFAULT_MEMORY
    slots = generator.engine_args.get("max_num_seqs", generator.max_num_seqs)
    cache = slots * cache_bytes(config.model.path, dtype_of(config), generator.max_model_len)
    needed = (weights + CACHE_MARGIN * cache) / generator.gpus_per_engine + ENGINE_BYTES
    return min(DEFAULT_MEMORY, round(needed / memory, 3)) if cache else DEFAULT_MEMORY


def validate_on_cpu(path: str) -> None:
    """Raise `ConfigError` for a model that vLLM on a CPU would refuse only in its first pass."""
    validate_head_size(path, cpu_head_sizes())
    validate_mamba(path, has_mamba_kernel())


def validate_head_size(path: str, supported: Sequence[int]) -> None:
    """Raise `ConfigError` for a head dimension that is not `supported`; an empty list supports all."""
    from transformers import AutoConfig

    size = attention_heads(AutoConfig.from_pretrained(path)).head_dim
    if supported and size and size not in supported:
        raise ConfigError(
            f"model.path = {path!r} has a head dimension of {size}, and vLLM on a CPU supports "
            f'{", ".join(map(str, supported))}; use a GPU, another model, or generator.engine = "torch" if it takes '
            "this model"
        )


def validate_mamba(path: str, has_kernel: bool) -> None:
    """Raise `ConfigError` for a model with layers of the first version of Mamba if vLLM has no kernel for them."""
    kind = model_type(path)
    if kind in MAMBA_TYPES and not has_kernel:
        raise ConfigError(
            f"model.path = {path!r} is a {kind}, and vLLM on a CPU has no kernel for its state-space layers; "
            "use a GPU, or give another model"
        )


def cpu_arguments(path: str, dtype: torch.dtype, context: int, memory: float) -> dict[str, Any]:
    """vLLM's engine arguments for a CPU. If `memory` is set, vLLM takes that share of the host's memory.

    Otherwise keys and values get room for one sequence of `context` tokens (0: the model's limit), at most a quarter of
    the host's memory, plus `MIN_CPU_CACHE_BYTES`.
    """
    if memory:
        return {"enforce_eager": True}
    quarter = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
    cache = MIN_CPU_CACHE_BYTES + min(cache_bytes(path, dtype, context), quarter)
    return {"enforce_eager": True, "kv_cache_memory_bytes": cache}


def cache_bytes(path: str, dtype: torch.dtype, context: int) -> int:
    """Bytes of the keys and values of one sequence of `context` tokens (0: the model's limit)."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path).get_text_config()
    heads, layers = attention_heads(config), int(config.num_hidden_layers)
    tokens = context or int(getattr(config, "max_position_embeddings", 0))
    return 2 * layers * heads.key_value_heads * heads.head_dim * dtype.itemsize * tokens


def cause(part: Part, error: Exception, log: Path | None, start: int) -> str:
    """Why vLLM did not start, and the remedy if it is known.

    vLLM reports a failure in its own processes only in the log; `start` is the log's size before the start.
    """
    reason = str(error)
    if log and "root cause" in reason:
        lines = log.read_bytes()[start:].decode(errors="replace").splitlines()
        errors = [found[1] for line in lines if (found := FAILURE.search(line)) and "root cause" not in line]
        reason = next(filter(_remedy, errors), errors[0]) if errors else reason
    reason, remedy = " ".join(reason.split()), _remedy(reason).format_map(OPTIONS[part])
    where = f" (log: {log})" if log else ""
    shown = reason if len(reason) <= MAX_REASON_CHARS else reason[:MAX_REASON_CHARS] + "..."
    return f"{shown}{remedy and f'; {remedy}'}{where}"


def _remedy(message: str) -> str:
    """The remedy for an error message of vLLM; empty if none is known."""
    return next((remedy for part, remedy in REMEDIES.items() if part in message), "")
