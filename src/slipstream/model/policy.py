"""The policy's forward pass: packed tokens in, log-probabilities and entropies of the sampled tokens out."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from slipstream.config.schema import ConfigError
from slipstream.errors import InvalidInput
from slipstream.model import attention, experts
from slipstream.model.context_parallel import ContextParallelGroup, gather_at_positions
from slipstream.model.images import reads_images
from slipstream.model.inspection import (
    LogitMap,
    attention_heads,
    can_share_heads,
    causal_lm,
    logit_map,
    text_decoder,
)
from slipstream.model.logprobs import head_logits, head_logprobs
from slipstream.model.moe_routing import ExpertRouting
from slipstream.model.packing import MicroBatch

PROBE_LOGIT = 100.0  # large enough that every soft cap would change it

ALL_ATTENTION_FUNCTIONS.register(attention.NAME, attention.attend)
ALL_EXPERTS_FUNCTIONS.register(experts.NAME, experts.grouped_experts)


class PackedPolicy(nn.Module):
    """A causal language model, with or without adapters, whose forward pass returns log-probabilities."""

    def __init__(
        self, model: Any, compiled: bool = False, context: ContextParallelGroup | None = None, keep_logits: bool = False
    ) -> None:
        """`keep_logits` holds logits of a forward pass until its backward pass, which then computes no logits.

        Raises `InvalidInput` if the model's logits are not those of `logit_map`, `ConfigError` for `context`.
        """
        super().__init__()
        self.model = model
        self._compiled, self.context, self._keep_logits = compiled, context, keep_logits
        whole = causal_lm(model)
        self._logits = logit_map(whole.config)
        _validate_trainable(whole, self._logits)
        self.packs = _can_pack(whole)
        if self.packs:
            with_tower = reads_images(whole.config)
            whole.set_attn_implementation({"text_config": attention.NAME} if with_tower else attention.NAME)
            if with_tower:
                whole.base_model.visual.register_forward_pre_hook(_without_segments, with_kwargs=True)
                whole.get_input_embeddings().register_forward_hook(self._embed_placeholders)
        if context:
            validate_context(context.size, whole)
        if whole.config._experts_implementation == "grouped_mm":  # the default, of dense models, too
            whole.set_experts_implementation(experts.NAME)
        self.routing = ExpertRouting(whole)
        self.predict = head_logprobs
        self._placeholders: Tensor | None = None  # of the micro-batch in the forward pass

    def forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-probability of each sampled token under its sampling distribution, and that distribution's entropy.

        Raises `ConfigError` if the batch has recorded experts that this model can't replay.
        """
        head = causal_lm(self.model).get_output_embeddings()
        if batch.experts is not None and not self.packs:
            kind = causal_lm(self.model).config.model_type
            raise ConfigError(
                f"routing can't be replayed in a {kind}, which can't be packed; set algorithm.replay_routing = false"
            )
        own, indices = _local_micro_batch(batch, self.context) if self.context else (batch, None)
        self.routing.replay(own.experts)
        self._placeholders = own.placeholders
        hidden = self._hidden_states(own)
        sampled = (own.targets, own.temperatures / self._logits.scale, own.sampling_mask)
        options = {"compiled": self._compiled, "bias": head.bias, "softcap": self._logits.softcap}
        keep = self._keep_logits and torch.is_grad_enabled()
        logprobs, entropy = self.predict(hidden[own.predicts], head.weight, *sampled, keep=keep, **options)
        if self.context and indices is not None:
            count, group = len(batch.predicts), self.context.group
            logprobs, entropy = (gather_at_positions(found, indices, count, group) for found in (logprobs, entropy))
        return logprobs, entropy.detach()

    def _hidden_states(self, batch: MicroBatch) -> Tensor:
        if self.packs:
            arguments = batch.segments.arguments() | {"context": self.context} | dict(batch.images)
            return self._backbone(batch.input_ids[None], position_ids=batch.positions[..., None, :], **arguments)
        bounds = batch.segments.query_bounds.tolist()
        return torch.cat([self._backbone(batch.input_ids[None, a:b]) for a, b in pairwise(bounds)])

    def _embed_placeholders(self, embedding: Any, _: Any, embedded: Tensor) -> Tensor:
        """The embedded row, with the embedding of the placeholder where the policy sampled one."""
        if self._placeholders is None:
            return embedded
        own = embedding.weight[causal_lm(self.model).config.image_token_id].to(embedded)
        return embedded.index_copy(1, self._placeholders, own.expand(1, len(self._placeholders), -1))

    def _backbone(self, input_ids: Tensor, **arguments: Any) -> Tensor:
        whole = causal_lm(self.model)
        backbone = getattr(whole, whole.base_model_prefix, None) or text_decoder(whole)
        hidden: Tensor = backbone(input_ids=input_ids, use_cache=False, **arguments).last_hidden_state[0]
        return hidden


