"""A slot-based key-value cache, and the attention function through which a Hugging Face model uses it.

One forward pass holds one token of every running sequence and all prompt tokens of every joining sequence, packed
without padding into a single row `[1, tokens]`: the linear layers see one large matrix, and only attention knows about
sequences. transformers passes the keyword arguments of `model.forward` to a registered attention function: `slots=`
arrives that way, and model code stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers import AttentionInterface, PretrainedConfig

from slipstream.generators.base import GenerationError
from slipstream.model.attention import grouped_attention
from slipstream.model.inspection import attention_heads

ATTENTION = "slipstream_slots"
GROWTH = 64  # positions; the cache grows by a multiple of this, and by at least half of its size


class SlotCache:
    """Keys and values `[slots, key-value heads, positions, head size]` of each layer; grows with the sequences."""

    def __init__(self, config: PretrainedConfig, slots: int, dtype: torch.dtype, device: torch.device) -> None:
        heads = attention_heads(config)
        self._shape = (slots, heads.key_value_heads, 0, heads.head_dim)
        self._options: dict[str, Any] = {"dtype": dtype, "device": device}
        self._layers: int = config.num_hidden_layers
        self.clear()

    def clear(self) -> None:
        """Drop all keys and values, and free their memory."""
        self.keys = [torch.zeros(self._shape, **self._options) for _ in range(self._layers)]
        self.values = [torch.zeros(self._shape, **self._options) for _ in range(self._layers)]
        if self.keys[0].is_cuda:
            torch.cuda.empty_cache()

    @property
    def positions(self) -> int:
        return self.keys[0].shape[2]

    def reserve(self, positions: int) -> None:
        """Grow the cache to sequences of this many tokens. Raises `GenerationError` if memory is short."""
        if positions <= self.positions:
            return
        target = max(positions, self.positions + self.positions // 2)
        target = -(-target // GROWTH) * GROWTH
        slots, heads, _, size = self._shape
        try:
            for tensors in (self.keys, self.values):
                for layer, old in enumerate(tensors):
                    new = torch.zeros((slots, heads, target, size), **self._options)
                    new[:, :, : old.shape[2]] = old
                    tensors[layer] = new
        except RuntimeError as error:  # torch raises this class if host memory is short
            gb = 2 * self._layers * slots * heads * target * size * self.keys[0].element_size() / 1e9
            raise GenerationError(
                f"keys and values of {slots} sequences of {target} tokens take {gb:,.1f} GB, which can't be allocated; "
                f"lower generator.max_num_seqs = {slots} or generator.max_model_len ({str(error).splitlines()[0]:.80})"
            ) from error

    def clear_slot(self, slot: int) -> None:
        """Set all keys and values of one slot to zero."""
        for tensor in (*self.keys, *self.values):
            tensor[slot] = 0

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one slot to another."""
        for tensor in (*self.keys, *self.values):
            tensor[target, :, :length] = tensor[source, :, :length]


@dataclass
class StepLayout:
    """The sequence and position of each token of the packed row.

    The first `running` tokens are the newest token of the sequence in each slot `0:running`: the token sampled last, or
    the last one of a joining prompt. The rest of the row are the earlier tokens of joining prompts, one prompt after
    the other. Sequences that join with equal prompts share these: keys are computed once and written to each slot. The
    prompt of a recomputed sequence includes its sampled tokens. `lengths` counts each running sequence's tokens, the
    newest included; `width` is the largest.

    Token `write_source[i]` of the row (None: token i) goes to position `write_position[i]` of slot `write_slot[i]`.
    `gather` `[prompts, longest]` indexes each prompt's earlier tokens in the row (padded by a token that causality
    masks), and `scatter` indexes the row's in the flattened result; both are None if no sequence joins.
    """

    cache: SlotCache
    running: int
    width: int
    lengths: Tensor
    write_slot: Tensor
    write_position: Tensor
    write_source: Tensor | None = None
    gather: Tensor | None = None
    scatter: Tensor | None = None

    def __post_init__(self) -> None:
        self._masks: dict[tuple[str, int | None], Tensor] = {}

    def decode_mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Additive mask `[running, 1, 1, width]` over the cache, for each sequence's newest token.

        `window` None: full attention. All layers pass the same `dtype`, that of the cache.
        """
        key = ("decode", window)
        if key not in self._masks:
            position = torch.arange(self.width, device=self.lengths.device)
            allowed = position < self.lengths[:, None]
            if window is not None:
                allowed &= position >= self.lengths[:, None] - window
            mask = torch.zeros(allowed.shape, dtype=dtype, device=position.device).masked_fill_(~allowed, -torch.inf)
            self._masks[key] = mask[:, None, None]
        return self._masks[key]

    def prompt_mask(self, window: int | None) -> Tensor | None:
        """Boolean mask `[longest, longest]` for prompts longer than a sliding window; None if causality is enough."""
        assert self.gather is not None
        longest = self.gather.shape[1]
        if window is None or longest <= window:
            return None
        key = ("prompt", window)
        if key not in self._masks:
            position = torch.arange(longest, device=self.gather.device)
            ahead = position[:, None] - position
            self._masks[key] = (ahead >= 0) & (ahead < window)
        return self._masks[key]


def slot_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, sliding_window: int | None = None, *, slots: StepLayout,
    softcap: float | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention of one layer over a packed row. `query`, `key`, `value`: `[1, heads, tokens, head size]`."""
    layer: Any = module.layer_idx
    keys, values = slots.cache.keys[layer], slots.cache.values[layer]
    for stored, new in ((keys, key), (values, value)):
        tokens = new[0].transpose(0, 1)
        source = tokens if slots.write_source is None else tokens[slots.write_source]
        stored[slots.write_slot, :, slots.write_position] = source
    heads, size, n = query.shape[1], query.shape[3], slots.running
    scaling = scaling or size**-0.5
    # Queries that share a key-value head are passed as query positions, so that no head is repeated in memory.
    q = query[0, :, :n].transpose(0, 1).reshape(n, keys.shape[1], -1, size)
    k, v = keys[:n, :, : slots.width], values[:n, :, : slots.width]
    newest = _attend(q, k, v, slots.decode_mask(sliding_window, query.dtype), scaling, softcap)
    newest = newest.reshape(n, heads, size)
    if slots.gather is None:
        return newest[None], None
    q, k, v = (t[0].transpose(0, 1)[slots.gather].transpose(1, 2) for t in (query, key, value))
    mask = slots.prompt_mask(sliding_window)
    earlier = grouped_attention(q, k, v, mask, scaling, softcap)
    return torch.cat([newest, earlier.transpose(1, 2).reshape(-1, heads, size)[slots.scatter]])[None], None


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float, softcap: float | None) -> Tensor:
    """Attention of few queries over long keys. On a CPU plain products take half the time of the fused kernel."""
    if not softcap and (q.is_cuda or q.dtype != torch.float32):
        return sdpa(q, k, v, attn_mask=mask, scale=scaling)
    scores = torch.matmul(q, k.transpose(-1, -2)).mul_(scaling)
    if softcap:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    weights = scores.add_(mask).softmax(-1, dtype=torch.float32)
    return torch.matmul(weights.to(q.dtype), v)


AttentionInterface.register(ATTENTION, slot_attention)
