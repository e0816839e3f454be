"""FLOPs, device utilisation and memory of a step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from slipstream.model.inspection import attention_heads, text_decoder
from slipstream.model.packing import MicroBatch, PrefixGroup, attention_pairs, prefix_group_length
from slipstream.model.policy import PackedPolicy
from slipstream.rollout import Sample
from slipstream.trainers.parallel import TrainerRanks

MATMUL_SIZE, MATMUL_ROUNDS = 8192, 10  # of the product that measures the peak rate of a GPU


@dataclass(frozen=True)
class FlopsModel:
    """FLOPs of the forward and backward pass without recomputation, for each token, predicted token and attention pair.

    A matrix weight takes 6 FLOPs a token (2 forward, 4 backward), or 4 if it is frozen. An attention pair, a query and
    a key that it attends to, takes 12 for each element of a head (Chowdhery et al. 2022, arXiv:2204.02311, appendix B,
    without masked pairs). The head counts for predicted tokens, an expert for the tokens that chose it.
    """

    token: float
    predicted: float
    pair: float

    @classmethod
    def of(cls, model: Any) -> FlopsModel:
        config, head = model.config.get_text_config(), model.get_output_embeddings()
        heads, decoder = attention_heads(config), text_decoder(model)
        linear = [m for m in decoder.modules() if isinstance(m, nn.Linear | Conv1D) and m is not head]
        token: float = sum(_operations(m.weight, _matrix(m)) for m in linear)
        used = getattr(config, "num_experts_per_tok", None) or 0  # one tensor holds the matrices of all experts
        token += sum(_operations(p, p.numel()) * used / len(p) for p in decoder.parameters() if p.ndim == 3)
        pair = 12 * config.num_hidden_layers * heads.query_heads * heads.head_dim
        return cls(token, _operations(head.weight, head.weight.numel()), pair)

    def flops(self, tokens: float, predicted: float, pairs: float) -> float:
        return self.token * tokens + self.predicted * predicted + self.pair * pairs


class FlopsMeter:
    """Counts the FLOPs of a policy's passes, and compares them with the measured peak rate of the GPU."""

    def __init__(self, policy: PackedPolicy, device: torch.device) -> None:
        self._device, self._routing, self._context = device, policy.routing, policy.context
        self._each = FlopsModel.of(policy.model)
        self._peak = peak_matmul_flops(device) if device.type == "cuda" else None
        self._operations, self._tokens = 0.0, 0

    def cost(self, samples: Sequence[Sample], members: PrefixGroup) -> int:
        """FLOPs of the passes over this prefix group of `samples`."""
        sampled = sum(len(samples[i].sampled_positions) for i in members)
        length, pairs = prefix_group_length(samples, members), attention_pairs(samples, members)
        return round(self._each.flops(length, sampled, pairs))

    def add_pass(self, micro: MicroBatch, is_leader: bool) -> None:
        """Add the last forward and backward pass: the load of experts, and on a leader FLOPs and tokens."""
        length, tokens = len(micro.input_ids), len(micro.input_ids) - micro.padding
        own = self._context.own_count(length, tokens) if self._context else tokens
        self._routing.count_choices(own)
        if not is_leader:
            return
        self._tokens += tokens
        self._operations += self._each.flops(tokens, len(micro.predicts), micro.segments.pairs)

    def take_statistics(self, seconds: float, ranks: TrainerRanks) -> dict[str, Any]:
        """Statistics of all ranks since the last call, for a step of `seconds`; keys are fields of `StepStats`.

        FLOPs are per second and rank; memory is the maximum over ranks.
        """
        counted = torch.tensor([self._operations, self._tokens], dtype=torch.float64, device=self._device)
        operations, tokens = ranks.all_reduce_sum(counted).tolist()
        rate = operations / ranks.size / max(seconds, 1e-9)
        memory = 0.0
        if self._device.type == "cuda":
            memory = torch.cuda.max_memory_allocated(self._device) / 1e9
            torch.cuda.reset_peak_memory_stats(self._device)
        statistics = {
            "packed_tokens": int(tokens),
            "tflops": rate / 1e12,
            "matmul_utilisation": rate / self._peak if self._peak else None,
            "max_memory_gb": ranks.all_reduce_max(memory),
            **self._routing.take_load(ranks.all_reduce_sum),
        }
        self._operations, self._tokens = 0.0, 0
        return statistics


def peak_matmul_flops(device: torch.device) -> float:
    """Measured FLOPs per second of a GPU in a large product of bfloat16 matrices."""
    a, b = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, device=device, dtype=torch.bfloat16) for _ in range(2))
    torch.cuda.synchronize(device)
    for rounds in (3, MATMUL_ROUNDS):  # warm up, then measure
        began = time.perf_counter()
        for _ in range(rounds):
            a @ b
        torch.cuda.synchronize(device)
    return 2 * MATMUL_SIZE**3 * MATMUL_ROUNDS / (time.perf_counter() - began)


def _matrix(layer: Any) -> int:
    """Elements of a linear layer's matrix before quantization."""
    return int(layer.in_features * layer.out_features if isinstance(layer, nn.Linear) else layer.weight.numel())


def _operations(weight: Tensor, size: int) -> int:
    return (6 if weight.requires_grad else 4) * size  # weights of few bits have fewer elements than their matrix
