"""What a scorer is, and what its answer does to a rollout. Plain data, no I/O."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from slipstream.config import ConfigError
from slipstream.environments.base import Task
from slipstream.environments.scoring import ScoringError, ZeroReward
from slipstream.rollout import Completion, Rollout, StepReward

ENVIRONMENT, SCORE = "environment", "score"  # the parts that every answer has
ANSWER = {"reward", "parts", "tokens", "turns", "metrics"}


class Scorer(Protocol):
    """Gives finished rollouts their rewards; many calls run at once."""

    async def score(self, task: Task, rollout: Rollout) -> Any:
        """A number, or a mapping as `rewarded` reads it. Raises `ScoringError`."""
        ...

    async def close(self) -> None: ...


def rewarded(rollout: Rollout, answer: Any, weights: Mapping[str, float]) -> Rollout:
    """The rollout with the reward that a scorer's answer gives it. Raises `ScoringError` for what is no answer.

    An answer is a number, or a mapping with any of `reward`, `parts` {name: number}, `turns` (a number a completion),
    `tokens` (for each completion a number a token, or pairs [position of a step's last token, number]) and `metrics`.
    The parts of a rollout are those of the answer, `score` (its `reward`) and `environment` (what the environment
    returned); they join its metrics. The reward is the sum of the parts that have weights, each times its weight;
    without weights it is `score`, or what the environment returned if the answer has no `reward`. All parts of a scorer
    that raised are 0.
    """
    if isinstance(answer, ZeroReward):
        answer = {"reward": 0.0, "parts": dict.fromkeys(set(weights) - {ENVIRONMENT, SCORE}, 0.0)}
    if not isinstance(answer, Mapping):
        answer = {"reward": number(answer, "it")}
    if unknown := sorted(set(map(str, answer)) - ANSWER):
        raise wrong(f"it has {unknown[0]!r}; known are {', '.join(sorted(ANSWER))}")
    parts = numbers(answer.get("parts") or {}, "parts")
    if math.isfinite(rollout.reward):
        parts.setdefault(ENVIRONMENT, rollout.reward)
    if answer.get("reward") is not None:
        parts[SCORE] = number(answer["reward"], "reward")
    if missing := [name for name in weights if name not in parts]:
        raise wrong(f"scoring.weights names the part {missing[0]!r}; the parts are {', '.join(parts) or 'none'}")
    if weights:
        reward = sum(weight * parts[name] for name, weight in weights.items())
    else:
        reward = parts.get(SCORE, rollout.reward)
    return dataclasses.replace(
        rollout,
        reward=reward,
        metrics=rollout.metrics | numbers(answer.get("metrics") or {}, "metrics") | parts,
        steps=_steps(rollout.completions, answer) or rollout.steps,
    )


def _steps(completions: Sequence[Completion], answer: Mapping[str, Any]) -> tuple[tuple[StepReward, ...], ...]:
    """Process rewards by completion, from `tokens` and `turns`; nothing where the answer has neither."""
    tokens, turns = answer.get("tokens"), answer.get("turns")
    if tokens is None and turns is None:
        return ()
    lengths = [len(c.token_ids) for c in completions]
    steps = [_token_steps(t, n) for t, n in zip(_of(tokens, lengths, "tokens"), lengths, strict=True)]
    for own, turn, length in zip(steps, _of(turns, lengths, "turns"), lengths, strict=True):
        if turn is not None and length:
            own.append(StepReward(length - 1, number(turn, "turns")))
    return tuple(map(tuple, steps))


def _of(values: Any, lengths: Sequence[int], name: str) -> Sequence[Any]:
    if values is None:
        return [None] * len(lengths)
    if not isinstance(values, Sequence) or len(values) != len(lengths):
        raise wrong(f"{name} must have {len(lengths)} entries, one a completion")
    return values


def _token_steps(values: Any, length: int) -> list[StepReward]:
    """One step a token, or those that are named by their last token."""
    if values is None:
        return []
    if not isinstance(values, Sequence):
        raise wrong("tokens must have a list of numbers or of pairs for each completion")
    if any(isinstance(value, Sequence) for value in values):
        return [_step(value, length) for value in values]
    if values and len(values) != length:
        raise wrong(f"tokens has {len(values)} numbers for a completion of {length} tokens")
    return [StepReward(i, number(v, "tokens")) for i, v in enumerate(values)]


def _step(pair: Any, length: int) -> StepReward:
    if not isinstance(pair, Sequence) or len(pair) != 2 or not isinstance(pair[0], int) or not 0 <= pair[0] < length:
        raise wrong(f"tokens has {pair!r:.60}, no [position, number] in a completion of {length} tokens")
    return StepReward(pair[0], number(pair[1], "tokens"))


def numbers(values: Any, name: str) -> dict[str, float]:
    """Named numbers as plain ones. Raises `ScoringError`."""
    if not isinstance(values, Mapping):
        raise wrong(f"{name} must be named numbers")
    return {str(key): number(value, f"{name}.{key}") for key, value in values.items()}


def number(value: Any, name: str) -> float:
    """A finite number. Raises `ScoringError`."""
    if isinstance(value, str) or not hasattr(value, "__float__") or not math.isfinite(float(value)):
        raise wrong(f"{name} is {value!r:.60}, no finite number")
    return float(value)


def wrong(what: str) -> ScoringError:
    """The failure of a rollout whose scorer gave no sound answer."""
    return ScoringError("scorer's answer", what)


def take(options: Mapping[str, Any], defaults: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """`scoring.options` over the defaults of this kind; a default of None has to be given. Raises `ConfigError`."""
    for name, value in options.items():
        if name not in defaults:
            raise ConfigError(f'scoring.options.{name} is unknown to kind = "{kind}"; it takes {", ".join(defaults)}')
        wanted = type(defaults[name] if defaults[name] is not None else "")
        if not isinstance(value, (int, float) if wanted is float else wanted) or isinstance(value, bool):
            raise ConfigError(f"scoring.options.{name} = {value!r} must be of type {wanted.__name__}")
    taken = {**defaults, **options}
    for name, value in taken.items():
        if value is None:
            raise ConfigError(f'scoring.options.{name} is not set; kind = "{kind}" needs it')
    return taken
