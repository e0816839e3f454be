"""The `Scorer` protocol, and the effect of a scorer's answer on a rollout. Pure functions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from slipstream.config.schema import ConfigError
from slipstream.environments.base import Task
from slipstream.environments.reward_workers import ScoringError, ZeroReward
from slipstream.rollout import Completion, Rollout, StepReward

ENVIRONMENT, SCORE = "environment", "score"  # parts of every rollout
ANSWER = {"reward", "parts", "tokens", "turns", "metrics"}


class Scorer(Protocol):
    """Scores finished rollouts; calls run concurrently."""

    async def score(self, task: Task, rollout: Rollout) -> Any:
        """A number, or a mapping in the format of `apply_answer`. Raises `ScoringError`."""
        ...

    async def close(self) -> None: ...


def apply_answer(rollout: Rollout, answer: Any, weights: Mapping[str, float]) -> Rollout:
    """The rollout with the reward of a scorer's answer. Raises `ScoringError` for an invalid answer.

    An answer is a number, or a mapping with any of `reward`, `parts` {name: number}, `turns` (one number for each
    completion), `tokens` (for each completion one number for each token, or pairs [last token of a step, number]) and
    `metrics`.

    The parts of a rollout are the answer's parts, `score` (the answer's `reward`) and `environment` (the environment's
    reward); its metrics include them. The reward is the weighted sum of the parts in `weights`. Without weights it is
    `score`, or the environment's reward if the answer has none. A scorer that raised has 0 for every part.
    """
    if isinstance(answer, ZeroReward):
        answer = {"reward": 0.0, "parts": dict.fromkeys(set(weights) - {ENVIRONMENT, SCORE}, 0.0)}
    if not isinstance(answer, Mapping):
        answer = {"reward": finite_number(answer, "it")}
    if unknown := sorted(set(map(str, answer)) - ANSWER):
        raise invalid_answer(f"it has {unknown[0]!r}; known are {', '.join(sorted(ANSWER))}")
    parts = finite_numbers(answer.get("parts") or {}, "parts")
    if math.isfinite(rollout.reward):
        parts.setdefault(ENVIRONMENT, rollout.reward)
    if answer.get("reward") is not None:
        parts[SCORE] = finite_number(answer["reward"], "reward")
    if missing := [name for name in weights if name not in parts]:
        raise invalid_answer(
            f"scoring.weights names the part {missing[0]!r}; the parts are {', '.join(parts) or 'none'}"
        )
    weighted = [weight * parts[name] for name, weight in weights.items()]
    return dataclasses.replace(
        rollout,
        reward=sum(weighted) if weighted else parts.get(SCORE, rollout.reward),
        metrics=rollout.metrics | finite_numbers(answer.get("metrics") or {}, "metrics") | parts,
        steps=_steps(rollout.completions, answer) or rollout.steps,
    )


def _steps(completions: Sequence[Completion], answer: Mapping[str, Any]) -> tuple[tuple[StepReward, ...], ...]:
    """Process rewards of each completion: those of `tokens`, then that of `turns`; () if the answer has neither.

    Raises `ScoringError`.
    """
    tokens, turns = answer.get("tokens"), answer.get("turns")
    if tokens is None and turns is None:
        return ()
    lengths = [len(c.token_ids) for c in completions]
    steps = [_token_steps(t, n) for t, n in zip(_entries(tokens, lengths, "tokens"), lengths, strict=True)]
    for own, turn, length in zip(steps, _entries(turns, lengths, "turns"), lengths, strict=True):
        if turn is not None and length:
            own.append(StepReward(length - 1, finite_number(turn, "turns")))
    return tuple(map(tuple, steps))


def _entries(values: Any, lengths: Sequence[int], name: str) -> Sequence[Any]:
    """The answer's entry for each completion, or None for each. Raises `ScoringError`."""
    if values is None:
        return [None] * len(lengths)
    if not isinstance(values, Sequence) or len(values) != len(lengths):
        raise invalid_answer(f"{name} must have {len(lengths)} entries, one a completion")
    return values


def _token_steps(values: Any, length: int) -> list[StepReward]:
    """One step for each token, or for each pair [last token, number]. Raises `ScoringError`."""
    if values is None:
        return []
    if not isinstance(values, Sequence):
        raise invalid_answer("tokens must have a list of numbers or of pairs for each completion")
    if any(isinstance(value, Sequence) for value in values):
        return [_step(value, length) for value in values]
    if values and len(values) != length:
        raise invalid_answer(f"tokens has {len(values)} numbers for a completion of {length} tokens")
    return [StepReward(i, finite_number(v, "tokens")) for i, v in enumerate(values)]


def _step(pair: Any, length: int) -> StepReward:
    if not isinstance(pair, Sequence) or len(pair) != 2 or not isinstance(pair[0], int) or not 0 <= pair[0] < length:
        raise invalid_answer(f"tokens has {pair!r:.60}, no [position, number] in a completion of {length} tokens")
    return StepReward(pair[0], finite_number(pair[1], "tokens"))


def finite_numbers(values: Any, name: str) -> dict[str, float]:
    """A mapping of names to finite numbers. Raises `ScoringError`."""
    if not isinstance(values, Mapping):
        raise invalid_answer(f"{name} must be named numbers")
    return {str(key): finite_number(value, f"{name}.{key}") for key, value in values.items()}


def finite_number(value: Any, name: str) -> float:
    """`value` as a finite float. Raises `ScoringError`."""
    if isinstance(value, str) or not hasattr(value, "__float__") or not math.isfinite(float(value)):
        raise invalid_answer(f"{name} is {value!r:.60}, no finite number")
    return float(value)


def invalid_answer(problem: str) -> ScoringError:
    """The failure of a rollout whose scorer returned an invalid answer."""
    return ScoringError("scorer's answer", problem)


def parse_options(options: Mapping[str, Any], defaults: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """`scoring.options` merged into the defaults of a scorer kind. Default None: required. Raises `ConfigError`."""
    for name, value in options.items():
        if name not in defaults:
            raise ConfigError(f'scoring.options.{name} is unknown to kind = "{kind}"; it takes {", ".join(defaults)}')
        wanted = type(defaults[name] if defaults[name] is not None else "")
        if not isinstance(value, (int, float) if wanted is float else wanted) or isinstance(value, bool):
            raise ConfigError(f"scoring.options.{name} = {value!r} must be of type {wanted.__name__}")
    merged = {**defaults, **options}
    for name, value in merged.items():
        if value is None:
            raise ConfigError(f'scoring.options.{name} is not set; kind = "{kind}" needs it')
    return merged
