"""The `Scorer` protocol, and the effect of a scorer's answer on a rollout. Pure functions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Protocol

from pydantic import BaseModel, ConfigDict, PlainValidator, StrictInt, ValidationError

from slipstream.environments.base import Task
from slipstream.environments.reward_workers import ScoringError, ZeroReward
from slipstream.rollout import Completion, Rollout, StepReward

ENVIRONMENT, SCORE = "environment", "score"  # parts of every rollout


class Scorer(Protocol):
    """Scores finished rollouts; calls run concurrently."""

    async def score(self, task: Task, rollout: Rollout) -> Any:
        """A number, or a mapping with the fields of `Answer`. Raises `ScoringError`."""
        ...

    async def close(self) -> None: ...


def _finite(value: Any) -> float:
    if isinstance(value, str) or not hasattr(value, "__float__") or not math.isfinite(float(value)):
        raise ValueError("no finite number")
    return float(value)


Number = Annotated[float, PlainValidator(_finite)]
TokenRewards = list[Number] | list[tuple[StrictInt, Number]]


class Answer(BaseModel):
    """A scorer's answer.

    `parts` are rewards by name. `turns` has one number for each completion; `tokens` has for each completion one number
    for each token, or pairs [last token of a step, number].
    """

    model_config = ConfigDict(extra="forbid")

    reward: Number | None = None
    parts: dict[str, Number] | None = None
    turns: list[Number | None] | None = None
    tokens: list[TokenRewards | None] | None = None
    metrics: dict[str, Number] | None = None


def apply_answer(rollout: Rollout, found: Any, weights: Mapping[str, float]) -> Rollout:
    """The rollout with the reward of a scorer's answer: a number, or an `Answer`. Raises `ScoringError` for any other.

    The parts of a rollout are the answer's parts, `score` (the answer's `reward`) and `environment` (the environment's
    reward); its metrics include them. The reward is the weighted sum of the parts in `weights`. Without weights it is
    `score`, or the environment's reward if the answer has none. A scorer that raised has 0 for every part.
    """
    if isinstance(found, ZeroReward):
        found = {"reward": 0.0, "parts": dict.fromkeys(set(weights) - {ENVIRONMENT, SCORE}, 0.0)}
    try:
        answer = Answer.model_validate(found if isinstance(found, Mapping) else {"reward": _finite(found)})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise invalid_answer(f"{where} is {first['input']!r:.60}: {first['msg']}") from None
    except ValueError as error:
        raise invalid_answer(f"it is {found!r:.60}, {error}") from None
    parts = dict(answer.parts or {})
    if math.isfinite(rollout.reward):
        parts.setdefault(ENVIRONMENT, rollout.reward)
    if answer.reward is not None:
        parts[SCORE] = answer.reward
    if missing := [name for name in weights if name not in parts]:
        raise invalid_answer(
            f"scoring.weights names the part {missing[0]!r}; the parts are {', '.join(parts) or 'none'}"
        )
    weighted = [weight * parts[name] for name, weight in weights.items()]
    return dataclasses.replace(
        rollout,
        reward=sum(weighted) if weighted else parts.get(SCORE, rollout.reward),
        metrics=rollout.metrics | (answer.metrics or {}) | parts,
        steps=_steps(rollout.completions, answer) or rollout.steps,
    )


def _steps(completions: Sequence[Completion], answer: Answer) -> tuple[tuple[StepReward, ...], ...]:
    """Process rewards of each completion: those of `tokens`, then that of `turns`; () if the answer has neither."""
    if answer.tokens is None and answer.turns is None:
        return ()
    for name, entries in (("tokens", answer.tokens), ("turns", answer.turns)):
        if entries is not None and len(entries) != len(completions):
            raise invalid_answer(f"{name} must have {len(completions)} entries, one a completion")
    missing = [None] * len(completions)
    steps = []
    for completion, rewards, turn in zip(completions, answer.tokens or missing, answer.turns or missing, strict=True):
        length = len(completion.token_ids)
        own = _token_steps(rewards or [], length)
        steps.append((*own, StepReward(length - 1, turn)) if turn is not None and length else tuple(own))
    return tuple(steps)


def _token_steps(rewards: TokenRewards, length: int) -> list[StepReward]:
    """A step for each token, or for each pair [last token, number], of a completion of `length` tokens."""
    if rewards and not isinstance(rewards[0], tuple) and len(rewards) != length:
        raise invalid_answer(f"tokens has {len(rewards)} numbers for a completion of {length} tokens")
    pairs = [one if isinstance(one, tuple) else (end, one) for end, one in enumerate(rewards)]
    for end, _ in pairs:
        if not 0 <= end < length:
            raise invalid_answer(f"tokens has position {end} in a completion of {length} tokens")
    return [StepReward(end, reward) for end, reward in pairs]


def invalid_answer(problem: str) -> ScoringError:
    """The failure of a rollout whose scorer returned an invalid answer."""
    return ScoringError("scorer's answer", problem)
