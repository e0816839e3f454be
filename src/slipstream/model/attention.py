"""Attention over packed tokens: each segment of queries attends to its own keys only.

On a GPU this is torch's variable-length flash attention; on a CPU it is torch's scaled dot-product attention over
blocks of segments of similar length. Hugging Face models call `attend` through their attention interface.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import varlen
from torch.nn.utils.rnn import pad_sequence

from slipstream.errors import InvalidInput
from slipstream.model.context_parallel import ContextParallelGroup

NAME = "slipstream"
HALF_DTYPES = (torch.bfloat16, torch.float16)  # the dtypes of variable-length attention
SegmentRanges = tuple[range, tuple[range, ...]]  # query tokens, and the token ranges that they attend to
SUPPORTED_LAYER_TYPES = {"full_attention", "sliding_attention"}  # `layer_types` of Hugging Face configurations
# The keyword arguments of `attend` that describe the segments of its input.
SEGMENT_ARGUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "key_index", "blocks")
UNSUPPORTED_ARGUMENTS = ("s_aux", "position_bias")  # extensions of attention that packing does not support


class Block(NamedTuple):
    """A batch of segments of similar length: token indices of their queries and keys, each padded to
    `[segments, longest]`, and the `lengths` of both without padding, `[segments, 2]`."""

    queries: Tensor
    keys: Tensor
    lengths: Tensor


@dataclass(frozen=True)
class Segments:
    """The segments of a row of packed tokens: causal attention, where a segment's last query sees its last key.

    `query_bounds` and `key_bounds` `[segments + 1]` are cumulative lengths. `keys` `[total keys]` are token indices of
    the keys, or None if they are the tokens in order. `blocks` are the same segments for a device without
    variable-length attention. `pairs` is the number of attended (query, key) pairs.
    """

    query_bounds: Tensor
    key_bounds: Tensor
    longest: tuple[int, int]
    keys: Tensor | None
    blocks: tuple[Block, ...]
    pairs: int

    @classmethod
    def from_ranges(
        cls, segments: Sequence[SegmentRanges], device: torch.device, padding: Sequence[range] = ()
    ) -> Segments:
        """The tensors of these segments of one row, and of ranges of `padding` at its end, whose pairs don't count.

        `blocks` are made on the CPU only.
        """
        counted = len(segments)
        segments = [*segments, *((each, (each,)) for each in padding)]
        queries, sizes = [len(q) for q, _ in segments], [sum(map(len, ks)) for _, ks in segments]
        plain = all(ks == (q,) for q, ks in segments)
        return cls(
            query_bounds=concat_to_device([[0, *accumulate(queries)]], torch.int32, device),
            key_bounds=concat_to_device([[0, *accumulate(sizes)]], torch.int32, device),
            longest=(max(queries), max(sizes)),
            keys=None if plain else concat_to_device([k for _, ks in segments for k in ks], torch.long, device),
            blocks=_blocks(segments) if device.type == "cpu" else (),
            pairs=sum(q * (k - q) + q * (q + 1) // 2 for q, k in zip(queries[:counted], sizes[:counted], strict=True)),
        )

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of a Hugging Face model's forward method that it passes on to `attend`."""
        values = (self.query_bounds, self.key_bounds, *self.longest, self.keys, self.blocks)
        return dict(zip(SEGMENT_ARGUMENTS, values, strict=True))


