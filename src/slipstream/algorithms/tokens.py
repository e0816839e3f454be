"""What a loss, a correction and a divergence see: one number a token, whatever the shape of the micro-batch was."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST = 80.0  # log-ratio; float32 holds exp(88), and infinity times no gradient would be NaN


def ratio(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio), cut off without a gradient where it would overflow."""
    return torch.exp(log_ratio.clamp(max=LARGEST))


@dataclass(frozen=True)
class Tokens:
    """The sampled tokens of some whole sequences, end to end; every field is `[tokens]`.

    Log-probabilities are natural logarithms of the probability of the sampled token: `logprobs` under the policy that
    is being trained, the only field with a gradient; `behaviour` under the distribution that it was drawn from;
    `proximal` under the policy at the start of the step; `reference` and `teacher` under those models, None in a run
    without one. `sequence` numbers the sequence that a token belongs to, from 0; `lag` counts the versions that its
    drawing policy was behind.
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
        """k3 of KL(behaviour ‖ policy) at each token, without a gradient: r - 1 - log r, 0 or more."""
        log_ratio = (self.logprobs - self.behaviour).detach()
        return ratio(log_ratio) - 1 - log_ratio

    def sequence_sum(self, values: Tensor) -> Tensor:
        """The sum of `values` over the sequence of each token, given to each of its tokens."""
        return self._sums(values)[self.sequence]

    def sequence_mean(self, values: Tensor) -> Tensor:
        """The mean of `values` over the sequence of each token, given to each of its tokens."""
        return (self._sums(values) / self._sums(torch.ones_like(values)))[self.sequence]

    def sequence_max(self, values: Tensor) -> Tensor:
        """The largest of `values` in the sequence of each token, given to each of its tokens."""
        most = values.new_full((self._count,), -torch.inf).scatter_reduce(0, self.sequence, values, "amax")
        return most[self.sequence]

    @property
    def _count(self) -> int:
        return int(self.sequence.max()) + 1 if len(self.sequence) else 0

    def _sums(self, values: Tensor) -> Tensor:
        return values.new_zeros(self._count).index_add(0, self.sequence, values)
