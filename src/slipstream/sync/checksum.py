"""A checksum of weights by which trainer and generators see that they hold the same version."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

ROWS = 4096  # of a large matrix at once: words are widened to 64 bits
SAMPLED = 4  # parameters that are compared at a publish, others each time
WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def checksum(part: Tensor, index: Sequence[slice] = ()) -> int:
    """Sum modulo 2^64 of the bit patterns of `part`, each times an odd number that depends on its place.

    `part` is `[index]` of the whole parameter; the checksums of the parts of a parameter add up to that of the whole.
    """
    row, column = ((s.start or 0) for s in (*index, slice(0), slice(0))[:2])
    words = part.detach().contiguous().view(WORDS[part.element_size()])
    words = words.flatten(1) if words.dim() > 1 else words[:, None]
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    columns = 2 * torch.arange(column, column + words.shape[1], device=words.device) + 1
    for at in range(0, words.shape[0], ROWS):
        sums = (words[at : at + ROWS].long() * columns).sum(1)
        total += (sums * (2 * torch.arange(row + at, row + at + len(sums), device=words.device) + 1)).sum()
    return int(total.item()) % 2**64


def chosen(names: Sequence[str], version: int, how: str) -> list[str]:
    """The parameters whose checksums are compared after the publish of `version`."""
    if how == "full":
        return list(names)
    return random.Random(version).sample(sorted(names), min(SAMPLED, len(names))) if how == "sampled" else []