def _without_segments(tower: nn.Module, positional: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Arguments of a vision tower without those on packing, which the model passes on to all its parts."""
    packing = (*attention.SEGMENT_ARGUMENTS, "context")
    return positional, {name: value for name, value in named.items() if name not in packing}


def _local_micro_batch(batch: MicroBatch, context: ContextParallelGroup) -> tuple[MicroBatch, Tensor]:
    """This rank's tokens of a micro-batch and the entries that they predict, and the indices of these entries."""
    input_ids = context.shard(batch.input_ids)
    first = context.rank * len(input_ids)
    indices = ((batch.predicts >= first) & (batch.predicts < first + len(input_ids))).nonzero()[:, 0]
    return replace(
        batch,
        input_ids=input_ids,
        positions=context.shard(batch.positions),
        experts=None if batch.experts is None else context.shard(batch.experts),
        predicts=batch.predicts[indices] - first,
        targets=batch.targets[indices],
        temperatures=batch.temperatures[indices],
        sampling_mask=batch.sampling_mask.at(indices.tolist()) if batch.sampling_mask else None,
    ), indices


def _can_pack(model: Any) -> bool:
    """Whether sequences can be packed: all layers are full or sliding attention, without sinks.

    Other models (state-space layers, chunked attention) read their sequences one by one.
    """
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    sinks = any("sink" in name.rpartition(".")[2] for name, _ in model.named_parameters())
    known = model._supports_attention_backend and kinds <= attention.SUPPORTED_LAYER_TYPES
    return bool(known and not (model._is_stateful or sinks))


def _validate_trainable(model: Any, logits: LogitMap) -> None:
    kind, head = model.config.model_type, model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise InvalidInput(f"the trainer can't train a {kind}: its head is not a linear layer")
    if not head.weight.is_meta and not _logits_follow(model, head, logits):
        raise InvalidInput(
            f"the trainer can't train a {kind}: its logits are neither its head's outputs, nor those scaled and capped "
            "by logits_scaling, logit_scale, lm_head_multiplier and final_logit_softcapping of its config.json"
        )


class _Hidden(MoeModelOutputWithPast):  # type: ignore[misc]
    """A backbone's output that has only `last_hidden_state`; other attributes are None."""

    def __getattr__(self, name: str) -> None:
        return None


@torch.no_grad()
def _logits_follow(model: Any, head: nn.Linear, expected: LogitMap) -> bool:
    """Whether the model's logits are its head's outputs, mapped as `expected`; by a random last hidden state."""
    hidden = torch.randn(1, 2, head.in_features, generator=torch.Generator().manual_seed(0)).to(head.weight)
    if not (largest := head(hidden).abs().amax().float().item()):
        return True  # a head of zeros gives the same logits scaled or not
    hidden *= PROBE_LOGIT / (largest * expected.scale)
    backbone = text_decoder(model)  # called by the model's forward method
    own = vars(backbone).pop("forward", None)
    backbone.forward = lambda *_, **__: _Hidden(last_hidden_state=hidden)
    try:
        logits = model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=hidden.device)).logits
    finally:
        del backbone.forward
        vars(backbone).update({"forward": own} if own else {})
    wanted = expected.scale * head_logits(hidden, head.weight, head.bias, expected.softcap)
    return bool((logits - wanted).abs().amax() < PROBE_LOGIT / 100)


def validate_context(size: int, model: Any) -> None:
    """Raise `ConfigError` if `size` ranks of context parallelism can't share the heads of `model`."""
    packs = _can_pack(model)
    able = [n for n in range(1, size + 1 if packs else 2) if not size % n and can_share_heads(model.config, n)]
    if size not in able:
        heads, keys, _ = attention_heads(model.config)
        why = f"{heads} heads and {keys} of keys and values" if packs else "layers that carry a state"
        raise ConfigError(
            f"trainer.context_parallel = {size} can't share out a model with {why}; give {' or '.join(map(str, able))}"
        )
