"""Log-probabilities of sampled tokens, computed in chunks: memory does not grow with tokens times vocabulary.

The language-model head, the temperature, the sampling mask, the log-softmax and the entropy run over chunks of tokens.
If the head is trained, the backward pass recomputes each chunk's logits, unless the forward pass kept them. If the head
is frozen, as with adapters, the forward pass computes the gradient of each log-probability with respect to its hidden
state.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from slipstream.model.sampling_mask import SamplingMask

LARGE_HEAD = 2**24  # elements of a head weight that exceeds CPU caches
CHUNK = 2**24  # logits of one chunk: 64 MiB in float32
CHUNK_ON_GPU = 2**27  # a chunk of 2**29 is 1% faster for a 1.7B model, and takes 2 GB more


def head_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor, mask: SamplingMask | None,
    compiled: bool = False, *, bias: Tensor | None = None, softcap: float = 0.0, keep: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Log-probability of each target under p = softmax(z / temperature), and the entropy of p, for logits
    z = hidden weight^T + bias, or softcap tanh(z / softcap) of them.

    p covers the ids that `mask` keeps, those of top-k/top-p (None: all). `hidden` `[tokens, size]` and `weight`
    `[vocabulary, size]` have one dtype, to which logits are rounded, as in engines. `targets` and `temperatures` are
    `[tokens]`. Results are `[tokens]` in float32, or float64 for float64; the entropy has no gradient. `compiled` uses
    Triton kernels for the operations that are not matrix products, which needs a GPU. `keep` holds the logits until
    the backward pass, which then does not repeat their product: memory grows with tokens times vocabulary.
    """
    result: tuple[Tensor, Tensor] = _HeadLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, temperatures, mask, compiled, softcap, keep
    )
    return result


class _HeadLogprobs(torch.autograd.Function):
    """z = (W h + b) / T, p = softmax(z): log p_y = z_y - lse(z), d(log p_y)/dz = onehot(y) - p, H = lse(z) - sum(p z).

    With a soft cap c: z = c tanh(x / c) / T for x = W h + b, and dz/dx = (1 - (z T / c)^2) / T.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperatures: Tensor,
        mask: SamplingMask | None, compiled: bool, softcap: float, keep: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        functions = _functions(compiled)
        frozen = ctx.needs_input_grad[0] and not any(ctx.needs_input_grad[1:3])
        gradient = torch.empty_like(hidden) if frozen else None  # of each log-probability to its hidden state
        exact = torch.promote_types(hidden.dtype, torch.float32)
        logprobs, normaliser, entropy = (torch.empty(len(hidden), dtype=exact, device=hidden.device) for _ in range(3))
        kept: list[Tensor] = []
        for chunk in _chunks(hidden, weight):
            excluded = mask.excluded(chunk, len(weight)) if mask else None
            logits, temperature = head_logits(hidden[chunk], weight, bias, softcap), temperatures[chunk].to(exact)
            slope = _softcap_slope(logits, softcap) if gradient is not None else None  # before `logits` is overwritten
            inputs = logits, targets[chunk], temperature, excluded
            by_logits: Tensor | None = None
            if gradient is not None and not compiled:
                *results, by_logits = _logprobs_entropy_and_gradients(*inputs)
            else:
                results = functions.logprobs_and_entropy(*inputs)
                if gradient is not None:
                    by_logits = functions.logit_gradients(*inputs, results[1], 1 / temperature)
            if keep and gradient is None:
                kept.append(logits)
            logprobs[chunk], normaliser[chunk], entropy[chunk] = results
            if gradient is not None and by_logits is not None:
                torch.mm(by_logits if slope is None else by_logits.mul_(slope), weight, out=gradient[chunk])
        ctx.save_for_backward(hidden, weight, bias, targets, temperatures, normaliser, gradient)
        ctx.mask, ctx.logit_gradients, ctx.softcap, ctx.kept = mask, functions.logit_gradients, softcap, kept
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        hidden, weight, bias, targets, temperatures, normaliser, gradient = ctx.saved_tensors
        if gradient is not None:
            return (gradient * grads[0][:, None]).to(hidden.dtype), *[None] * 8
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight, grad_bias = (
            torch.zeros(tensor.shape, dtype=normaliser.dtype, device=hidden.device) if needed else None
            for tensor, needed in zip((weight, bias), ctx.needs_input_grad[1:3], strict=True)
        )
        for chunk in _chunks(hidden, weight):
            excluded = ctx.mask.excluded(chunk, len(weight)) if ctx.mask else None
            logits = ctx.kept.pop(0) if ctx.kept else head_logits(hidden[chunk], weight, bias, ctx.softcap)
            slope = _softcap_slope(logits, ctx.softcap)
            temperature = temperatures[chunk].to(normaliser.dtype)
            inputs = logits, targets[chunk], temperature, excluded
            logit_gradients = ctx.logit_gradients(*inputs, normaliser[chunk], grads[0][chunk] / temperature)
            if slope is not None:
                logit_gradients.mul_(slope)
            if grad_hidden is not None:
                torch.mm(logit_gradients, weight, out=grad_hidden[chunk])
            if grad_weight is not None:
                _add_product(grad_weight, logit_gradients, hidden[chunk])
            if grad_bias is not None:
                grad_bias += logit_gradients.sum(0, dtype=grad_bias.dtype)
        sums = (None if grad is None else grad.to(weight.dtype) for grad in (grad_weight, grad_bias))
        return grad_hidden, *sums, *[None] * 6


def _functions(compiled: bool) -> Any:
    """The module with the `logprobs_and_entropy` and `logit_gradients` to use."""
    if not compiled:
        return sys.modules[__name__]
    from slipstream.model import head_kernels  # hosts without GPUs may lack Triton

    return head_kernels


def logprobs_and_entropy(
    logits: Tensor, targets: Tensor, temperatures: Tensor, excluded: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of the targets, log of the softmax denominator, and entropy; each `[tokens]`."""
    scaled = logits.to(temperatures.dtype) / temperatures[:, None]
    if excluded is not None:
        scaled = scaled.masked_fill(excluded, -torch.inf)
    top = scaled.amax(-1, keepdim=True)
    weights = (scaled - top).exp_()
    total = weights.sum(-1)
    normaliser = total.log() + top[:, 0]
    logprobs = scaled.gather(-1, targets[:, None])[:, 0] - normaliser
    expected = weights.mul_(scaled.clamp_(min=torch.finfo(scaled.dtype).min)).sum(-1) / total
    return logprobs, normaliser, normaliser - expected


