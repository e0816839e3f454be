"""What Slipstream adds to vLLM's workers, by vLLM's own option for that (`worker_extension_cls`).

Every method is called by `LLMEngine.collective_rpc` and runs in each worker between two forward passes.
"""

from __future__ import annotations

from typing import Any

import torch

from slipstream.generators.vllm_places import places_of
from slipstream.generators.weights import ServedWeights
from slipstream.models import end_of_sequence, generation_config
from slipstream.sync.link import Ticket

if not torch.cuda.is_available():
    # On a CPU vLLM packs weights into a form of its own and forgets them, unless a layer asks it not to.
    from vllm.model_executor.layers.linear import LinearBase

    LinearBase._cpu_skip_gemm_dispatch = True


class WorkerExtension:
    """Mixed into the worker, whose `model_runner`, `rank` and `vllm_config` it uses."""

    model_runner: Any
    rank: int
    vllm_config: Any

    def slipstream_describe(self) -> dict[str, Any]:
        """What a run has to know of a server that it did not start."""
        model, parallel = self.vllm_config.model_config, self.vllm_config.parallel_config
        return {
            "logprobs_mode": model.logprobs_mode,
            "dtype": str(model.dtype).removeprefix("torch."),
            "context": model.max_model_len,
            "vocabulary": model.get_vocab_size(),
            "eos": sorted(end_of_sequence(generation_config(model.model), model.hf_config)),
            "replicas": parallel.data_parallel_size * parallel.pipeline_parallel_size,
            "counts": hasattr(self.model_runner, "requests"),  # the records that `slipstream_apply` reads
        }

    def slipstream_connect(self, link: str, offer: Ticket, rank: int) -> None:
        """Open this worker's end of a link. Raises `ValueError` for a model that can't be written in place."""
        model = self.model_runner.get_model()
        for module in model.modules():
            if hasattr(module, "cpu_linear"):  # the head, packed beside its weights
                module.cpu_linear = torch.nn.functional.linear
        size = self.model_runner.parallel_config.tensor_parallel_size
        places = places_of(model, offer["shapes"], self.rank % size, size)
        self._slipstream = ServedWeights(link, offer, places, rank + self.rank % size, rebind=False)

    def slipstream_prepare(self, ticket: Ticket) -> None:
        self._slipstream.prepare(ticket)

    def slipstream_prepared(self) -> bool:
        return self._slipstream.prepared()

    def slipstream_apply(self) -> dict[str, int]:
        """Swap the weights. Returns how many tokens each request has drawn so far, every pass before this included."""
        self._slipstream.apply()
        return {name: len(request.output_token_ids) for name, request in self.model_runner.requests.items()}

    def slipstream_checksums(self, names: list[str]) -> dict[str, str]:
        return {name: str(value) for name, value in self._slipstream.checksums(names).items()}

    def slipstream_close(self) -> None:
        self._slipstream.close()
        del self._slipstream  # with what it holds for the next version
