"""Policy-gradient losses, all of one signature: tokens and options in, one number per token out.

`aggregation` averages the tokens of a step, and `corrections` weight off-policy tokens: Dr. GRPO and DAPO are `ppo`
with another aggregation; `grpo` is `ppo` with truncated importance weights. r = exp(logprobs - behaviour logprobs) is
the ratio to the policy that sampled the token, A its advantage, and sg(x) is x without its gradient. Where r = 1, every
loss here has the gradient -A grad(logprobs).
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.algorithms.tokens import Tokens, proximal_from_lag, ratio


def reinforce(tokens: Tokens) -> Tensor:
    """-A logprobs   (Williams 1992, doi:10.1007/BF00992696)

    It has no importance weight; for off-policy data, add one with `algorithm.corrections`.
    """
    return -tokens.advantages * tokens.logprobs


def ppo(tokens: Tokens, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float = 0.0) -> Tensor:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A); where A < 0, never above -dual_clip A

    PPO (Schulman et al. 2017, arXiv:1707.06347) with DAPO's asymmetric bounds (Yu et al. 2025, arXiv:2503.14476) and
    the dual clip of Ye et al. 2020 (arXiv:1912.09729), which removes the gradient of tokens with A < 0 and
    r > `dual_clip`; 0 disables it, and the weight of a negative advantage is then unbounded.
    """
    return _clipped(tokens.ratio, tokens.advantages, clip_low, clip_high, dual_clip)


def grpo(tokens: Tokens, *, clip_low: float = 0.2, clip_high: float = 0.2, truncate: float = 3.0) -> Tensor:
    """-min(w A, clip(r, 1 - clip_low, 1 + clip_high) A),   w = min(r, truncate), whose gradient is w grad(logprobs)

    `ppo` with truncated importance weights (Ionides 2008, doi:10.1198/106186008X320456) in place of the dual clip:
    truncation bounds the gradient of a token and keeps its direction. `truncate` 0 disables it. The default differs
    from GRPO as published (arXiv:2402.03300): weights are truncated at 3, advantages are not divided by the group's
    standard deviation, and the loss is a mean over tokens. Raises `ValueError` if `truncate` is below the clip.
    """
    if 0 < truncate < 1 + clip_high:
        raise ValueError(
            f"truncate = {truncate:g} is below 1 + clip_high = {1 + clip_high:g}; raise it, or set it to 0"
        )
    weighted = _with_gradient(tokens.ratio.clamp(max=truncate), tokens) if truncate else tokens.ratio
    clipped = tokens.ratio.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(weighted * tokens.advantages, clipped * tokens.advantages)


