"""Several adapters in one packed forward pass: each row of the pass has the adapter of its policy, or none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor

from slipstream.model.inspection import adapter_name


class AdapterRows:
    """Adds the adapters of policies to the outputs of the adapted layers of `model`, by hooks.

    PEFT's own layers compute on the base weights alone from now on.
    """

    def __init__(self, model: Any) -> None:
        self._rows: list[tuple[str, Tensor]] = []  # of each adapter in the next pass
        for layer in model.modules():
            if isinstance(layer, LoraLayer):
                layer.enable_adapters(False)
                layer.register_forward_hook(self._add)

    def set(self, policies: Sequence[str], device: torch.device) -> None:
        """Set the policy of each row of the next pass; "" has no adapter."""
        rows = {name: [i for i, policy in enumerate(policies) if policy == name] for name in {*policies} - {""}}
        self._rows = [(adapter_name(name), torch.tensor(own, device=device)) for name, own in rows.items()]

    def _add(self, layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        for name, rows in self._rows:
            a, b = layer.lora_A[name], layer.lora_B[name]
            added = b(a(inputs[0][:, rows].to(a.weight.dtype))) * layer.scaling[name]
            output = output.index_add(1, rows, added.to(output.dtype))
        return output
