"""On-policy distillation: the advantage of a token comes from its log-probability under a teacher.

The teacher is a larger model, or an earlier version of the policy. The policy gradient with the advantage log teacher -
log policy minimises KL(policy ‖ teacher) summed over the tokens of a sequence, so any policy-gradient loss and any
correction applies (Agarwal et al. 2024, arXiv:2306.13649; Lu 2025, "On-policy distillation"). Chosen by
`algorithm.loss = "slipstream.algorithms.distillation:reverse_kl"`.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from slipstream.algorithms.losses import grpo
from slipstream.algorithms.tokens import Tokens


def advantages(policy: Tensor, teacher: Tensor) -> Tensor:
    """A_t = teacher_t - policy_t: minus the one-sample reverse KL at each token   (Lu 2025, "On-policy distillation")

    Both `[tokens]`, log-probabilities of the sampled tokens.
    """
    return teacher - policy


def reverse_kl(tokens: Tokens, *, clip_low: float = 0.2, clip_high: float = 0.2, truncate: float = 3.0) -> Tensor:
    """`grpo` with A = sg(teacher - logprobs); on policy its value estimates KL(policy ‖ teacher) at each token

    Its expected gradient is that of KL(policy ‖ teacher), off policy too except for the clip; without the clip, stale
    tokens drive the policy past the teacher. It ignores the reward. Raises `ValueError` for tokens without a teacher.
    """
    if tokens.teacher is None:
        raise ValueError("the tokens have no log-probabilities under a teacher; set teacher.path or teacher.lag")
    gap = advantages(tokens.logprobs, tokens.teacher).detach()
    return grpo(dataclasses.replace(tokens, advantages=gap), clip_low=clip_low, clip_high=clip_high, truncate=truncate)
