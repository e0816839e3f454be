"""Log-probabilities of completion tokens, without ever holding the logits of all of them.

The language-model head, the temperature, the kept-token mask and the log-softmax run over chunks of tokens; in the
backward pass each chunk is computed again. Memory does not grow with tokens times vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from slipstream.rollout import Completion
from slipstream.trainers.packing import MicroBatch

CHUNK = 2**25  # logits held at once: 128 MiB in float32
CHUNK_ON_GPU = 2**28


def token_logprobs(model: Any, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Log-probability of every completion token under the distribution that it was drawn from, and its entropy.

    Both float32 `[completion tokens]`, in the order of `batch`; the entropy carries no gradient.
    """
    causal_lm = model.get_base_model() if hasattr(model, "get_base_model") else model
    # Padding is on the right, where causal attention never looks from a real token: no mask is needed.
    hidden = getattr(causal_lm, causal_lm.base_model_prefix)(input_ids=batch.input_ids, use_cache=False)
    hidden = hidden.last_hidden_state.flatten(0, 1)[batch.predicts]
    head = causal_lm.get_output_embeddings()
    size = max(64, (CHUNK_ON_GPU if hidden.is_cuda else CHUNK) // head.out_features)
    chunks = range(0, len(hidden), size)
    results = []
    for at in chunks:
        chunk = slice(at, at + size)
        arguments = (head, hidden[chunk], batch.targets[chunk], batch.temperatures[chunk], batch.kept[chunk])
        if len(chunks) > 1 and torch.is_grad_enabled():
            results.append(checkpoint(_chunk_logprobs, *arguments, use_reentrant=False))
        else:
            results.append(_chunk_logprobs(*arguments))
    logprobs, entropy = zip(*results, strict=True)
    return torch.cat(logprobs), torch.cat(entropy)


def _chunk_logprobs(
    head: nn.Module, hidden: Tensor, targets: Tensor, temperatures: Tensor, kept: Sequence[Any]
) -> tuple[Tensor, Tensor]:
    logits = head(hidden).float() / temperatures[:, None]
    if any(ids is not None for ids in kept):
        logits = logits.masked_fill(~_kept_mask(kept, logits), -torch.inf)
    logprobs = logits.log_softmax(-1)
    with torch.no_grad():
        entropy = -(logprobs.exp() * logprobs.clamp(min=-1e9)).sum(-1)
    return logprobs.gather(-1, targets[:, None])[:, 0], entropy


def _kept_mask(kept: Sequence[Any], logits: Tensor) -> Tensor:
    """Which tokens top-k/top-p left at each position `[tokens, vocabulary]`; None kept all."""
    mask = torch.zeros(logits.shape, dtype=torch.bool)
    for row, ids in enumerate(kept):
        if ids is None:
            mask[row] = True
        else:
            mask[row, torch.as_tensor(ids, dtype=torch.long)] = True
    return mask.to(logits.device)


def refuse_untrainable(config: Any) -> None:
    """Raise `ValueError` for a model whose head does more than a linear layer."""
    if getattr(config, "final_logit_softcapping", None):
        raise ValueError(f"the trainer can't train a {config.model_type} with final_logit_softcapping")


def per_completion(values: Tensor, completions: Sequence[Completion]) -> list[list[float]]:
    """Cut one number a token back into one list a completion."""
    cut, at = [], 0
    for completion in completions:
        cut.append(values[at : at + len(completion.token_ids)].tolist())
        at += len(completion.token_ids)
    return cut