def attend(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None, *,
    cu_seq_lens_q: Tensor | None = None, cu_seq_lens_k: Tensor | None = None,
    max_length_q: int = 0, max_length_k: int = 0, key_index: Tensor | None = None, blocks: Sequence[Block] = (),
    context: ContextParallelGroup | None = None, softcap: float | None = None, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """A Hugging Face attention function: `[1, heads, tokens, size]` each, to `[1, tokens, heads, size of values]`.

    With a `context` the tokens are this rank's part of the micro-batch. Raises `InvalidInput` for other attention.
    """
    if cu_seq_lens_q is None or cu_seq_lens_k is None:
        raise InvalidInput(f"{type(module).__name__} does not pass on how its input is packed")
    if any(others.get(name) is not None for name in UNSUPPORTED_ARGUMENTS):
        raise InvalidInput(f"{type(module).__name__} has attention of a kind that can't be packed")
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    size, scaling = v.shape[-1], scaling or q.shape[-1] ** -0.5
    if size != q.shape[-1]:  # latent attention; kernels need equal head dimensions
        q, k, v = (functional.pad(t, (0, max(size, q.shape[-1]) - t.shape[-1])) for t in (q, k, v))
    if context:
        q, k, v = map(context.to_heads, (q, k, v))
    if key_index is not None and not blocks:
        k, v = (_GatherRows.apply(rows, key_index) for rows in (k, v))  # type: ignore[no-untyped-call]
    if blocks or softcap or q.dtype not in HALF_DTYPES:
        each = blocks or _blocks_of_bounds(cu_seq_lens_q, cu_seq_lens_k)
        out: Any = _attend_in_blocks(q, k, v, each, scaling, sliding_window, softcap)
    else:
        k, v = (_repeat_heads(rows, q.shape[1]) for rows in (k, v))
        window = (sliding_window - 1 if sliding_window else -1, 0)
        bounds = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
        out = varlen.varlen_attn(q, k, v, *bounds, scale=scaling, window_size=window)
    return (context.to_tokens(out) if context else out)[None, ..., :size], None


def _repeat_heads(rows: Tensor, heads: int) -> Tensor:
    """Repeat keys or values `[tokens, key heads, size]` for each of `heads` query heads.

    Torch's kernel computes gradients of keys for each query head. Its own sum over the query heads of a key head is
    slower than that of compiled code.
    """
    sharing = heads // rows.shape[1]
    return rows if sharing == 1 else rows[:, :, None].expand(-1, -1, sharing, -1).flatten(1, 2)


class _GatherRows(torch.autograd.Function):
    """`rows[index]`; the gradient is summed in float32, since many completions share a prompt's keys."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.like = rows.shape, rows.dtype
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (index,), (shape, dtype), (grad,) = ctx.saved_tensors, ctx.like, grads
        total = torch.zeros(shape, dtype=torch.promote_types(dtype, torch.float32), device=grad.device)
        return total.index_add_(0, index, grad.to(total.dtype)).to(dtype), None


def _attend_in_blocks(
    q: Tensor, k: Tensor, v: Tensor, blocks: Sequence[Block], scaling: float, window: int | None, softcap: float | None
) -> Tensor:
    parts, places = [], []
    for block in blocks:
        counts, sizes = block.lengths[:, :1], block.lengths[:, 1:]
        place = torch.arange(block.queries.shape[1], device=q.device)
        mask = None
        if window or not torch.equal(counts, sizes):
            at = (place + sizes - counts)[:, None, :, None]  # of each query among its keys
            seen = torch.arange(block.keys.shape[1], device=q.device)
            mask = (seen <= at) & (seen > at - window) if window else seen <= at
        by_side = ((q, block.queries), (k, block.keys), (v, block.keys))
        queries, keys, values = (t[index].transpose(1, 2) for t, index in by_side)
        out = grouped_attention(queries, keys, values, mask, scaling, softcap)
        real = place < counts
        parts.append(out.transpose(1, 2)[real])
        places.append(block.queries[real])
    return torch.zeros_like(q).index_copy(0, torch.cat(places), torch.cat(parts))


def grouped_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, softcap: float | None
) -> Tensor:
    """Attention `[batch, heads, tokens, size]` where query heads share key/value heads; causal if `mask` is None.

    `mask` is boolean, `[1 or batch, 1, queries, keys]` or without its first two dimensions. With a soft cap c the
    scores x become c tanh(x / c): plain products, since fused kernels have none, so that memory grows with the number
    of pairs.
    """
    if not softcap:
        grouped = q.shape[1] != k.shape[1]
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
        )
    if mask is None:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    mask = mask.expand(q.shape[0], 1, *mask.shape[-2:]).unsqueeze(1)
    by_group = q.reshape(q.shape[0], k.shape[1], -1, *q.shape[2:])
    scores = torch.matmul(by_group, k.unsqueeze(2).transpose(-1, -2)) * scaling
    weights = (softcap * torch.tanh(scores / softcap)).masked_fill(~mask, torch.finfo(q.dtype).min)
    weights = weights.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    return torch.matmul(weights, v.unsqueeze(2)).flatten(1, 2)


def _blocks_of_bounds(query_bounds: Tensor, key_bounds: Tensor) -> tuple[Block, ...]:
    """One block for each segment between these bounds, for devices without variable-length attention."""
    rows = torch.arange(max(int(query_bounds[-1]), int(key_bounds[-1])), device=query_bounds.device)
    pairs = (pairwise(bounds.tolist()) for bounds in (query_bounds, key_bounds))
    return tuple(
        Block(rows[None, a:b], rows[None, c:d], torch.tensor([[b - a, d - c]], device=rows.device))
        for (a, b), (c, d) in zip(*pairs, strict=True)
    )


def _blocks(runs: Sequence[SegmentRanges]) -> tuple[Block, ...]:
    """Blocks of segments; the longest segment of a block has at most twice the keys of the shortest."""
    pending = sorted(((q, [i for k in ks for i in k]) for q, ks in runs), key=lambda run: (len(run[1]), len(run[0])))
    blocks = []
    while pending:
        limit = 2 * len(pending[0][1])
        similar = [run for run in pending if len(run[1]) <= limit]
        pending = pending[len(similar) :]
        queries, keys = ([torch.tensor(run[side]) for run in similar] for side in (0, 1))
        lengths = torch.tensor([[len(q), len(k)] for q, k in similar])
        blocks.append(Block(pad_sequence(queries, batch_first=True), pad_sequence(keys, batch_first=True), lengths))
    return tuple(blocks)


def concat_to_device(parts: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Concatenate sequences of numbers into a tensor on `device`; a GPU copies it asynchronously."""
    tensor = torch.from_numpy(np.concatenate([np.asarray(part) for part in parts])).to(dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
