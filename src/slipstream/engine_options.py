"""Engine arguments of vLLM that `generator.options` may not hold: those that a run sets, and those it can't serve."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.config import Config

RUN_SETS = {  # vLLM's argument, and the option of a run that sets it, if there is one
    "model": "model.path",
    "dtype": "model.dtype",
    "seed": "loop.seed",
    "tensor_parallel_size": "generator.tensor_parallel",
    "max_num_seqs": "generator.slots",
    "max_model_len": "generator.context",
    "gpu_memory_utilization": "generator.memory",
    "device_ids": "generator.device",
    "enable_lora": "lora.rank",
    "max_lora_rank": "lora.rank",
    "max_loras": "loop.max_lag",
    "enable_return_routed_experts": "algorithm.keep_routing",
    "enable_sleep_mode": "sync.placement",
    "weight_transfer_config": "sync.link",
    "logprobs_mode": "",
    "worker_extension_cls": "",
}
UNSERVED: dict[str, tuple[Any, str, str]] = {  # vLLM's argument: the value that does nothing, why others fail, remedy
    "pipeline_parallel_size": (1, "a link writes whole layers on one stage", "use generator.tensor_parallel"),
    "data_parallel_size": (1, "a generator is one replica", "use generator.count"),
    "prefill_context_parallel_size": (1, "a link knows tensor-parallel shards alone", "use generator.tensor_parallel"),
    "nnodes": (1, "an engine runs on one host", "use generator.servers on others"),
    "enable_expert_parallel": (False, "experts are updated in place on one GPU", "use generator.count"),
    "enable_eplb": (False, "experts would move between GPUs", "leave it out"),
    "enable_elastic_ep": (False, "experts would move between GPUs", "leave it out"),
    "runner": ("generate", "a generator draws tokens", "leave it out"),
    "convert": ("none", "a generator draws tokens", "leave it out"),
}


def faults(config: Config) -> Iterator[str]:
    """What is wrong with `generator.options`, one line a fault."""
    for name, value in config.generator.options.items():
        said = f"generator.options.{name} = {json.dumps(value, default=str)}"
        instead = RUN_SETS.get(name, "")
        nothing, why, remedy = UNSERVED.get(name, (value, "", ""))
        if name in RUN_SETS:
            yield f"{said} is set by the run; " + (f"set {instead} instead" if instead else "leave it out")
        elif value not in (nothing, "auto", None):
            yield f"{said} can't be served: {why}; {remedy}"
        elif name.startswith("data_parallel_") and name not in UNSERVED:
            yield f"{said} can't be served: a generator is one replica; use generator.count"
        elif name == "distributed_executor_backend" and value not in ("mp", "uni", None):
            yield f'{said} can\'t be served: workers run on this host; use "mp", or generator.servers on others'
        elif name.startswith("quantization") and value is not None and not _serves_quantized(config):
            yield f"{said} can't be served: links write weights as trained; set sync.restart, or leave it out"


def _serves_quantized(config: Config) -> bool:
    """Whether no link writes into the quantized weights: adapters lie beside them, and restarted engines load files."""
    return config.serves_adapters or config.sync.restart
