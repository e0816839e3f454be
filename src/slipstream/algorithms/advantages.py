"""Advantages: how much better each rollout of a group did than its siblings."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.rollout import Batch, Group


def group_mean(rewards: Tensor, *, normalize: bool = False) -> Tensor:
    """Reward minus the group's mean, optionally over its standard deviation. `rewards`: `[rollouts]`, any number >= 2.

    A_i = r_i - mean(r)              (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783)
    A_i = (r_i - mean(r)) / std(r)   (GRPO, Shao et al. 2024, arXiv:2402.03300; population standard deviation)

    A group whose rewards are all equal has advantages of exactly 0 either way.
    """
    if (rewards == rewards[0]).all():
        return torch.zeros_like(rewards)
    centred = rewards - rewards.mean()
    return centred / rewards.std(correction=0) if normalize else centred


def make_batch(groups: list[Group], *, normalize: bool) -> Batch:
    """The batch of these groups, advantages computed over the members of each group."""
    advantages = tuple(
        tuple(group_mean(torch.tensor(g.rewards, dtype=torch.float64), normalize=normalize).tolist()) for g in groups
    )
    return Batch(tuple(groups), advantages)
