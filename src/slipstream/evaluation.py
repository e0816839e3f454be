"""Held-out tasks, played with the policy as it is: one number, and which versions it is a number of."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from slipstream.environments.base import Codec, Environment, Policy, Task
from slipstream.environments.guard import RolloutFailed, attempt
from slipstream.generators.base import Generator
from slipstream.rollout import Rollout, Sampling, mean

SAMPLES = 3


async def evaluate(
    environment: Environment,
    tasks: Sequence[Task],
    generator: Generator,
    codec: Codec,
    sampling: Sampling,
    *,
    seed: int = 0,
    time_limit: float = 300.0,
) -> dict[str, Any]:
    """Play each task once. `score` is the mean of the metric "correct" where the environment reports one, else of the
    reward; a failed episode counts as 0. `versions` are the oldest and newest weights that drew a token of it."""
    began = time.perf_counter()

    async def one(task: Task) -> tuple[Rollout | None, Policy]:
        policy = Policy(generator, codec, sampling, f"{seed}/evaluation/{task.id}")
        try:
            return await attempt(environment, task, policy, time_limit), policy
        except RolloutFailed:
            return None, policy

    played = await asyncio.gather(*(one(task) for task in tasks))
    rollouts = [r for r, _ in played if r is not None]
    versions = [v for r in rollouts for c in r.completions for v in c.versions]
    total = max(1, len(played))
    scores = [r.metrics.get("correct", r.reward) for r in rollouts]
    names = sorted({name for r in rollouts for name in r.metrics})
    return {
        "versions": [min(versions, default=generator.version), max(versions, default=generator.version)],
        "score": sum(scores) / total,
        "reward": sum(r.reward for r in rollouts) / total,
        "tasks": len(played),
        "failed": len(played) - len(rollouts),
        "metrics": {n: mean([r.metrics[n] for r in rollouts if n in r.metrics]) for n in names},
        "completion_length": mean([float(r.tokens) for r in rollouts]),
        "seconds": time.perf_counter() - began,
        "samples": [_sample(t, r, codec) for t, (r, _) in zip(tasks[:SAMPLES], played, strict=False) if r],
    }


def _sample(task: Task, rollout: Rollout, codec: Codec) -> dict[str, Any]:
    first = rollout.completions[0]
    prompt = task.data.get("question") or codec.decode(first.prompt_ids)
    return {"prompt": prompt, "completion": rollout.completions[-1].text, "reward": rollout.reward}
