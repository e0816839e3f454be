"""What Slipstream adds to vLLM's workers, by vLLM's own option for that (`worker_extension_cls`).

Every method is called by `LLMEngine.collective_rpc` and runs in each worker between two forward passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from slipstream.generators.vllm_places import places_of
from slipstream.generators.weights import Place, ServedWeights
from slipstream.sync.link import Ticket

if not torch.cuda.is_available():
    # On a CPU vLLM packs weights into a form of its own and forgets them, unless a layer asks it not to.
    from vllm.model_executor.layers.linear import LinearBase

    LinearBase._cpu_skip_gemm_dispatch = True


class WorkerExtension:
    """Mixed into the worker, whose `model_runner` and `rank` it uses."""

    model_runner: Any
    rank: int

    def slipstream_connect(self, link: str, offer: Ticket, rank: int) -> None:
        """Open this worker's end of a link. Raises `ValueError` for a model that can't be written in place."""
        model = self.model_runner.get_model()
        for module in model.modules():
            if hasattr(module, "cpu_linear"):  # the head, packed beside its weights
                module.cpu_linear = torch.nn.functional.linear
        size = self.model_runner.parallel_config.tensor_parallel_size
        places = places_of(model, offer["shapes"], self.rank % size, size)
        _refuse_other_values(self.model_runner, places)
        self._slipstream = ServedWeights(link, offer, places, rank + self.rank % size, rebind=False)

    def slipstream_prepare(self, ticket: Ticket) -> None:
        self._slipstream.prepare(ticket)

    def slipstream_prepared(self) -> bool:
        return self._slipstream.prepared()

    def slipstream_apply(self) -> dict[str, int]:
        """Swap the weights. Returns how many tokens each request has drawn so far, every pass before this included."""
        self._slipstream.apply()
        return self.slipstream_drawn()

    def slipstream_drawn(self) -> dict[str, int]:
        """Tokens that each request has drawn."""
        return {name: len(request.output_token_ids) for name, request in self.model_runner.requests.items()}

    def slipstream_checksums(self, names: list[str]) -> dict[str, str]:
        return {name: str(value) for name, value in self._slipstream.checksums(names).items()}

    def slipstream_close(self) -> None:
        self._slipstream.close()


def _refuse_other_values(runner: Any, places: Mapping[str, Place]) -> None:
    """See that every place holds what vLLM itself has loaded there from the model's files.

    Raises `ValueError` that names a parameter which vLLM keeps in another form: written in place it would be garbled.
    """
    from vllm.model_executor.model_loader import get_model_loader

    if runner.load_config.load_format == "dummy":
        return
    loader: Any = get_model_loader(runner.load_config)
    for name, tensor in loader.get_all_weights(runner.model_config, runner.get_model()):
        place = places.get(name)
        if place and not torch.equal(tensor[place.index].to(place.tensor), place.tensor):
            raise ValueError(f"vLLM keeps {name} in a form of its own; this model can't be updated in place")
