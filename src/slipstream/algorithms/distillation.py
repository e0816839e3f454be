"""On-policy distillation: the score of a token is its log-probability under a teacher.

The teacher may be a larger model, or the policy itself some versions ago. KL(policy ‖ teacher) summed over the tokens
of a sequence is minimised by the policy gradient with the advantage log teacher - log policy at each token, so that
every loss and correction serves (Agarwal et al. 2024, arXiv:2306.13649; Lu 2025, "On-policy distillation").
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from slipstream.algorithms.losses import cispo
from slipstream.algorithms.tokens import Tokens


def advantages(behaviour: Tensor, teacher: Tensor) -> Tensor:
    """A_t = teacher_t - behaviour_t: minus the reverse KL at each token   (Lu 2025, "On-policy distillation")

    Both `[tokens]`, log-probabilities of the tokens that were drawn. Mean 0 where the teacher is the policy itself.
    """
    return teacher - behaviour


def reverse_kl(tokens: Tokens, *, high: float = 5.0) -> Tensor:
    """sg(min(r, high) (logprobs - teacher)) logprobs,   r = policy / behaviour

    Its expected gradient on policy is that of KL(policy ‖ teacher) at each token. Unlike `advantages`, it measures the
    gap from the policy as it is now, and needs no reward. Raises `ValueError` for tokens without a teacher.
    """
    if tokens.teacher is None:
        raise ValueError("the tokens have no log-probabilities under a teacher; set teacher.path or teacher.lag")
    gap = (tokens.teacher - tokens.logprobs).detach()
    return cispo(dataclasses.replace(tokens, advantages=gap), high=high)
