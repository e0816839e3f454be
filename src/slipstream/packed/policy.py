"""The policy as the trainer runs it: packed tokens in, log-probabilities of the drawn ones out."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from slipstream.config import ConfigError
from slipstream.models import causal_lm, decoder_of, heads_of
from slipstream.packed import attention
from slipstream.packed.context import Context, joined
from slipstream.packed.logprobs import head_logprobs
from slipstream.packed.packing import MicroBatch
from slipstream.routing import Routing

LARGE = 100.0  # logits that every cap would change

ALL_ATTENTION_FUNCTIONS.register(attention.NAME, attention.attend)


class Policy(nn.Module):
    """A causal language model, or one with adapters, whose forward pass ends in log-probabilities, not in logits."""

    def __init__(self, model: Any, fuse: bool = False, context: Context | None = None) -> None:
        """Raises `ValueError` for a model that would compute something else here than in its own forward pass."""
        super().__init__()
        self.model = model
        self._fuse, self.context = fuse, context
        whole = causal_lm(model)
        _refuse_untrainable(whole)
        self.packs = _packs(whole)
        if self.packs:
            whole.set_attn_implementation(attention.NAME)
        if context:
            _refuse_context(context.size, whole.config, self.packs)
        self.routing = Routing(whole)
        self.predict = head_logprobs

    def forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-probability of each drawn token under the distribution that it was drawn from, and its entropy."""
        head = causal_lm(self.model).get_output_embeddings()
        if batch.experts is not None and not self.packs:
            kind = causal_lm(self.model).config.model_type
            raise ConfigError(
                f"routing can't be replayed in a {kind}, which can't be packed; set algorithm.keep_routing = false"
            )
        own, places = _own(batch, self.context) if self.context else (batch, None)
        self.routing.replay(own.experts)
        hidden = (self._packed if self.packs else self._one_by_one)(own)
        drawn = (own.targets, own.temperatures, own.kept)
        logprobs, entropy = self.predict(hidden[own.predicts], head.weight, *drawn, fuse=self._fuse)
        if self.context and places is not None:
            count, group = len(batch.predicts), self.context.group
            logprobs, entropy = (joined(found, places, count, group) for found in (logprobs, entropy))
        return logprobs, entropy.detach()

    def _packed(self, batch: MicroBatch) -> Tensor:
        arguments = batch.segments.arguments() | {"context": self.context}
        return self._backbone(batch.input_ids[None], position_ids=batch.positions[None], **arguments)

    def _one_by_one(self, batch: MicroBatch) -> Tensor:
        bounds = batch.segments.query_bounds.tolist()
        return torch.cat([self._backbone(batch.input_ids[None, a:b]) for a, b in pairwise(bounds)])

    def _backbone(self, input_ids: Tensor, **arguments: Any) -> Tensor:
        whole = causal_lm(self.model)
        backbone = getattr(whole, whole.base_model_prefix, None) or decoder_of(whole)
        hidden: Tensor = backbone(input_ids=input_ids, use_cache=False, **arguments).last_hidden_state[0]
        return hidden


def _own(batch: MicroBatch, context: Context) -> tuple[MicroBatch, Tensor]:
    """What this rank has of a micro-batch: its tokens, and what is drawn after them, by place in that of all ranks."""
    input_ids = context.part(batch.input_ids)
    first = context.rank * len(input_ids)
    places = ((batch.predicts >= first) & (batch.predicts < first + len(input_ids))).nonzero()[:, 0]
    return replace(
        batch,
        input_ids=input_ids,
        positions=context.part(batch.positions),
        experts=None if batch.experts is None else context.part(batch.experts),
        predicts=batch.predicts[places] - first,
        targets=batch.targets[places],
        temperatures=batch.temperatures[places],
        kept=batch.kept.at(places.tolist()) if batch.kept else None,
    ), places


def _packs(model: Any) -> bool:
    """Whether attention is all by which its tokens know of each other, and is of a kind that `attention.attend` knows.

    Other layers carry what they know from one sequence to the next: such a model reads them one by one.
    """
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    sinks = any("sink" in name.rpartition(".")[2] for name, _ in model.named_parameters())
    return bool(model._supports_attention_backend and not (model._is_stateful or sinks) and kinds <= attention.LAYERS)


def _refuse_untrainable(model: Any) -> None:
    kind, head = model.config.model_type, model.get_output_embeddings()
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        raise ValueError(f"the trainer can't train a {kind} with attn_logit_softcapping")
    if not isinstance(head, nn.Linear) or getattr(head, "bias", None) is not None:
        raise ValueError(f"the trainer can't train a {kind}: its head is not a linear layer without bias")
    if not head.weight.is_meta and not _ends_in_its_head(model, head):
        raise ValueError(
            f"the trainer can't train a {kind}: its logits are not what its head gives, but scaled or capped"
        )


class _Hidden(MoeModelOutputWithPast):  # type: ignore[misc]
    """What a backbone returns, with nothing but its last layer's output."""

    def __getattr__(self, name: str) -> None:
        return None


@torch.no_grad()
def _ends_in_its_head(model: Any, head: nn.Linear) -> bool:
    """Whether the model's logits are its head's outputs, tried on a last layer's output by chance."""
    hidden = torch.randn(1, 2, head.in_features, generator=torch.Generator().manual_seed(0)).to(head.weight)
    hidden *= LARGE / head(hidden).abs().amax().float().item()
    backbone = decoder_of(model)  # which its forward pass calls
    own = vars(backbone).pop("forward", None)
    backbone.forward = lambda *_, **__: _Hidden(last_hidden_state=hidden)
    try:
        logits = model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=hidden.device)).logits
    finally:
        del backbone.forward
        vars(backbone).update({"forward": own} if own else {})
    return bool((logits - head(hidden)).abs().amax() < LARGE / 100)


def _refuse_context(size: int, config: Any, packs: bool) -> None:
    heads, keys, _ = heads_of(config)
    if not packs or heads % size or (keys % size and size % keys):
        why = f"{heads} heads and {keys} of keys and values" if packs else "layers that carry a state"
        raise ConfigError(f"trainer.context_parallel = {size} can't share out a model with {why}; lower it")
