"""Advantages of rollouts, compared within their role in their group, and of single tokens.

An advantage is a function of the rewards of one group, `[members]`, of any size. Only `whiten` uses the whole batch.
r_i is the reward of member i, n the number of members.
"""

from __future__ import annotations

import dataclasses
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from slipstream.rollout import Batch, Group, Rollout, float32_array

Advantage = Callable[[Tensor], Tensor]


def reward(rewards: Tensor) -> Tensor:
    """A_i = r_i: no baseline (Williams 1992). With `whiten`, REINFORCE++ (Hu et al. 2025, arXiv:2501.03262)."""
    return rewards


def group_mean(rewards: Tensor, *, normalize: bool = False) -> Tensor:
    """Reward minus the group's mean, optionally over its standard deviation.

    A_i = r_i - mean(r)              (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783)
    A_i = (r_i - mean(r)) / std(r)   (GRPO, Shao et al. 2024, arXiv:2402.03300; population standard deviation)

    A group whose rewards are all equal has advantages of exactly 0 either way.
    """
    if (rewards == rewards[:1]).all():
        return torch.zeros_like(rewards)
    centred = rewards - rewards.mean()
    return centred / rewards.std(correction=0) if normalize else centred


def leave_one_out(rewards: Tensor) -> Tensor:
    """A_i = r_i - mean of the others' r = n / (n - 1) (r_i - mean(r)); 0 for a group of one

    RLOO (Kool et al. 2019; Ahmadian et al. 2024, arXiv:2402.14740): the baseline of a member is independent of its own
    reward, unlike in `group_mean`.
    """
    return group_mean(rewards) * len(rewards) / max(1, len(rewards) - 1)


def pass_at_k(rewards: Tensor, *, k: int = 4) -> Tensor:
    """A_i = n / C(n, k) x sum over the sets S of k members with i in it of max(S) - max(S without i)

    The gradient is that of the expected best reward of k samples, unbiased, with a leave-one-out baseline: PKPO (Walder
    & Karkhanis 2025, arXiv:2505.15201). In ascending order r_(1) <= ... <= r_(n), that sum is over the best other
    member j: A_(i) = n / C(n, k) sum_{j < i} (r_(i) - r_(j)) C(j - 1, k - 2). k = n is used for k > n, `leave_one_out`
    for k < 2.
    """
    size = len(rewards)
    k = min(k, size)
    if k < 2:
        return leave_one_out(rewards)
    ordered, order = rewards.sort(stable=True)
    share = rewards.new_tensor([size * math.comb(j, k - 2) / math.comb(size, k) for j in range(size)])
    gains = (ordered[:, None] - ordered[None, :]).tril() @ share
    return torch.empty_like(rewards).scatter(0, order, gains)


def whiten(groups: Sequence[Tensor]) -> list[Tensor]:
    """A_i <- (A_i - mean) / std over the rollouts of all groups; 0 if all are equal

    NaN stays NaN, and is left out of mean and std. This is the global normalisation of REINFORCE++ (Hu et al. 2025,
    arXiv:2501.03262), for advantages by `reward`, or by `group_mean` in its variant with a baseline.
    """
    known = torch.cat([*groups, torch.zeros(0, dtype=torch.float64)])
    known = known[~known.isnan()]
    if not len(known) or (known == known[0]).all():
        return [torch.where(g.isnan(), g, torch.zeros_like(g)) for g in groups]
    return [(g - known.mean()) / known.std(correction=0) for g in groups]


def group_advantages(rewards: Sequence[Tensor], advantage: Advantage) -> list[Tensor]:
    """The advantages of each group. NaN marks a missing reward: it is left out of the baseline and stays NaN."""
    results = []
    for group in rewards:
        rewarded = ~group.isnan()
        results.append(torch.full_like(group, torch.nan).masked_scatter(rewarded, advantage(group[rewarded])))
    return results


def weighted_parts(
    parts: Mapping[str, Sequence[Tensor]], weights: Mapping[str, float], advantage: Advantage
) -> list[Tensor]:
    """A_i = sum over parts p of weights[p] x advantage of part p in its group

    Each part is centred and scaled before the sum, so that parts with a large spread don't dominate; with
    `group_mean(normalize=True)` and `whiten` this is GDPO (Liu et al. 2026, arXiv:2601.05242). `parts[p]` are the
    rewards of part p, one tensor per group; NaN marks a missing reward.
    """
    scored = [[weights[name] * a for a in group_advantages(rewards, advantage)] for name, rewards in parts.items()]
    groups = [torch.stack(group) for group in zip(*scored, strict=True)]
    return [torch.where(g.isnan().all(0), torch.nan, g.nansum(0)) for g in groups]


def process_rewards(
    rewards: Sequence[Tensor], ends: Sequence[Tensor], lengths: Sequence[int], *, normalize: bool = True
) -> list[Tensor]:
    """Advantages of tokens from the rewards of steps: A_t = sum over the steps that end at or after t of r'

    r' = (r - mean) / std over all steps of the group, or r - mean (GRPO with process supervision, Shao et al. 2024,
    arXiv:2402.03300, sec. 4.1.3). For each member of a group: `rewards` and `ends` `[steps]`, the reward of each step
    and the position of its last token, and the number of tokens. A step is any span of tokens, such as a turn.
    """
    level = torch.split(group_mean(torch.cat(list(rewards)), normalize=normalize), [len(r) for r in rewards])
    results = []
    for scores, last, length in zip(level, ends, lengths, strict=True):
        at_token = scores.new_zeros(length).index_add(0, last, scores)
        results.append(at_token.flip(0).cumsum(0).flip(0))
    return results


