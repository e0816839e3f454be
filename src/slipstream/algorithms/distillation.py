"""On-policy distillation: the score of a token is its log-probability under a teacher.

The teacher may be a larger model, or the policy itself some versions ago. KL(policy ‖ teacher) summed over the tokens
of a sequence is minimised by the policy gradient with the advantage log teacher - log policy at each token, so that
every loss and correction serves (Agarwal et al. 2024, arXiv:2306.13649; Lu 2025, "On-policy distillation").
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from slipstream.algorithms.losses import grpo
from slipstream.algorithms.tokens import Tokens


def advantages(policy: Tensor, teacher: Tensor) -> Tensor:
    """A_t = teacher_t - policy_t: minus the reverse KL at each token   (Lu 2025, "On-policy distillation")

    Both `[tokens]`, log-probabilities of the tokens that were drawn. Mean 0 where the teacher is the policy itself.
    """
    return teacher - policy


def reverse_kl(tokens: Tokens, *, clip_low: float = 0.2, clip_high: float = 0.2, truncate: float = 3.0) -> Tensor:
    """`grpo` with A = sg(teacher - logprobs); on policy its value estimates KL(policy ‖ teacher) at each token

    So is its gradient in expectation, and off policy, too, but for the clip: without one, what old tokens say of a gap
    that has closed drives the policy past the teacher. The gap is measured from the policy as it is now, and needs no
    reward. Raises `ValueError` for tokens without a teacher.
    """
    if tokens.teacher is None:
        raise ValueError("the tokens have no log-probabilities under a teacher; set teacher.path or teacher.lag")
    gap = advantages(tokens.logprobs, tokens.teacher).detach()
    return grpo(dataclasses.replace(tokens, advantages=gap), clip_low=clip_low, clip_high=clip_high, truncate=truncate)
