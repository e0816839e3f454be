"""Advantages: how much better each rollout of a group did than its siblings, or each token than its.

An advantage is a function of the rewards of one group, `[members]`, any number of them. `whiten` is the one step that
looks at the whole batch. r_i is the reward of member i, n the number of members.
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

from slipstream.rollout import Batch, Group, Rollout, numbers

Advantage = Callable[[Tensor], Tensor]


def reward(rewards: Tensor) -> Tensor:
    """A_i = r_i: no baseline (Williams 1992). Whitened, REINFORCE++ (Hu et al. 2025, arXiv:2501.03262)."""
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

    RLOO (Kool et al. 2019; Ahmadian et al. 2024, arXiv:2402.14740): unlike with `group_mean`, the baseline of a member
    does not depend on it.
    """
    return group_mean(rewards) * len(rewards) / max(1, len(rewards) - 1)


def pass_at_k(rewards: Tensor, *, k: int = 4) -> Tensor:
    """A_i = n / C(n, k) x sum over the sets S of k members with i in it of max(S) - max(S without i)

    The gradient is that of the expected best reward of k draws, unbiased, with a leave-one-out baseline: PKPO (Walder &
    Karkhanis 2025, arXiv:2505.15201). In ascending order r_(1) <= ... <= r_(n), that sum is over the best other member
    j: A_(i) = n / C(n, k) sum_{j < i} (r_(i) - r_(j)) C(j - 1, k - 2). k is at least 2, at most n counts.
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
    """A_i <- (A_i - mean) / std over the rollouts of all groups; 0 where all are equal, NaN stays out of both

    The global normalisation of REINFORCE++ (Hu et al. 2025, arXiv:2501.03262): with `reward` it is that algorithm, with
    `group_mean` its variant with a baseline.
    """
    known = torch.cat([*groups, torch.zeros(0, dtype=torch.float64)])
    known = known[~known.isnan()]
    if not len(known) or (known == known[0]).all():
        return [torch.where(g.isnan(), g, torch.zeros_like(g)) for g in groups]
    return [(g - known.mean()) / known.std(correction=0) for g in groups]


def of_groups(rewards: Sequence[Tensor], advantage: Advantage) -> list[Tensor]:
    """The advantage of each group; a reward of NaN was not given: its member is no one's baseline and keeps NaN."""
    results = []
    for group in rewards:
        given = ~group.isnan()
        results.append(torch.full_like(group, torch.nan).masked_scatter(given, advantage(group[given])))
    return results


def weighted_parts(
    parts: Mapping[str, Sequence[Tensor]], weights: Mapping[str, float], advantage: Advantage
) -> list[Tensor]:
    """A_i = sum over parts p of weights[p] x advantage of part p in its group

    Each part has its own baseline and scale before they are added (`group_mean(normalize=True)` and `whiten` make it
    GDPO, Liu et al. 2026, arXiv:2601.05242), so that one with a large spread does not drown another. `parts[p]` are the
    rewards of part p, a tensor a group; a part of NaN was not given.
    """
    scored = [[weights[name] * a for a in of_groups(rewards, advantage)] for name, rewards in parts.items()]
    groups = [torch.stack(group) for group in zip(*scored, strict=True)]
    return [torch.where(g.isnan().all(0), torch.nan, g.nansum(0)) for g in groups]


def process_rewards(
    rewards: Sequence[Tensor], ends: Sequence[Tensor], lengths: Sequence[int], *, normalize: bool = True
) -> list[Tensor]:
    """Advantages of tokens from the rewards of steps: A_t = sum over the steps that end at or after t of r'

    r' = (r - mean) / std over all steps of the group, or r - mean (GRPO with process supervision, Shao et al. 2024,
    arXiv:2402.03300, sec. 4.1.3). For each member of a group: `rewards` and `ends` `[steps]`, the reward of a step and
    the position of its last token, and the number of its tokens. A step may be a turn, a line of thought or one token.
    """
    level = torch.split(group_mean(torch.cat(list(rewards)), normalize=normalize), [len(r) for r in rewards])
    results = []
    for scores, last, length in zip(level, ends, lengths, strict=True):
        at_token = scores.new_zeros(length).index_add(0, last, scores)
        results.append(at_token.flip(0).cumsum(0).flip(0))
    return results


