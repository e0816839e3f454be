"""Log-probabilities of drawn tokens, without ever holding the logits of all of them.

The language-model head, the temperature, the kept-token mask, the log-softmax and the entropy run over chunks of
tokens; the backward pass computes each chunk's logits again and turns them into gradients. Memory does not grow with
tokens times vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from slipstream.packed.kept import Kept

CHUNK = 2**24  # logits held at once: 64 MiB in float32
CHUNK_ON_GPU = 2**27  # four times as many are 1 % faster at 1.7 B, and take 2 GB more


def head_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor, kept: Kept | None, fuse: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target under softmax(hidden weight^T / temperature) over its kept tokens, and entropy.

    `hidden` `[tokens, size]` and `weight` `[vocabulary, size]` are of one format, to which logits are rounded, as those
    of engines are; `targets` and `temperatures` `[tokens]`; `kept` are the ids that top-k/top-p left at each (None:
    all). Both results are `[tokens]` in float32, or float64 for float64; the entropy carries no gradient. `fuse`
    compiles what is not a matrix product.
    """
    result: tuple[Tensor, Tensor] = _HeadLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, temperatures, kept, fuse
    )
    return result


class _HeadLogprobs(torch.autograd.Function):
    """z = W h / T, p = softmax(z): log p_y = z_y - lse(z), d(log p_y)/dz = onehot(y) - p, H = lse(z) - sum(p z)."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor, kept: Kept | None, fuse: bool
    ) -> tuple[Tensor, Tensor]:
        describe = _fused(_describe) if fuse else _describe
        exact = torch.promote_types(hidden.dtype, torch.float32)
        logprobs, normaliser, entropy = (torch.empty(len(hidden), dtype=exact, device=hidden.device) for _ in range(3))
        for chunk in _chunks(hidden, weight):
            outside = kept.outside(chunk, len(weight)) if kept else None
            logits = hidden[chunk] @ weight.T
            described = describe(logits, targets[chunk], temperatures[chunk].to(exact), outside)
            logprobs[chunk], normaliser[chunk], entropy[chunk] = described
        ctx.save_for_backward(hidden, weight, targets, temperatures, normaliser)
        ctx.kept, ctx.slope = kept, _fused(_slope) if fuse else _slope
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        hidden, weight, targets, temperatures, normaliser = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros(weight.shape, dtype=normaliser.dtype, device=weight.device)
        for chunk in _chunks(hidden, weight):
            outside = ctx.kept.outside(chunk, len(weight)) if ctx.kept else None
            logits = hidden[chunk] @ weight.T
            heat = temperatures[chunk].to(normaliser.dtype)
            slope = ctx.slope(logits, targets[chunk], heat, outside, normaliser[chunk], grads[0][chunk] / heat)
            if grad_hidden is not None:
                torch.mm(slope, weight, out=grad_hidden[chunk])
            if grad_weight is not None:
                _add_product(grad_weight, slope, hidden[chunk])
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None, None


def _describe(
    logits: Tensor, targets: Tensor, temperatures: Tensor, outside: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of the targets, the log of the normaliser, and the entropy."""
    scaled = logits.to(temperatures.dtype) / temperatures[:, None]
    if outside is not None:
        scaled = scaled.masked_fill(outside, -torch.inf)
    top = scaled.amax(-1, keepdim=True)
    weights = (scaled - top).exp()
    total = weights.sum(-1)
    normaliser = total.log() + top[:, 0]
    expected = (weights * scaled.clamp(min=torch.finfo(scaled.dtype).min)).sum(-1) / total
    return scaled.gather(-1, targets[:, None])[:, 0] - normaliser, normaliser, normaliser - expected


def _slope(
    logits: Tensor, targets: Tensor, temperatures: Tensor, outside: Tensor | None, normaliser: Tensor, scale: Tensor
) -> Tensor:
    """scale (onehot - p), in the format of the logits."""
    scaled = logits.to(temperatures.dtype) / temperatures[:, None]
    if outside is not None:
        scaled = scaled.masked_fill(outside, -torch.inf)
    chosen = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    slope = scale[:, None] * (chosen.to(scaled.dtype) - (scaled - normaliser[:, None]).exp())
    return slope.to(logits.dtype)


@cache
def _fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function compiled, where it is asked for: the compiler takes a second to import."""
    compiled: Callable[..., Any] = torch.compile(function, dynamic=True)
    return compiled


def _add_product(total: Tensor, slope: Tensor, hidden: Tensor) -> None:
    """total += slope^T hidden, summed in the format of `total`."""
    if slope.dtype == total.dtype:
        total.addmm_(slope.T, hidden)
    elif slope.is_cuda:
        torch.addmm(total, slope.T, hidden, out_dtype=total.dtype, out=total)
    else:
        total += slope.T @ hidden


def _chunks(hidden: Tensor, weight: Tensor) -> list[slice]:
    size = max(64, (CHUNK_ON_GPU if hidden.is_cuda else CHUNK) // weight.shape[0])
    return [slice(at, at + size) for at in range(0, len(hidden), size)]