def logit_gradients(
    logits: Tensor, targets: Tensor, temperatures: Tensor, excluded: Tensor | None, normaliser: Tensor, scale: Tensor
) -> Tensor:
    """scale (onehot - p): gradient of the targets' log-probabilities with respect to the logits, in their dtype."""
    scaled = logits.to(temperatures.dtype) / temperatures[:, None]
    if excluded is not None:
        scaled = scaled.masked_fill(excluded, -torch.inf)
    is_target = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    probabilities = scaled.sub_(normaliser[:, None]).exp_()
    return probabilities.neg_().add_(is_target).mul_(scale[:, None]).to(logits.dtype)


def _logprobs_entropy_and_gradients(
    logits: Tensor, targets: Tensor, temperatures: Tensor, excluded: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`logprobs_and_entropy`, and `logit_gradients` of the log-probabilities, in half as many passes over the logits.

    Overwrites `logits`.
    """
    scaled = logits.to(temperatures.dtype).div_(temperatures[:, None])
    if excluded is not None:
        scaled.masked_fill_(excluded, -torch.inf)
    top = scaled.amax(-1, keepdim=True)
    weights = (scaled - top).exp_()
    total = weights.sum(-1)
    normaliser = total.log() + top[:, 0]
    logprobs = scaled.gather(-1, targets[:, None])[:, 0] - normaliser
    if excluded is not None:
        scaled.clamp_(min=torch.finfo(scaled.dtype).min)
    expected = torch.bmm(weights[:, None], scaled[:, :, None])[:, 0, 0] / total
    gradients = weights.mul_(-1 / (temperatures * total)[:, None])
    gradients.scatter_add_(1, targets[:, None], 1 / temperatures[:, None])
    return logprobs, normaliser, normaliser - expected, gradients.to(logits.dtype)


def _add_product(total: Tensor, logit_gradients: Tensor, hidden: Tensor) -> None:
    """total += logit_gradients^T hidden, summed in the dtype of `total`."""
    if logit_gradients.dtype == total.dtype:
        total.addmm_(logit_gradients.T, hidden)
    elif logit_gradients.is_cuda:
        torch.addmm(total, logit_gradients.T, hidden, out_dtype=total.dtype, out=total)
    else:
        total += logit_gradients.T @ hidden


def _chunks(hidden: Tensor, weight: Tensor) -> list[slice]:
    """Slices of tokens whose logits fit a chunk; at least 64 tokens each."""
    size = max(64, (CHUNK_ON_GPU if hidden.is_cuda else CHUNK) // weight.shape[0])
    return [slice(at, at + size) for at in range(0, len(hidden), size)]


def head_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float) -> Tensor:
    """hidden weight^T + bias, or softcap tanh(./softcap) of them; in the dtype of `hidden`, as in models."""
    logits = head_product(hidden, weight)
    if bias is not None:
        logits += bias
    return logits.div_(softcap).tanh_().mul_(softcap) if softcap else logits


def _softcap_slope(capped: Tensor, softcap: float) -> Tensor | None:
    """Derivative of softcap tanh(x / softcap) by x where its value is `capped`; None without a soft cap."""
    return 1 - (capped / softcap).square_() if softcap else None


def head_product(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden weight^T; oneDNN computes it for a large float32 head on a CPU, without a gradient.

    For 4 to 64 rows oneDNN takes 0.5 to 0.8 of the time of MKL, since MKL packs all weights first.
    """
    # `_linear_pointwise` is private: a release may drop it.
    has_onednn = torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    on_cpu = weight.device.type == "cpu" and hidden.dtype == weight.dtype == torch.float32
    if not (has_onednn and on_cpu and weight.numel() >= LARGE_HEAD):
        return hidden @ weight.T
    product: Tensor = torch.ops.mkldnn._linear_pointwise(hidden, weight, None, "none", [], "")
    return product
