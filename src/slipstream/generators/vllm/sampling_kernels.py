"""Triton kernels that sample a token from each row of logits, with its log-probability, and read the logits once.

The first kernel sums the probabilities of each block of the vocabulary. The second kernel draws a block by these sums,
then a token in that block by a second random number. A number resolves probabilities above 6e-8: of a token in its
block, instead of the whole vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # logits that a program reads


@triton.jit
def _read(logits, temperature, at, size):  # type: ignore[no-untyped-def]
    """Logits divided by the temperature (by 1 if it is 0), in float32; -inf beyond the vocabulary."""
    values = tl.load(logits + at, mask=at < size, other=-float("inf")).to(tl.float32)
    return values / tl.where(temperature == 0.0, 1.0, temperature)


@triton.jit
def _finite(top):  # type: ignore[no-untyped-def]
    """What is subtracted from logits before `exp`: their largest, or 0 if all are -inf."""
    return tl.where(top == -float("inf"), 0.0, top)


@triton.jit  # type: ignore[untyped-decorator]
def _blocks_kernel(  # type: ignore[no-untyped-def]
    logits, stride, states, temperatures, tops, sums, firsts, size, blocks, BLOCK: tl.constexpr
):
    """Of a block of a row: the largest logit, its index, and the sum of `exp(logit - largest)`."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperatures + tl.load(states + row))
    values = _read(logits + row * stride, temperature, block * BLOCK + tl.arange(0, BLOCK), size)
    top, first = tl.max(values, axis=0, return_indices=True)
    tl.store(tops + row * blocks + block, top)
    tl.store(firsts + row * blocks + block, first)
    tl.store(sums + row * blocks + block, tl.sum(tl.exp(values - _finite(top))))


@triton.jit  # type: ignore[untyped-decorator]
def _index(weights, uniform, largest, greedy, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """An index drawn by weights and `uniform`; `largest` if greedy, or if rounding or NaN selects one of weight 0."""
    index = tl.sum((tl.cumsum(weights, 0) <= uniform * tl.sum(weights)).to(tl.int32))
    weight = tl.sum(tl.where(tl.arange(0, SIZE) == index, weights, 0.0))
    return tl.where((weight > 0.0) & (greedy == 0), index, largest)


@triton.jit  # type: ignore[untyped-decorator]
def _choose_kernel(  # type: ignore[no-untyped-def]
    logits, stride, states, temperatures, seeds, positions, tops, sums, firsts, tokens, logprobs, size, blocks,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Of a row: the sampled token and its log-probability. `BLOCKS` is the power of two from `blocks` on."""
    row = tl.program_id(0).to(tl.int64)
    state, each = tl.load(states + row), tl.arange(0, BLOCKS)
    temperature = tl.load(temperatures + state)
    greedy = (temperature == 0.0).to(tl.int32)
    uniform, uniform_in_block, _, _ = tl.rand4x(tl.load(seeds + state), tl.load(positions + row))
    block_tops = tl.load(tops + row * blocks + each, mask=each < blocks, other=-float("inf"))
    top, top_block = tl.max(block_tops, axis=0, return_indices=True)
    weights = tl.load(sums + row * blocks + each, mask=each < blocks, other=0.0) * tl.exp(block_tops - _finite(top))
    block = tl.minimum(_index(weights, uniform, top_block, greedy, BLOCKS), blocks - 1)
    values = _read(logits + row * stride, temperature, block * BLOCK + tl.arange(0, BLOCK), size)
    in_block = tl.exp(values - _finite(tl.load(tops + row * blocks + block)))
    first = tl.load(firsts + row * blocks + block)
    token = tl.minimum(block * BLOCK + _index(in_block, uniform_in_block, first, greedy, BLOCK), size - 1)
    tl.store(tokens + row, token)
    own = _read(logits + row * stride, temperature, token, size)
    tl.store(logprobs + row, own - _finite(top) - tl.log(tl.sum(weights)))


def sample(
    logits: Tensor, states: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Sampled token ids (int64) and their log-probabilities (float32) of rows of logits, `[rows, vocabulary]`.

    `states` are the rows' indices in `temperatures` and `seeds`; a temperature of 0 chooses the largest logit, whose
    log-probability is that at temperature 1. The random numbers of a row depend on its seed and its position.
    """
    rows, size = logits.shape
    blocks = triton.cdiv(size, BLOCK)
    tops = logits.new_empty((rows, blocks), dtype=torch.float32)
    sums = torch.empty_like(tops)  # allocated, hence aligned as its kernels were compiled for
    firsts = logits.new_empty((rows, blocks), dtype=torch.int32)
    tokens, logprobs = logits.new_empty(rows, dtype=torch.int64), logits.new_empty(rows, dtype=torch.float32)
    row = logits, logits.stride(0), states, temperatures
    found = tops, sums, firsts
    _blocks_kernel[rows, blocks](*row, *found, size, blocks, BLOCK=BLOCK)
    padded = triton.next_power_of_2(blocks)
    _choose_kernel[(rows,)](*row, seeds, positions, *found, tokens, logprobs, size, blocks, BLOCK=BLOCK, BLOCKS=padded)
    return tokens, logprobs
