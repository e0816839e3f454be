"""What top-k and top-p left to draw from, at each of many tokens, where a device can use it at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.packed.attention import tensor


@dataclass(frozen=True)
class Kept:
    """The ids that were left at each drawn token, row after row: `ids`, and the `rows` that they are of, `[listed]`.
    `recorded` `[drawn]` are the rows of which that is known; at others all were left.

    `starts` `[drawn + 1]` are where each row's ids begin. They are on the host, so that a part is found without waiting
    for the device.
    """

    ids: Tensor
    rows: Tensor
    recorded: Tensor
    starts: NDArray[np.int64]

    @classmethod
    def of(cls, kept: Sequence[Any], device: torch.device) -> Kept | None:
        """From the ids at each drawn token, or None there; None if there are none anywhere."""
        recorded = [ids is not None for ids in kept]
        if not any(recorded):
            return None
        lists = [np.asarray(ids, dtype=np.int32) for ids in kept if ids is not None]
        lengths = np.zeros(len(kept), dtype=np.int64)
        lengths[recorded] = [len(ids) for ids in lists]
        return cls(
            ids=tensor(lists, torch.long, device),
            rows=tensor([np.repeat(np.arange(len(kept)), lengths)], torch.long, device),
            recorded=tensor([recorded], torch.bool, device),
            starts=np.concatenate([[0], lengths.cumsum()]),
        )

    def at(self, places: Iterable[int]) -> Kept:
        """What is known of these drawn tokens, in their order."""
        chosen = np.fromiter(places, dtype=np.int64)
        lengths = np.diff(self.starts)[chosen]
        starts = np.concatenate([[0], lengths.cumsum()])
        rows = np.repeat(np.arange(len(chosen)), lengths)
        device = self.ids.device
        listed = tensor([np.arange(starts[-1]) + (self.starts[chosen] - starts[:-1])[rows]], torch.long, device)
        recorded = self.recorded[tensor([chosen], torch.long, device)]
        return Kept(self.ids[listed], tensor([rows], torch.long, device), recorded, starts)

    def outside(self, chunk: slice, vocabulary: int) -> Tensor:
        """Which tokens of the vocabulary were left out at the drawn tokens `chunk`: `[tokens, vocabulary]`."""
        first, stop, _ = chunk.indices(len(self.recorded))
        listed = slice(self.starts[first], self.starts[stop])
        outside = self.recorded[first:stop, None].repeat(1, vocabulary)
        outside[self.rows[listed] - first, self.ids[listed]] = False
        return outside
