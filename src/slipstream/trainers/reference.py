"""The reference policy of the KL term: the start policy, an average of the policy over the steps, or another model."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from slipstream.config import Config, ConfigError
from slipstream.models import dtype_of, load_causal_lm
from slipstream.packed.packing import MicroBatch
from slipstream.packed.policy import Policy
from slipstream.sync.gathered import whole
from slipstream.trainers.parallel import Ranks


class Reference:
    """A frozen policy in the run's number format; made before the policy's own weights are replaced by others.

    The start policy of adapters is the model without them, and costs no memory. Whatever is not trained is shared.
    """

    def __init__(self, policy: Policy, config: Config, ranks: Ranks) -> None:
        kind, compute = config.algorithm.reference, dtype_of(config)
        self._ranks = ranks
        self._masters: Mapping[str, nn.Parameter] = {}
        self._decay = config.algorithm.reference_decay
        self._averages, self._other = kind == "average", kind not in ("start", "average")
        self.average: dict[str, Tensor] = {}
        self._without_adapters = kind == "start" and hasattr(policy.model, "disable_adapter")
        if self._without_adapters:
            self._policy = policy
        elif kind in ("start", "average"):
            self._policy = _frozen(policy, compute)
        else:
            device = next(policy.parameters()).device
            self._policy = _other(kind, policy, device, compute)
        if ranks.gathers and not self._without_adapters:
            ranks.shard(self._policy, compute)

    def follow(self, masters: Mapping[str, nn.Parameter]) -> None:
        """Average these from now on, if it is to be an average."""
        self._masters = masters
        self.average = {n: p.detach().clone() for n, p in masters.items()} if self._averages else {}

    @torch.no_grad()
    def logprobs(self, batch: MicroBatch) -> Tensor:
        """Log-probability of each drawn token under the reference, float32 `[drawn]`."""
        model: Any = self._policy.model
        with model.disable_adapter() if self._without_adapters else contextlib.nullcontext():
            # Another model has routers of its own; experts that the policy's generator chose are not theirs.
            logprobs: Tensor = self._policy(replace(batch, experts=None) if self._other else batch)[0]
        self._ranks.forget_gathered(self._policy)
        return logprobs

    @torch.no_grad()
    def update(self) -> None:
        """After a step: average <- decay average + (1 - decay) policy; nothing for a reference that stays."""
        for name, average in self.average.items():
            average.lerp_(self._masters[name], 1 - self._decay)
        self.serve()

    def state(self) -> list[Tensor]:
        """What it holds on the device, beside the policy's own."""
        own = [] if self._without_adapters else [*self._policy.parameters(), *self._policy.buffers()]
        return [*own, *self.average.values()]

    @torch.no_grad()
    def serve(self) -> None:
        """Compute with the average as it is now."""
        for name, parameter in self._policy.model.named_parameters():
            if name in self.average:
                average = self.average[name]
                parameter.copy_(average if isinstance(parameter, DTensor) else whole(average))


def _frozen(policy: Policy, compute: torch.dtype) -> Policy:
    """A copy of what is trained in the format `compute`, over the same other weights."""
    shared: dict[int, Any] = {id(p): p for p in policy.parameters() if not p.requires_grad}
    shared[id(policy.context)] = policy.context
    copied = copy.deepcopy(policy, shared).requires_grad_(False)
    for parameter in copied.parameters():
        if id(parameter) not in shared:
            parameter.data = parameter.data.to(compute)
    return copied


def _other(path: str, policy: Policy, device: torch.device, compute: torch.dtype) -> Policy:
    """The model at `path`. Raises `ConfigError` for one that has other tokens than the policy."""
    model: Any = load_causal_lm(path, device=device, dtype=compute, option="algorithm.reference")
    own: Any = policy.model
    theirs, ours = model.config.vocab_size, own.config.vocab_size
    if theirs != ours:
        raise ConfigError(
            f"algorithm.reference = {path!r} has {theirs} tokens and the policy {ours}; give one of the same tokenizer"
        )
    return Policy(model, context=policy.context).requires_grad_(False)
