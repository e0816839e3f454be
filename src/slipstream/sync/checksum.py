"""Checksums of weights: trainer and engines compare them to verify that they hold the same version."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

ROWS = 4096  # rows of a matrix per step: words are widened to 64 bits
SAMPLED = 4  # parameters compared per publish with `sync.verify = "sampled"`
WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def checksum(part: Tensor, index: Sequence[slice] = ()) -> int:
    """Sum modulo 2^64 of the bit patterns of `part`, each times an odd number that depends on its row and column.

    `part` is `parameter[index]`; the checksums of the shards of a parameter add up to the checksum of the parameter.
    """
    row, column = ((s.start or 0) for s in (*index, slice(0), slice(0))[:2])
    words = part.detach().contiguous().view(WORDS[part.element_size()])
    words, column = words.flatten(1) if words.dim() > 1 else words[:, None], column * prod(part.shape[2:])
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    columns = 2 * torch.arange(column, column + words.shape[1], device=words.device) + 1
    for at in range(0, words.shape[0], ROWS):
        sums = (words[at : at + ROWS].long() * columns).sum(1)
        total += (sums * (2 * torch.arange(row + at, row + at + len(sums), device=words.device) + 1)).sum()
    return int(total.item()) % 2**64


def chosen(names: Sequence[str], version: int, how: str) -> list[str]:
    """Names of the parameters to verify after the publish of `version`: all, a random sample, or none."""
    if how == "full":
        return list(names)
    return random.Random(version).sample(sorted(names), min(SAMPLED, len(names))) if how == "sampled" else []
