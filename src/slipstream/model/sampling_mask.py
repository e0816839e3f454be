"""Sampling masks: the token ids that top-k and top-p kept, for many sampled tokens, as tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.model.attention import concat_to_device


@dataclass(frozen=True)
class SamplingMask:
    """Kept token ids in a sparse format, with one row for each sampled token.

    `ids` and their `rows` are `[entries]`. `recorded` `[sampled]` is False for rows without a mask: all ids are kept.
    `starts` `[sampled + 1]` are the first entries of rows, on the host: slicing needs no synchronisation.
    """

    ids: Tensor
    rows: Tensor
    recorded: Tensor
    starts: NDArray[np.int64]

    @classmethod
    def from_token_ids(cls, kept: Sequence[Any], device: torch.device) -> SamplingMask | None:
        """From the kept ids of each sampled token (None: all ids). Returns None if no token has a mask."""
        recorded = [ids is not None for ids in kept]
        if not any(recorded):
            return None
        lists = [np.asarray(ids, dtype=np.int32) for ids in kept if ids is not None]
        lengths = np.zeros(len(kept), dtype=np.int64)
        lengths[recorded] = [len(ids) for ids in lists]
        return cls(
            ids=concat_to_device(lists, torch.long, device),
            rows=concat_to_device([np.repeat(np.arange(len(kept)), lengths)], torch.long, device),
            recorded=concat_to_device([recorded], torch.bool, device),
            starts=np.concatenate([[0], lengths.cumsum()]),
        )

    def at(self, indices: Iterable[int]) -> SamplingMask:
        """The mask of the sampled tokens `indices`, in that order."""
        selected = np.fromiter(indices, dtype=np.int64)
        lengths = np.diff(self.starts)[selected]
        starts = np.concatenate([[0], lengths.cumsum()])
        rows = np.repeat(np.arange(len(selected)), lengths)
        device = self.ids.device
        entries = np.arange(starts[-1]) + (self.starts[selected] - starts[:-1])[rows]
        listed = concat_to_device([entries], torch.long, device)
        recorded = self.recorded[concat_to_device([selected], torch.long, device)]
        return SamplingMask(self.ids[listed], concat_to_device([rows], torch.long, device), recorded, starts)

    def excluded(self, chunk: slice, vocabulary: int) -> Tensor:
        """True for ids that top-k/top-p removed: `[tokens, vocabulary]` for the sampled tokens `chunk`."""
        first, stop, _ = chunk.indices(len(self.recorded))
        listed = slice(self.starts[first], self.starts[stop])
        excluded = self.recorded[first:stop, None].repeat(1, vocabulary)
        excluded[self.rows[listed] - first, self.ids[listed]] = False
        return excluded
