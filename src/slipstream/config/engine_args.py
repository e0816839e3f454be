"""vLLM engine arguments that `generator.engine_args` and `teacher.engine_args` may not set: unknown to vLLM, set by the
run, or not supported by weight links.
"""

from __future__ import annotations

import ast
import difflib
import functools
import json
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.config.schema import Config, SyncConfig

MAX_LORA_RANK = 512  # that vLLM serves
DEFAULT_MEMORY = 0.85  # share of a GPU for an engine that has it alone, or takes turns with the trainer
SHARED_MEMORY = 0.8  # share of a GPU for all processes on it, if an engine shares it with others
RUN_SETS = {  # vLLM's argument: the option of a run that sets it, if any
    "model": "model.path",
    "tokenizer": "model.path",
    "hf_config_path": "model.path",
    "dtype": "model.dtype",
    "seed": "loop.seed",
    "tensor_parallel_size": "generator.tensor_parallel_size",
    "max_num_seqs": "generator.max_num_seqs",
    "max_model_len": "generator.max_model_len",
    "gpu_memory_utilization": "generator.gpu_memory_utilization",
    "device_ids": "generator.device",
    "enable_lora": "lora.rank",
    "max_lora_rank": "lora.rank",
    "max_loras": "loop.max_lag",
    "enable_return_routed_experts": "algorithm.replay_routing",
    "enable_sleep_mode": "sync.placement",
    "weight_transfer_config": "sync.link",
    "logprobs_mode": "",
    "worker_extension_cls": "",
}
UNSUPPORTED: dict[str, tuple[Any, str, str]] = {  # vLLM's argument: the default, why others fail, remedy
    "data_parallel_size": (1, "a generator is one replica", "use generator.replicas"),
    "prefill_context_parallel_size": (1, "a link writes tensor-parallel shards", "use generator.tensor_parallel_size"),
    "nnodes": (1, "an engine runs on one host", "use generator.servers on others"),
    "enable_expert_parallel": (False, "experts are updated in place on one GPU", "use generator.replicas"),
    "enable_eplb": (False, "experts would move between GPUs", "leave it out"),
    "enable_elastic_ep": (False, "experts would move between GPUs", "leave it out"),
    "runner": ("generate", "a generator samples tokens", "leave it out"),
    "convert": ("none", "a generator samples tokens", "leave it out"),
    **dict.fromkeys(
        ("speculative_config", "spec_method", "spec_model", "spec_tokens"),
        (None, "versions of accepted draft tokens are not tracked", "leave it out"),
    ),
}
QUANTIZATION = "fp8_per_channel"  # vLLM's quantization of each row independently
UNQUANTIZED_LINKS = ("single_copy", "nccl_direct")  # write the trainer's own values in place
TEACHER_SETS = {"model": "teacher.path", "gpu_memory_utilization": "teacher.gpu_memory_utilization"}
TEACHER_UNSUPPORTED: dict[str, tuple[Any, str, str]] = {
    "data_parallel_size": (1, "a teacher is one replica", "leave it out"),
    "runner": ("generate", "a teacher scores tokens", "leave it out"),
    "convert": ("none", "a teacher scores tokens", "leave it out"),
}


def faults(config: Config) -> Iterator[str]:
    """One line for each engine argument that can't be set."""
    generator, teacher = config.generator, config.teacher
    yield from _refused("generator", generator.engine_args, RUN_SETS, UNSUPPORTED)
    yield from _unsupported_by_links(config)
    yield from _refused("teacher", teacher.engine_args, TEACHER_SETS, TEACHER_UNSUPPORTED)
    if generator.engine == "vllm":  # not a worker class of the user
        yield from _unknown("generator", generator.engine_args)
    yield from _unknown("teacher", teacher.engine_args)


def _refused(
    section: str, arguments: Mapping[str, Any], sets: Mapping[str, str], unsupported: Mapping[str, tuple[Any, str, str]]
) -> Iterator[str]:
    """Arguments that the run `sets`, or whose values are `unsupported`."""
    for name, value in arguments.items():
        setting, option = _setting(section, name, value), sets.get(name, "")
        default, why, remedy = unsupported.get(name, (value, "", ""))
        if name in sets:
            yield f"{setting} is set by the run; " + (f"set {option} instead" if option else "leave it out")
        elif value not in (default, "auto", None):
            yield f"{setting} can't be served: {why}; {remedy}"


