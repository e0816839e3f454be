"""The class for vLLM's `worker_extension_cls`: the methods of `worker_methods`.

On a CPU it also stops vLLM from repacking linear weights, which could not be updated then, and from compiling a kernel
for the ranks of sampled tokens, which takes seconds. vLLM imports this module in each worker, before the model is
loaded.
"""

from __future__ import annotations

import inspect

import torch

from slipstream.generators.vllm.worker_methods import WorkerMethods

if not torch.cuda.is_available():
    # On a CPU vLLM repacks linear weights into another format and frees the originals, unless this flag is set.
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.v1.sample import sampler

    LinearBase._cpu_skip_gemm_dispatch = True
    sampler.batched_count_greater_than = inspect.unwrap(sampler.batched_count_greater_than)


class WorkerExtension(WorkerMethods):
    """Mixed into vLLM's worker class."""
