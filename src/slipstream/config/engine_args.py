"""vLLM engine arguments that `generator.engine_args` may not set: set by the run, or not supported by weight links."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.config.schema import Config

MAX_LORA_RANK = 512  # that vLLM serves
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
    "pipeline_parallel_size": (1, "a link writes whole layers on one stage", "use generator.tensor_parallel_size"),
    "data_parallel_size": (1, "a generator is one replica", "use generator.replicas"),
    "prefill_context_parallel_size": (1, "a link writes tensor-parallel shards", "use generator.tensor_parallel_size"),
    "nnodes": (1, "an engine runs on one host", "use generator.servers on others"),
    "enable_expert_parallel": (False, "experts are updated in place on one GPU", "use generator.replicas"),
    "enable_eplb": (False, "experts would move between GPUs", "leave it out"),
    "enable_elastic_ep": (False, "experts would move between GPUs", "leave it out"),
    "runner": ("generate", "a generator samples tokens", "leave it out"),
    "convert": ("none", "a generator samples tokens", "leave it out"),
}


def faults(config: Config) -> Iterator[str]:
    """One line for each engine argument that can't be set."""
    as_trained = not (config.serves_adapters or config.sync.restart)  # else adapters are separate, or files are loaded
    for name, value in config.generator.engine_args.items():
        setting = f"generator.engine_args.{name} = {json.dumps(value, default=str)}"
        option = RUN_SETS.get(name, "")
        default, why, remedy = UNSUPPORTED.get(name, (value, "", ""))
        if name in RUN_SETS:
            yield f"{setting} is set by the run; " + (f"set {option} instead" if option else "leave it out")
        elif value not in (default, "auto", None):
            yield f"{setting} can't be served: {why}; {remedy}"
        elif name.startswith("data_parallel_") and name not in UNSUPPORTED:
            yield f"{setting} can't be served: a generator is one replica; use generator.replicas"
        elif name == "distributed_executor_backend" and value not in ("mp", "uni", None):
            yield f'{setting} can\'t be served: workers run on this host; use "mp", or generator.servers on others'
        elif name.startswith("quantization") and value is not None and as_trained:
            yield f"{setting} can't be served: links write weights as trained; set sync.restart, or leave it out"