def gspo(tokens: Tokens, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> Tensor:
    """-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A),   s = exp(mean of log r over the sequence)

    GSPO-token (Zheng et al. 2025, arXiv:2507.18071): s has the value of the sequence's ratio, and at each token the
    gradient s grad(logprobs). For one advantage a sequence and the average `sequence_mean`, this is GSPO.
    """
    whole = ratio(tokens.sequence_mean(tokens.logprobs - tokens.behaviour))
    return _clipped(_with_gradient(whole, tokens), tokens.advantages, clip_low, clip_high)


def cispo(tokens: Tokens, *, low: float = 0.0, high: float = 5.0) -> Tensor:
    """-sg(clip(r, low, high)) A logprobs

    CISPO (MiniMax 2025, arXiv:2506.13585): the weight is clipped, and every token keeps its gradient. With `low` 0 it
    is REINFORCE with truncated importance weights; `high` as in ScaleRL (Khatri et al. 2025, arXiv:2510.13786).
    """
    return -tokens.ratio.detach().clamp(low, high) * tokens.advantages * tokens.logprobs


def topr(tokens: Tokens, *, high: float = 1.0) -> Tensor:
    """-A logprobs where A >= 0, and -sg(min(R, high)) A logprobs where A < 0,   R = product of r over the sequence

    Tapered off-policy REINFORCE (Le Roux et al. 2025, arXiv:2503.14286): sequences with a
    negative advantage are weighted by their probability under the present policy.
    """
    whole = ratio(tokens.sequence_sum(tokens.logprobs - tokens.behaviour)).detach().clamp(max=high)
    weight = torch.where(tokens.advantages >= 0, torch.ones_like(whole), whole)
    return -weight * tokens.advantages * tokens.logprobs


def decoupled(
    tokens: Tokens, *, clip_low: float = 0.2, clip_high: float = 0.2, high: float = 5.0, approximate: bool = True
) -> Tensor:
    """-min(sg(proximal / behaviour), high) min(q A, clip(q, 1 - clip_low, 1 + clip_high) A),   q = policy / proximal

    Decoupled PPO (Hilton et al. 2021, arXiv:2110.00641; AReaL, Fu et al. 2025, arXiv:2505.24298): the clip is
    around a recent policy, and an importance weight corrects for the behaviour policy. The proximal policy is
    interpolated from each token's lag (`proximal_from_lag`) or, if not `approximate`, is the policy at the start of the
    step.
    """
    proximal = proximal_from_lag(tokens) if approximate else tokens.proximal
    weight = ratio(proximal - tokens.behaviour).clamp(max=high)
    return weight * _clipped(ratio(tokens.logprobs - proximal), tokens.advantages, clip_low, clip_high)


def dppo_tv(tokens: Tokens, *, bound: float = 0.15) -> Tensor:
    """-r A, and 0 where |policy - behaviour| > bound and the gradient would widen the gap

    Divergence PPO, Binary-TV (Qi et al. 2026, arXiv:2602.04879): the trust region bounds the total variation between
    "this token" and "any other", which lets rare tokens change by larger factors than likely ones.
    """
    return _unless_far(tokens, (tokens.logprobs.exp() - tokens.behaviour.exp()).abs() > bound)


def dppo_kl(tokens: Tokens, *, bound: float = 0.05) -> Tensor:
    """-r A, and 0 where b log(b/p) + (1 - b) log((1 - b)/(1 - p)) > bound and the gradient would widen the gap

    Divergence PPO, Binary-KL (Qi et al. 2026, arXiv:2602.04879), of p = policy and b = behaviour.
    """
    p, b = tokens.logprobs.detach().exp(), tokens.behaviour.exp()
    tiny = torch.finfo(p.dtype).eps
    others = torch.log((1 - b).clamp(min=tiny) / (1 - p).clamp(min=tiny))
    return _unless_far(tokens, b * (tokens.behaviour - tokens.logprobs) + (1 - b) * others > bound)


def sapo(tokens: Tokens, *, temperature_positive: float = 1.0, temperature_negative: float = 1.05) -> Tensor:
    """-(4 / T) sigmoid(T (r - 1)) A,   T = temperature_positive where A > 0, else temperature_negative

    Soft adaptive policy optimization (Gao et al. 2025, arXiv:2511.20347): the gradient decays smoothly where PPO clips
    it to 0.
    """
    temperature = torch.where(tokens.advantages > 0, temperature_positive, temperature_negative).to(tokens.logprobs)
    return -4 / temperature * torch.sigmoid(temperature * (tokens.ratio - 1)) * tokens.advantages


def _clipped(r: Tensor, advantages: Tensor, low: float, high: float, dual_clip: float = 0.0) -> Tensor:
    """-min(r A, clip(r, 1 - low, 1 + high) A), the clipped surrogate."""
    surrogate = torch.minimum(r * advantages, r.clamp(1 - low, 1 + high) * advantages)
    if dual_clip:
        surrogate = torch.where(advantages < 0, torch.maximum(surrogate, dual_clip * advantages), surrogate)
    return -surrogate


def _unless_far(tokens: Tokens, far: Tensor) -> Tensor:
    """-r A, and 0 for tokens `far` from their behaviour policy whose gradient would increase the distance."""
    away = (tokens.ratio.detach() - 1) * tokens.advantages > 0
    return -(tokens.ratio * tokens.advantages).masked_fill(far & away, 0.0)


def _with_gradient(weight: Tensor, tokens: Tokens) -> Tensor:
    """sg(weight) with the gradient weight grad(logprobs)."""
    return weight.detach() * torch.exp(tokens.logprobs - tokens.logprobs.detach())
