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

from slipstream.config.checks import refers_to_base
from slipstream.config.schema import Config
from slipstream.model.device import dtype_of
from slipstream.model.loading import load_causal_lm
from slipstream.model.packing import MicroBatch
from slipstream.model.policy import PackedPolicy
from slipstream.sync.sharded_weights import full_tensor, local_part
from slipstream.trainers.parallel import TrainerRanks


class Reference:
    """A frozen policy in the compute dtype; must be built before the policy's weights are sharded or replaced.

    With new adapters and frozen biases, the start policy is the base model, and takes no memory. Weights that are not
    trained are shared.
    """

    def __init__(self, policy: PackedPolicy, config: Config, ranks: TrainerRanks) -> None:
        kind, compute = config.algorithm.reference, dtype_of(config)
        self._ranks = ranks
        self._masters: Mapping[str, nn.Parameter] = {}
        self._decay = config.algorithm.reference_decay
        self._averages, self._other = kind == "average", kind not in ("start", "average")
        self.average: dict[str, Tensor] = {}
        self._without_adapters = refers_to_base(config)
        if self._without_adapters:
            self._policy = policy
        elif kind in ("start", "average"):
            self._policy = _frozen(policy, compute)
        else:
            self._policy = _load_other(kind, policy, compute)
        if ranks.is_fsdp and not self._without_adapters:
            ranks.shard(self._policy, compute)

    def track(self, masters: Mapping[str, nn.Parameter]) -> None:
        """Track an average of `masters`, if `algorithm.reference` is "average". Called once, after sharding."""
        self._masters = masters
        self.average = {n: p.detach().clone() for n, p in masters.items()} if self._averages else {}

    @torch.no_grad()
    def logprobs(self, batch: MicroBatch) -> Tensor:
        """Log-probability of each sampled token under the reference, float32 `[sampled]`."""
        model: Any = self._policy.model
        with model.disable_adapter() if self._without_adapters else contextlib.nullcontext():
            # Another model has its own routers: the recorded experts of the policy do not apply.
            logprobs: Tensor = self._policy(replace(batch, experts=None) if self._other else batch)[0]
        self._ranks.reshard(self._policy)
        return logprobs

    @torch.no_grad()
    def update(self) -> None:
        """After a step: average <- decay average + (1 - decay) policy. Without an average it does nothing."""
        for name, average in self.average.items():
            average.lerp_(self._masters[name], 1 - self._decay)
        self.load_average()

    def state(self) -> list[Tensor]:
        """Tensors of the reference on the device, without those of the policy."""
        own = [] if self._without_adapters else [*self._policy.parameters(), *self._policy.buffers()]
        return [*own, *self.average.values()]

    @torch.no_grad()
    def load_average(self) -> None:
        """Copy the average into the reference's weights."""
        for name, parameter in self._policy.model.named_parameters():
            if name in self.average:
                average = self.average[name]
                if not isinstance(parameter, DTensor):
                    holds_all = parameter.shape == average.shape  # else this rank's experts
                    average = full_tensor(average) if holds_all else local_part(average)
                parameter.copy_(average)


def _frozen(policy: PackedPolicy, compute: torch.dtype) -> PackedPolicy:
    """A frozen policy with copies of the trained weights in `compute`; other weights are shared."""
    shared: dict[int, Any] = {id(p): p for p in policy.parameters() if not p.requires_grad}
    shared[id(policy.context)] = policy.context
    copied = copy.deepcopy(policy, shared).requires_grad_(False)
    for parameter in copied.parameters():
        if id(parameter) not in shared:
            parameter.data = parameter.data.to(compute)
    return copied


def _load_other(path: str, policy: PackedPolicy, compute: torch.dtype) -> PackedPolicy:
    """The model at `path`, on the policy's device."""
    device = next(policy.parameters()).device
    model: Any = load_causal_lm(path, device=device, dtype=compute, option="algorithm.reference")
    return PackedPolicy(model, context=policy.context).requires_grad_(False)
