"""From sequences to micro-batches: planned as plain indices, then turned into tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.rollout import Completion


@dataclass(frozen=True)
class MicroBatch:
    """Sequences for one forward pass, padded on the right, and one entry for each of their completion tokens.

    `input_ids` `[sequences, longest]`. `predicts` indexes the flattened row-major positions whose output predicts a
    completion token; `targets`, `temperatures`, `behaviour` and `advantages` `[completion tokens]` go with them, and
    `kept` lists the ids that top-k/top-p left there (None: all).
    """

    input_ids: Tensor
    predicts: Tensor
    targets: Tensor
    temperatures: Tensor
    behaviour: Tensor
    advantages: Tensor
    kept: Sequence[Any]


def plan(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices of the sequences of each micro-batch: like lengths together, at most `budget` padded tokens each.

    A sequence longer than the budget gets a micro-batch of its own.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        if batches and lengths[index] * (len(batches[-1]) + 1) <= budget:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def length(completion: Completion) -> int:
    """Tokens that go into the forward pass: the last one predicts nothing."""
    return len(completion.prompt_ids) + len(completion.token_ids) - 1


def pack(sequences: Sequence[tuple[Completion, float]], device: torch.device) -> MicroBatch:
    """Tensors for these completions, each with its advantage."""
    longest = max(length(c) for c, _ in sequences)
    input_ids: list[tuple[int, ...]] = []
    predicts: list[int] = []
    targets: list[int] = []
    temperatures: list[float] = []
    behaviour: list[float] = []
    advantages: list[float] = []
    kept: list[Any] = []
    for row, (completion, advantage) in enumerate(sequences):
        ids = completion.prompt_ids + completion.token_ids[:-1]
        input_ids.append(ids + (0,) * (longest - len(ids)))
        first, count = row * longest + len(completion.prompt_ids) - 1, len(completion.token_ids)
        predicts += range(first, first + count)
        targets += completion.token_ids
        temperatures += [completion.temperature or 1.0] * count
        behaviour += completion.logprobs
        advantages += [advantage] * count
        kept += completion.kept or [None] * count

    def ids_of(values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=device)

    def floats_of(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    return MicroBatch(
        ids_of(input_ids), ids_of(predicts), ids_of(targets), floats_of(temperatures), floats_of(behaviour),
        floats_of(advantages), kept,
    )  # fmt: skip
