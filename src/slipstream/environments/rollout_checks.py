"""Is a rollout that an environment returned what the policy drew in the episode?

Consumes rollouts and the completions of their episode, raises `InvalidRollout` for what can't be trained on. The
completions of their episode are copies: arrays that an environment changed in place differ from them.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from slipstream.rollout import Completion, Rollout, StepReward, numbers

ROWS = ("token_ids", "prompt_ids", "logprobs", "spans")  # one entry a token or a version


class InvalidRollout(ValueError):
    """A rollout that can't be trained on. `field` is what is wrong with it, without indices."""

    def __init__(self, field: str, problem: str, at: str = "") -> None:
        super().__init__(f"{at or field} {problem}")
        self.field = field


def copied(completion: Completion) -> Completion:
    """The completion with arrays of its own: an environment may change those that it was given."""
    arrays = {name: getattr(completion, name)[:] for name in ("prompt_ids", "token_ids", "logprobs")}
    return dataclasses.replace(completion, **arrays)


def checked_rollouts(rollouts: Sequence[Rollout], drawn: Sequence[Completion]) -> tuple[Rollout, ...]:
    """The rollouts of an episode, with their completions as they were `drawn` in it; `text` may be the environment's.

    Raises `InvalidRollout`, also if two rollouts of one role have the same completion.
    """
    used: dict[str, set[int]] = {}
    return tuple(_checked(rollout, drawn, used) for rollout in rollouts)


def _checked(rollout: Rollout, drawn: Sequence[Completion], used: dict[str, set[int]]) -> Rollout:
    _check_text("role", rollout.role)
    if not isinstance(rollout.completions, tuple | list):
        raise InvalidRollout("completions", f"is a {type(rollout.completions).__name__}, not a tuple of completions")
    taken = used.setdefault(rollout.role, set())
    completions = []
    for number, completion in enumerate(rollout.completions):
        at = f"completions[{number}]"
        found = _as_drawn(at, completion, drawn, taken)
        taken.add(id(found))
        _check_text("completions.text", completion.text, f"{at}.text")
        completions.append(found if found.text == completion.text else dataclasses.replace(found, text=completion.text))
    if not isinstance(rollout.metrics, Mapping):
        raise InvalidRollout("metrics", f"is a {type(rollout.metrics).__name__}, not a mapping of names to numbers")
    for name in rollout.metrics:
        _check_text("metrics", name)
    return dataclasses.replace(
        rollout,
        completions=tuple(completions),
        steps=_checked_steps(rollout.steps, completions),
        teacher=_checked_teacher(rollout.teacher, completions),
    )


def _as_drawn(at: str, completion: Any, drawn: Sequence[Completion], taken: set[int]) -> Completion:
    """The completion of the episode that this one equals in all that is trained on."""
    if not isinstance(completion, Completion):
        raise InvalidRollout("completions", f"is a {type(completion).__name__}, not a completion", at)
    candidates = list(drawn)
    for field in (*ROWS, "temperature", "kept", "experts"):
        value = getattr(completion, field)
        candidates = [one for one in candidates if _equal(field, getattr(one, field), value)]
        if not candidates:
            raise InvalidRollout(f"completions.{field}", "is not what the policy drew in this episode", f"{at}.{field}")
    free = [one for one in candidates if id(one) not in taken]
    if not free:
        raise InvalidRollout("completions", "is in the rollouts of its role already; give each completion once", at)
    return free[0]


def _equal(field: str, drawn: Any, given: Any) -> bool:
    if drawn is given:
        return True
    try:
        if isinstance(drawn, array) and isinstance(given, array):
            return drawn.typecode == given.typecode and drawn.tobytes() == given.tobytes()
        if field in ROWS:
            return tuple(drawn) == tuple(given)
        if field == "kept":
            return len(drawn) == len(given) and all(map(np.array_equal, drawn, given))
        return drawn is not None and given is not None and bool(np.array_equal(drawn, given))
    except (TypeError, ValueError):  # no sequence, or a sequence of what can't be compared
        return False


def _check_text(field: str, value: Any, at: str = "") -> None:
    if not isinstance(value, str):
        raise InvalidRollout(field, f"is a {type(value).__name__}, not text", at)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidRollout(field, "has half of a surrogate pair, which is no text", at) from None


def _checked_steps(steps: Any, completions: Sequence[Completion]) -> tuple[tuple[StepReward, ...], ...]:
    """Rewards of steps: one entry a completion, or nothing, each step's end a token of its completion."""
    if not steps:
        return ()
    try:
        found = tuple(tuple(StepReward(int(end), float(reward)) for end, reward in turn) for turn in steps)
    except (TypeError, ValueError, OverflowError):
        raise InvalidRollout("steps", "has something else than pairs (end, reward) for each completion") from None
    if len(found) != len(completions):
        raise InvalidRollout("steps", f"has {len(found)} entries for {len(completions)} completions")
    for number, (turn, completion) in enumerate(zip(found, completions, strict=True)):
        for step in turn:
            if not 0 <= step.end < len(completion.token_ids):
                problem = f"ends at token {step.end}, and the completion has {len(completion.token_ids)}"
                raise InvalidRollout("steps", problem, f"steps[{number}]")
    return found


def _checked_teacher(teacher: Any, completions: Sequence[Completion]) -> tuple[array[float], ...]:
    """Log-probabilities of a teacher: one for each drawn token, or nothing."""
    if not teacher:
        return ()
    try:
        found = tuple(numbers(map(float, row)) for row in teacher)
    except (TypeError, ValueError, OverflowError):
        raise InvalidRollout("teacher", "has something else than numbers for each completion") from None
    if [len(row) for row in found] != [len(completion.token_ids) for completion in completions]:
        raise InvalidRollout("teacher", "needs one log-probability for each drawn token of each completion")
    if not all(np.isfinite(row).all() for row in found):
        raise InvalidRollout("teacher", "has a log-probability that is not finite")
    return found
