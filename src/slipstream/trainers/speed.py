"""How much of a device's speed and memory a step used."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from slipstream.models import decoder_of, heads_of
from slipstream.packed.packing import Bundle, MicroBatch, bundle_length, bundle_pairs
from slipstream.packed.policy import Policy
from slipstream.rollout import Sample
from slipstream.trainers.parallel import Ranks

SIZE, ROUNDS = 8192, 10  # of the matrix product that tells what a GPU can do


@dataclass(frozen=True)
class Operations:
    """The arithmetic of forward and backward passes, as if nothing was computed twice: for each token, predicted token,
    and pair of a query and a key that it sees.

    6 operations for each weight of a matrix and token (2 forward, 4 backward), 12 for each query, key that it sees and
    element of a head (Chowdhery et al. 2022, arXiv:2204.02311, appendix B, without the pairs that a causal mask leaves
    out). Frozen weights take 4. The head counts for the tokens that it predicts, experts for those that use them.
    """

    token: float
    predicted: float
    pair: float

    @classmethod
    def of(cls, model: Any) -> Operations:
        config, head = model.config.get_text_config(), model.get_output_embeddings()
        heads, decoder = heads_of(config), decoder_of(model)
        linear = [m for m in decoder.modules() if isinstance(m, nn.Linear | Conv1D) and m is not head]
        token: float = sum(_operations(m.weight, _matrix(m)) for m in linear)
        used = getattr(config, "num_experts_per_tok", None) or 0  # of the matrices of all experts, which are one tensor
        token += sum(_operations(p, p.numel()) * used / len(p) for p in decoder.parameters() if p.ndim == 3)
        pair = 12 * config.num_hidden_layers * heads.queries * heads.size
        return cls(token, _operations(head.weight, head.weight.numel()), pair)

    def count(self, tokens: float, predicted: float, pairs: float) -> float:
        return self.token * tokens + self.predicted * predicted + self.pair * pairs


class Meter:
    """Counts the arithmetic of a policy's passes, and times what a device reaches."""

    def __init__(self, policy: Policy, device: torch.device) -> None:
        self._device, self._routing, self._each = device, policy.routing, Operations.of(policy.model)
        self._most = matrix_rate(device) if device.type == "cuda" else None
        self._operations, self._tokens = 0.0, 0

    def cost(self, samples: Sequence[Sample], members: Bundle) -> int:
        """The arithmetic of a bundle of these samples, in operations."""
        drawn = sum(len(samples[i].drawn) for i in members)
        return round(self._each.count(bundle_length(samples, members), drawn, bundle_pairs(samples, members)))

    def count(self, micro: MicroBatch, counts: bool) -> None:
        """Add the passes over a micro-batch, of which the first was the policy's last: the load of experts, and what is
        computed, unless another rank `counts` that."""
        self._routing.count()
        if not counts:
            return
        self._tokens += len(micro.input_ids)
        self._operations += self._each.count(len(micro.input_ids), len(micro.predicts), micro.segments.pairs)

    def read(self, seconds: float, ranks: Ranks) -> dict[str, Any]:
        """What all ranks counted since the last reading, in a step of so many seconds; names are those of `StepStats`.

        The rate is that of the average rank, the memory that of the one that used most.
        """
        counted = torch.tensor([self._operations, self._tokens], dtype=torch.float64, device=self._device)
        operations, tokens = ranks.add(counted).tolist()
        rate = operations / ranks.size / max(seconds, 1e-9)
        memory = 0.0
        if self._device.type == "cuda":
            memory = torch.cuda.max_memory_allocated(self._device) / 1e9
            torch.cuda.reset_peak_memory_stats(self._device)
        read = {
            "tokens_packed": int(tokens), "tflops": rate / 1e12,
            "utilisation": rate / self._most if self._most else None, "memory_gb": ranks.most(memory),
            **self._routing.read(ranks.add),
        }  # fmt: skip
        self._operations, self._tokens = 0.0, 0
        return read


def matrix_rate(device: torch.device) -> float:
    """Operations a second of a GPU in a large product of bfloat16 matrices."""
    a, b = (torch.randn(SIZE, SIZE, device=device, dtype=torch.bfloat16) for _ in range(2))
    torch.cuda.synchronize(device)
    for rounds in (3, ROUNDS):  # the first warm up
        began = time.perf_counter()
        for _ in range(rounds):
            a @ b
        torch.cuda.synchronize(device)
    return 2 * SIZE**3 * ROUNDS / (time.perf_counter() - began)


def _matrix(layer: Any) -> int:
    """Elements of a linear layer's matrix; of a Conv1D, which is one by another name, none lie in fewer."""
    return int(layer.in_features * layer.out_features if isinstance(layer, nn.Linear) else layer.weight.numel())


def _operations(weight: Tensor, size: int) -> int:
    return (6 if weight.requires_grad else 4) * size  # weights of few bits have fewer elements than their matrix
