"""`Tokens`: the input of losses, corrections and divergences, one number per sampled token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 80.0  # float32 overflows at exp(88.7), and infinity times a gradient of 0 is NaN


def ratio(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio), clamped without a gradient where it would overflow."""
    return torch.exp(log_ratio.clamp(max=MAX_LOG_RATIO))


@dataclass(frozen=True)
class Tokens:
    """The sampled tokens of whole sequences, concatenated; every field is `[tokens]`.

    Log-probabilities are natural logarithms for the sampled token: `logprobs` under the policy, the only field with a
    gradient; `behaviour` under the distribution that sampled it; `proximal` under the policy at the start of the step;
    `reference` and `teacher` under those models, None in a run without them. `sequence` is the index of a token's
    sequence, from 0; `lag` is the trainer version minus the version that sampled the token.
    """

    logprobs: Tensor
    behaviour: Tensor
    advantages: Tensor
    sequence: Tensor
    lag: Tensor
    proximal: Tensor
    reference: Tensor | None = None
    teacher: Tensor | None = None

    @property
    def ratio(self) -> Tensor:
        """r = policy / behaviour, with a gradient."""
        return ratio(self.logprobs - self.behaviour)

    @property
    def divergence(self) -> Tensor:
        """k3 estimate of KL(behaviour ‖ policy) at each token, detached: r - 1 - log r, r = policy / behaviour."""
        log_ratio = (self.logprobs - self.behaviour).detach()
        return ratio(log_ratio) - 1 - log_ratio

    def sequence_sum(self, values: Tensor) -> Tensor:
        """The sum of `values` over each sequence, repeated for each of its tokens."""
        return self._sums(values)[self.sequence]

    def sequence_mean(self, values: Tensor) -> Tensor:
        """The mean of `values` over each sequence, repeated for each of its tokens."""
        return (self._sums(values) / self._sums(torch.ones_like(values)))[self.sequence]

    def sequence_max(self, values: Tensor) -> Tensor:
        """The maximum of `values` over each sequence, repeated for each of its tokens."""
        most = values.new_full((self._count,), -torch.inf).scatter_reduce(0, self.sequence, values, "amax")
        return most[self.sequence]

    @property
    def _count(self) -> int:
        return int(self.sequence.max()) + 1 if len(self.sequence) else 0

    def _sums(self, values: Tensor) -> Tensor:
        return values.new_zeros(self._count).index_add(0, self.sequence, values)


def proximal_from_lag(tokens: Tokens) -> Tensor:
    """log proximal = a behaviour + (1 - a) sg(logprobs),   a = 1 / lag, or 0 for a token of the newest version

    A-3PO (Li et al. 2025, arXiv:2512.06547): the proximal policy of an older token is nearer to the present policy.
    """
    share = torch.where(tokens.lag > 0, 1 / tokens.lag.clamp(min=1), torch.zeros_like(tokens.behaviour))
    return share * tokens.behaviour + (1 - share) * tokens.logprobs.detach()