def _unsupported_by_links(config: Config) -> Iterator[str]:
    as_trained = not (config.serves_adapters or config.sync.restart)  # else adapters are separate, or files are loaded
    for name, value in config.generator.engine_args.items():
        setting = _setting("generator", name, value)
        if name.startswith("data_parallel_") and name not in UNSUPPORTED:
            yield f"{setting} can't be served: a generator is one replica; use generator.replicas"
        elif name == "pipeline_parallel_size":
            yield from _unsupported_stages(config.sync, setting, value)
        elif name == "distributed_executor_backend" and value not in ("mp", "uni", None):
            yield f'{setting} can\'t be served: workers run on this host; use "mp", or generator.servers on others'
        elif name.startswith("quantization") and value is not None and as_trained:
            yield from _unsupported_quantization(config, name, value)
        elif name == "kv_cache_dtype" and value not in ("auto", None) and _is_exact(config):
            yield (
                f"{setting} rounds keys and values, so that log-probabilities differ from the trainer's; leave it out, "
                "or set trainer.logprob_tolerance to the largest difference that you accept"
            )


def _unsupported_stages(sync: SyncConfig, setting: str, stages: Any) -> Iterator[str]:
    """Why no link can write this number of pipeline stages."""
    if type(stages) is not int or stages < 1:
        yield f"{setting} must be an integer of at least 1"
    elif stages > 1 and sync.link in ("nccl_direct", "single_copy"):
        yield f'{setting} can\'t be served by sync.link = "{sync.link}"; use sync.link = "nccl", or one stage'
    elif stages > 1 and sync.placement == "colocated":
        yield f'{setting} can\'t be served with sync.placement = "colocated"; use "disaggregated", or one stage'


def _unsupported_quantization(config: Config, name: str, value: Any) -> Iterator[str]:
    """Why no link can write weights that vLLM quantizes in this way."""
    setting = f"{_setting('generator', name, value)} can't be served"
    ignores = name == "quantization_config" and isinstance(value, Mapping) and set(value) <= {"ignore"}
    if config.generator.engine_args.get("quantization") != QUANTIZATION or not (name == "quantization" or ignores):
        yield (
            f'{setting}: links write weights as trained, or with quantization = "{QUANTIZATION}" and at most '
            "quantization_config.ignore; use that, set sync.restart, or leave it out"
        )
    elif ignores:
        return
    elif config.model.dtype == "float32":
        yield f'{setting} with model.dtype = "float32", which vLLM does not quantize; set model.dtype = "bfloat16"'
    elif config.sync.link in UNQUANTIZED_LINKS:
        yield (
            f'{setting} by sync.link = "{config.sync.link}", which writes the trainer\'s own values; '
            'use "nccl", "shared", "delta" or "checkpoint"'
        )


def serves_fp8(config: Config) -> bool:
    """Whether vLLM serves the matrices of layers in FP8."""
    return str(config.generator.engine_args.get("quantization")).startswith("fp8")


def _is_exact(config: Config) -> bool:
    """Whether engine and trainer must agree to the last digits of a float32."""
    return config.model.dtype == "float32" and not config.trainer.logprob_tolerance


def _unknown(section: str, arguments: Mapping[str, Any]) -> Iterator[str]:
    """Arguments that the installed vLLM does not have."""
    names = known() if arguments else frozenset()
    for name in arguments if names else ():
        if name not in names:
            close = difflib.get_close_matches(name, names, 1)
            hint = f" (did you mean {section}.engine_args.{close[0]}?)" if close else ""
            yield f"{section}.engine_args.{name} is no engine argument of the installed vLLM{hint}"


@functools.cache
def known() -> frozenset[str]:
    """Names of the installed vLLM's engine arguments, from its source: its import takes seconds. Empty without vLLM."""
    spec = find_spec("vllm")
    source = Path(spec.origin).with_name("engine") / "arg_utils.py" if spec and spec.origin else None
    if not source or not source.exists():
        return frozenset()
    classes = [part for part in ast.parse(source.read_text("utf-8")).body if isinstance(part, ast.ClassDef)]
    fields = [line for part in classes if part.name == "EngineArgs" for line in part.body]
    return frozenset(ast.unparse(line.target) for line in fields if isinstance(line, ast.AnnAssign))


def _setting(section: str, name: str, value: Any) -> str:
    return f"{section}.engine_args.{name} = {json.dumps(value, default=str)}"