def with_steps(group: Group, outcomes: Sequence[float], weight: float) -> tuple[array[float], ...]:
    """A_t = A of the rollout + weight x `process_rewards` of its steps, for each drawn token t of each rollout."""
    rewards, ends = [], []
    for rollout in group.rollouts:
        starts = accumulate((len(c.token_ids) for c in rollout.completions), initial=0)
        steps = [(start + s.end, s.reward) for start, turn in zip(starts, rollout.steps, strict=False) for s in turn]
        ends.append(torch.tensor([end for end, _ in steps], dtype=torch.long))
        rewards.append(torch.tensor([reward for _, reward in steps], dtype=torch.float64))
    if not any(map(len, rewards)):
        return tuple(numbers((a,)) * r.tokens for a, r in zip(outcomes, group.rollouts, strict=True))
    steps_of = process_rewards(rewards, ends, [r.tokens for r in group.rollouts])
    each = ((a + weight * tokens).to(torch.float32) for a, tokens in zip(outcomes, steps_of, strict=True))
    return tuple(array("f", tokens.numpy().tobytes()) for tokens in each)


def overlong_penalty(length: int, *, longest: int, soft: int) -> float:
    """0 up to longest - soft tokens, then falling to -1 at longest, and -1 beyond

    Soft overlong punishment (DAPO, Yu et al. 2025, arXiv:2503.14476), to be added to the reward.
    """
    return -min(1.0, max(0.0, (length - (longest - soft)) / soft)) if soft else -float(length > longest)


def make_batch(
    groups: Sequence[Group],
    advantage: Advantage = group_mean,
    *,
    parts: Mapping[str, float] | None = None,
    penalty: Callable[[Rollout], float] = lambda rollout: 0.0,
    left_out: Callable[[Rollout], bool] = lambda rollout: False,
    whitened: bool = False,
    process: float = 0.0,
    version: int = 0,
    strict: bool = True,
) -> Batch:
    """The batch of these groups for a step on `version`, advantages computed over each role of each group.

    `parts` are the weights of metrics that take the place of the reward; `penalty` is added to either. What is
    `left_out` is a sibling like others, but not trained on. `process` weighs the rewards of steps, which are added
    token by token. Raises `ValueError` for a part, or for steps, that no rollout has, unless not `strict`: then nothing
    comes of them.
    """

    peers = [
        dataclasses.replace(g, rollouts=tuple(map(g.rollouts.__getitem__, m))) for g in groups for m in g.roles.values()
    ]

    def rewards(part: str = "") -> list[Tensor]:
        given = [[r.metrics.get(part, math.nan) if part else r.reward for r in g.rollouts] for g in peers]
        if strict and part and all(math.isnan(v) for values in given for v in values):
            raise ValueError(f"no rollout of the step has the metric {part!r}, which algorithm.parts names")
        return [torch.tensor(values, dtype=torch.float64) for values in given]

    penalties = [torch.tensor([penalty(r) for r in g.rollouts], dtype=torch.float64) for g in peers]
    if parts:
        found = weighted_parts({name: rewards(name) for name in parts}, parts, advantage)
        found = [a + group_mean(p) for a, p in zip(found, penalties, strict=True)]
    else:
        found = of_groups([r + p for r, p in zip(rewards(), penalties, strict=True)], advantage)
    found = whiten(found) if whitened else found
    if strict and process and not any(r.steps for g in peers for r in g.rollouts):
        raise ValueError("no rollout of the step has rewards of steps, which algorithm.process weighs")
    advantages: list[Any] = [
        tuple(math.nan if left_out(r) else a for r, a in zip(g.rollouts, values.tolist(), strict=True))
        for g, values in zip(peers, found, strict=True)
    ]
    if process:
        advantages = [with_steps(g, values, process) for g, values in zip(peers, advantages, strict=True)]
    return Batch(tuple(groups), _in_order(groups, advantages), version)


def _in_order(groups: Sequence[Group], by_role: Sequence[Sequence[Any]]) -> tuple[tuple[Any, ...], ...]:
    """Advantages of each role of each group, in the order of the groups' rollouts."""
    each, placed = iter(by_role), []
    for group in groups:
        at = {i: a for members in group.roles.values() for i, a in zip(members, next(each), strict=True)}
        placed.append(tuple(at[i] for i in range(len(group.rollouts))))
    return tuple(placed)
