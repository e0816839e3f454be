"""How far the tokens of a step were from the policy that was trained on them. Returned, never logged here."""

from __future__ import annotations

from torch import Tensor

from slipstream.algorithms.tokens import Tokens


def off_policy(tokens: Tokens, slope: Tensor, correction: Tensor) -> dict[str, float]:
    """Of all tokens of a step; `slope` is the derivative of each token's loss by its log-probability.

    | name | what it is |
    | --- | --- |
    | `mismatch_kl` | estimate of KL(behaviour ‖ policy): mean of r - 1 - log r |
    | `ratio`, `ratio_max` | mean and largest r = policy / behaviour |
    | `effective_sample_size` | (sum of r)² / (tokens x sum of r²), 1 on policy (Kong 1992) |
    | `clipped` | share of the tokens with an advantage whose loss has no gradient, whatever loss it is |
    | `masked` | share of tokens to which a correction gave the weight 0 |
    """
    if not len(slope):
        return {"mismatch_kl": 0.0, "ratio": 1.0, "ratio_max": 1.0, "effective_sample_size": 1.0, "clipped": 0.0,
                "masked": 0.0}  # fmt: skip
    ratio, signal = tokens.ratio.detach(), tokens.advantages != 0
    return {
        "mismatch_kl": tokens.divergence.mean().item(),
        "ratio": ratio.mean().item(),
        "ratio_max": ratio.max().item(),
        "effective_sample_size": (ratio.sum().square() / (len(ratio) * ratio.square().sum())).item(),
        "clipped": ((slope == 0) & signal).sum().item() / max(1, int(signal.sum())),
        "masked": (correction == 0).double().mean().item(),
    }
