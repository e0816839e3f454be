"""Validate that an environment's rollouts consist of the completions that the policy sampled in the episode.

Consumes rollouts and copies of the episode's completions, which reveal arrays changed in place. Raises
`InvalidRollout`.
"""

from __future__ import annotations

import copy
import dataclasses
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from slipstream.environments.text_limits import is_encodable
from slipstream.errors import InvalidInput
from slipstream.rollout import Completion, Rollout, StepReward, float32_array

SEQUENCES = ("token_ids", "prompt_ids", "logprobs", "spans")  # fields with an entry for each token or version


class InvalidRollout(InvalidInput):
    """A rollout that can't be trained on. `field` is the path of the wrong field, without indices."""

    def __init__(self, field: str, problem: str, at: str = "") -> None:
        super().__init__(f"{at or field} {problem}")
        self.field = field


def copy_arrays(completion: Completion) -> Completion:
    """A copy for the record. The environment keeps the original, and may change its arrays."""
    names = ("prompt_ids", "token_ids", "logprobs", "sampling_mask", "experts")
    arrays = {name: copy.deepcopy(getattr(completion, name)) for name in names}
    return dataclasses.replace(completion, **arrays)


def validate_rollouts(rollouts: Sequence[Rollout], sampled: Sequence[Completion]) -> tuple[Rollout, ...]:
    """The rollouts of an episode, with each completion replaced by the equal one of `sampled`; `text` may differ.

    Raises `InvalidRollout`, also for two rollouts of one role with the same completion.
    """
    used: dict[str, set[int]] = {}
    return tuple(_validate(rollout, sampled, used) for rollout in rollouts)


def _validate(rollout: Rollout, sampled: Sequence[Completion], used: dict[str, set[int]]) -> Rollout:
    _validate_text("role", rollout.role)
    if not isinstance(rollout.completions, tuple | list):
        raise InvalidRollout("completions", f"is a {type(rollout.completions).__name__}, not a tuple of completions")
    taken = used.setdefault(rollout.role, set())
    completions: list[Completion] = []
    for number, completion in enumerate(rollout.completions):
        at = f"completions[{number}]"
        original = _find_original(at, completion, sampled, taken)
        taken.add(id(original))
        _validate_text("completions.text", completion.text, f"{at}.text")
        same_text = original.text == completion.text
        completions.append(original if same_text else dataclasses.replace(original, text=str(completion.text)))
    policies = sorted({completion.policy for completion in completions})
    if len(policies) > 1:
        problem = f"are of the policies {' and '.join(policies)}; return a rollout for each policy"
        raise InvalidRollout("completions", problem)
    if not isinstance(rollout.metrics, Mapping):
        raise InvalidRollout("metrics", f"is a {type(rollout.metrics).__name__}, not a mapping of names to numbers")
    for name in rollout.metrics:
        _validate_text("metrics", name)
    return Rollout(  # not of the environment's own subclasses, which other processes can't unpickle
        tuple(completions),
        rollout.reward,
        {str(name): value for name, value in rollout.metrics.items()},
        _validate_steps(rollout.steps, completions),
        _validate_teacher(rollout.teacher, completions),
        ":".join(filter(None, (*policies, str(rollout.role)))),
    )


def _find_original(at: str, completion: Any, sampled: Sequence[Completion], taken: set[int]) -> Completion:
    """The completion of `sampled`, not `taken`, that equals this one in every field that training uses.

    Raises `InvalidRollout`.
    """
    if not isinstance(completion, Completion):
        raise InvalidRollout("completions", f"is a {type(completion).__name__}, not a completion", at)
    candidates = list(sampled)
    for field in (*SEQUENCES, "temperature", "sampling_mask", "experts"):
        value = getattr(completion, field)
        candidates = [one for one in candidates if _equal(field, getattr(one, field), value)]
        if not candidates:
            problem = "is not what the policy sampled in this episode"
            raise InvalidRollout(f"completions.{field}", problem, f"{at}.{field}")
    free = [one for one in candidates if id(one) not in taken]
    if not free:
        raise InvalidRollout("completions", "is in the rollouts of its role already; give each completion once", at)
    return free[0]


def _equal(field: str, ours: Any, theirs: Any) -> bool:
    if ours is theirs:
        return True
    try:
        if isinstance(ours, array) and isinstance(theirs, array):
            return ours.typecode == theirs.typecode and ours.tobytes() == theirs.tobytes()
        if field == "logprobs":  # NaN in evaluations
            return bool(np.array_equal(np.asarray(ours), np.asarray(theirs), equal_nan=True))
        if field in SEQUENCES:
            return tuple(ours) == tuple(theirs)
        if field == "sampling_mask":
            return len(ours) == len(theirs) and all(map(np.array_equal, ours, theirs))
        return ours is not None and theirs is not None and bool(np.array_equal(ours, theirs))
    except (TypeError, ValueError):  # not a sequence, or values that can't be compared
        return False


def _validate_text(field: str, value: Any, at: str = "") -> None:
    if not isinstance(value, str):
        raise InvalidRollout(field, f"is a {type(value).__name__}, not text", at)
    if not is_encodable(value):
        raise InvalidRollout(field, "has half of a surrogate pair, which is no text", at)


def _validate_steps(steps: Any, completions: Sequence[Completion]) -> tuple[tuple[StepReward, ...], ...]:
    """Process rewards, one entry for each completion, or ().

    Raises `InvalidRollout` for another type or number of entries, and for a step that ends outside.
    """
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


def _validate_teacher(teacher: Any, completions: Sequence[Completion]) -> tuple[array[float], ...]:
    """Log-probabilities of a teacher, or (). Raises `InvalidRollout` unless each sampled token has a finite one."""
    if not teacher:
        return ()
    try:
        found = tuple(float32_array(map(float, row)) for row in teacher)
    except (TypeError, ValueError, OverflowError):
        raise InvalidRollout("teacher", "has something else than numbers for each completion") from None
    if [len(row) for row in found] != [len(completion.token_ids) for completion in completions]:
        raise InvalidRollout("teacher", "needs one log-probability for each sampled token of each completion")
    if not all(np.isfinite(row).all() for row in found):
        raise InvalidRollout("teacher", "has a log-probability that is not finite")
    return found