def add_process_rewards(group: Group, outcomes: Sequence[float], weight: float) -> tuple[array[float], ...]:
    """A_t = A of the rollout + weight x `process_rewards` of its steps, for each sampled token t of each rollout."""
    rewards, ends = [], []
    for rollout in group.rollouts:
        starts = accumulate((len(c.token_ids) for c in rollout.completions), initial=0)
        steps = [(start + s.end, s.reward) for start, turn in zip(starts, rollout.steps, strict=False) for s in turn]
        ends.append(torch.tensor([end for end, _ in steps], dtype=torch.long))
        rewards.append(torch.tensor([reward for _, reward in steps], dtype=torch.float64))
    if not any(map(len, rewards)):
        return tuple(float32_array((a,)) * r.tokens for a, r in zip(outcomes, group.rollouts, strict=True))
    steps_of = process_rewards(rewards, ends, [r.tokens for r in group.rollouts])
    each = ((a + weight * tokens).to(torch.float32) for a, tokens in zip(outcomes, steps_of, strict=True))
    return tuple(array("f", tokens.numpy().tobytes()) for tokens in each)


def overlong_penalty(length: int, *, longest: int, soft: int) -> float:
    """0 up to longest - soft tokens, then linear down to -1 at longest, and -1 beyond

    Soft overlong punishment, added to the reward (DAPO, Yu et al. 2025, arXiv:2503.14476).
    """
    return -min(1.0, max(0.0, (length - (longest - soft)) / soft)) if soft else -float(length > longest)


def make_batch(
    groups: Sequence[Group],
    advantage: Advantage = group_mean,
    *,
    parts: Mapping[str, float] | None = None,
    penalty: Callable[[Rollout, str], float] = lambda rollout, environment: 0.0,
    left_out: Callable[[Rollout], bool] = lambda rollout: False,
    whitened: bool = False,
    process: float = 0.0,
    version: int = 0,
    strict: bool = True,
) -> Batch:
    """The batch of these groups for a step on `version`, with advantages over each role of each group.

    `parts` are weights of metrics that replace the reward: the advantages of each metric are computed alone, and their
    weighted sum is used. `penalty`, of a rollout and the label of its environment, is added to the reward, or with
    `parts`, less its mean in the group, to that sum. A rollout that is `left_out` counts for the baseline, and has the
    advantage NaN: it is not trained on. `process` is the weight of the rewards of steps, added per token.
    Raises `ValueError` if `strict` and no rollout has a named part, or rewards of steps.
    """
    peers = [  # groups of one role
        dataclasses.replace(g, rollouts=tuple(map(g.rollouts.__getitem__, m))) for g in groups for m in g.roles.values()
    ]

    penalties = [torch.tensor([penalty(r, g.environment) for r in g.rollouts], dtype=torch.float64) for g in peers]
    if parts:
        by_peers = weighted_parts({name: _rewards(peers, name, strict) for name in parts}, parts, advantage)
        by_peers = [a + group_mean(p) for a, p in zip(by_peers, penalties, strict=True)]
    else:
        by_peers = group_advantages([r + p for r, p in zip(_rewards(peers), penalties, strict=True)], advantage)
    by_peers = whiten(by_peers) if whitened else by_peers
    if strict and process and not any(r.steps for g in peers for r in g.rollouts):
        raise ValueError("no rollout of the step has rewards of steps, which algorithm.process_reward_coef weighs")
    advantages: list[Any] = [
        tuple(math.nan if left_out(r) else a for r, a in zip(g.rollouts, values.tolist(), strict=True))
        for g, values in zip(peers, by_peers, strict=True)
    ]
    if process:
        advantages = [add_process_rewards(g, values, process) for g, values in zip(peers, advantages, strict=True)]
    return Batch(tuple(groups), _in_order_of_rollouts(groups, advantages), version)


def _rewards(peers: Sequence[Group], part: str = "", strict: bool = False) -> list[Tensor]:
    """Rewards of each group, or the metric `part`. Raises `ValueError` if `strict` and no rollout has this metric."""
    rows = [[r.metrics.get(part, math.nan) if part else r.reward for r in g.rollouts] for g in peers]
    if strict and part and all(math.isnan(value) for row in rows for value in row):
        raise ValueError(f"no rollout of the step has the metric {part!r}, which algorithm.reward_weights names")
    return [torch.tensor(row, dtype=torch.float64) for row in rows]


def _in_order_of_rollouts(groups: Sequence[Group], by_role: Sequence[Sequence[Any]]) -> tuple[tuple[Any, ...], ...]:
    """The advantages by role, put into the order of each group's rollouts."""
    each, placed = iter(by_role), []
    for group in groups:
        at = {i: a for members in group.roles.values() for i, a in zip(members, next(each), strict=True)}
        placed.append(tuple(at[i] for i in range(len(group.rollouts))))
    return tuple(placed)
