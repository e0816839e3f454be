"""The learning rule that a configuration names: functions of `algorithms`, or a user's own, with their options.

Every rule is tried on two tokens before a run starts, so that what can't be is one line and no traceback hours later.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slipstream.algorithms import advantages, aggregation, corrections, losses
from slipstream.algorithms.tokens import Tokens
from slipstream.config import Config, ConfigError, suggest
from slipstream.rollout import Batch, Group, Rollout
from slipstream.things import load_option, one_line

ADVANTAGES = (advantages.group_mean, advantages.leave_one_out, advantages.pass_at_k, advantages.reward)
LOSSES = (
    losses.grpo, losses.ppo, losses.gspo, losses.cispo, losses.topr, losses.reinforce, losses.decoupled,
    losses.dppo_tv, losses.dppo_kl, losses.sapo,
)  # fmt: skip
IMPORTANCE = (corrections.truncate_tokens, corrections.truncate_sequences, corrections.icepop)
CORRECTIONS = (
    *IMPORTANCE, corrections.mask_tokens, corrections.mask_sequences, corrections.opsm,
    corrections.mask_divergence, corrections.mask_lag, corrections.discount_lag,
)  # fmt: skip
AGGREGATIONS = (aggregation.token_mean, aggregation.sequence_mean, aggregation.constant)
RECIPES = {  # what the field calls a loss, and is one with an average
    "dr_grpo": 'algorithm.loss = "ppo" with algorithm.aggregation = { name = "constant", length = N }',
    "dapo": 'algorithm.loss = { name = "ppo", clip_high = 0.28 }, algorithm.filter_equal and algorithm.overlong',
    "rloo": 'algorithm.advantage = "leave_one_out"',
    "reverse_kl": 'algorithm.loss = "slipstream.algorithms.distillation:reverse_kl" with a teacher',
    "tis": 'algorithm.loss = "reinforce" with algorithm.corrections = ["truncate_tokens"]',
}


@dataclasses.dataclass(frozen=True)
class Rule:
    """How a step is learned from; each function has its options in it."""

    advantage: partial[Tensor]
    loss: partial[Tensor]
    corrections: tuple[partial[Tensor], ...]
    aggregation: partial[Tensor]

    @property
    def linear(self) -> bool:
        """Whether the loss is known to have no gradient where the advantage is 0; so it is with all that are ours."""
        return self.loss.func in LOSSES


def load_rule(config: Config) -> Rule:
    """The rule that a configuration names. Raises `ConfigError`."""
    options = config.algorithm
    loss = _choose("algorithm.loss", options.loss, LOSSES)
    chosen = tuple(_choose("algorithm.corrections", each, CORRECTIONS) for each in options.corrections)
    for correction in chosen:
        if correction.func in IMPORTANCE and loss.func in LOSSES and loss.func is not losses.reinforce:
            raise ConfigError(
                f'algorithm.corrections: "{correction.func.__name__}" would count the ratio twice, since the loss '
                f'"{loss.func.__name__}" has one inside; use "reinforce", or a mask such as "mask_tokens"'
            )
    rule = Rule(
        _choose("algorithm.advantage", options.advantage, ADVANTAGES),
        loss,
        chosen,
        _choose("algorithm.aggregation", options.aggregation, AGGREGATIONS),
    )
    _try(rule, config)
    if options.filter_equal and _slope(rule.loss, _two_tokens(config, [0.0, 0.0])).any():
        raise ConfigError(
            f'algorithm.filter_equal = true does not go with algorithm.loss = "{options.loss["name"]}", from which a '
            "token learns even where its advantage is 0; set it to false"
        )
    return rule


def cut_batch(rule: Rule, config: Config, groups: Sequence[Group], version: int, *, strict: bool = True) -> Batch:
    """The batch of a step on `version`, advantages as configured. `strict` and errors are those of `make_batch`."""
    options, longest = config.algorithm, config.sampling.max_tokens

    def penalty(rollout: Rollout) -> float:
        if not options.overlong_soft:
            return -float(cut_off(rollout))
        length = max(len(c.token_ids) for c in rollout.completions)
        return advantages.overlong_penalty(length, longest=longest, soft=options.overlong_soft)

    def cut_off(rollout: Rollout) -> bool:
        return any(c.finish_reason == "length" for c in rollout.completions)

    return advantages.make_batch(
        groups,
        rule.advantage,
        parts=options.parts,
        penalty=penalty if options.overlong == "penalty" else lambda rollout: 0.0,
        left_out=cut_off if options.overlong == "filter" else lambda rollout: False,
        whitened=options.whiten,
        process=options.process,
        version=version,
        strict=strict,
    )


def has_signal(rule: Rule, config: Config, group: Group, *, strict: bool = False) -> bool:
    """Whether a group has an advantage that is not 0; if `strict`, one without a part or steps has: a batch tells."""
    try:
        return cut_batch(rule, config, [group], 0, strict=strict).signal[0]
    except ValueError:
        return True


def _choose(option: str, chosen: Mapping[str, Any], built_in: Sequence[Callable[..., Any]]) -> partial[Any]:
    """The function that an option names, with its other entries as keyword arguments. Raises `ConfigError`."""
    options = dict(chosen)
    name, known = options.pop("name", None), {function.__name__: function for function in built_in}
    if not isinstance(name, str):
        raise ConfigError(f'{option} has no name; give {{ name = "{next(iter(known))}", ... }}')
    if name in RECIPES and name not in known:
        raise ConfigError(f"{option}: {name} is no single function here but {RECIPES[name]}")
    function = known.get(name) or load_option(option, name, "function", list(known))
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        raise ConfigError(f"{option} = {json.dumps(name)} is not a function in Python") from None
    takes = {n: p for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
    for key, value in options.items():
        if key not in takes and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            hint = suggest(key, list(takes)) or f"; it takes {', '.join(takes) or 'none'}"
            raise ConfigError(f"{option}: {name} has no option {key}{hint}")
        wanted = type(takes[key].default) if key in takes else type(value)
        if wanted in (bool, float, int) and not _fits(value, wanted):
            raise ConfigError(f"{option}: {key} = {json.dumps(value)} of {name} must be {KINDS[wanted]}")
    for key, parameter in takes.items():
        if parameter.default is parameter.empty and key not in options:
            raise ConfigError(f'{option}: {name} needs {key}; give {{ name = "{name}", {key} = ... }}')
    return partial(function, **options)


KINDS: dict[type, str] = {bool: "true or false", float: "a finite number", int: "a whole number"}


def _fits(value: Any, wanted: type) -> bool:
    if wanted is float:
        return type(value) in (int, float) and abs(value) < float("inf")
    return type(value) is wanted


def _try(rule: Rule, config: Config) -> None:
    """Raise `ConfigError` for a rule that does not work on two tokens that the policy has just drawn itself.

    There each built-in loss has the gradient -A and each built-in correction the weight 1, unless its bounds are wrong.
    """
    tokens = _two_tokens(config, [1.0, -1.0])
    slope = _slope(rule.loss, tokens)
    if rule.loss.func in LOSSES and not torch.allclose(slope, -tokens.advantages):
        raise ConfigError(
            "algorithm.loss: with these options a token that the policy itself has drawn loses its gradient; "
            "ratios of 1 must lie inside all bounds"
        )
    for correction in rule.corrections:
        weight = _called("algorithm.corrections", correction, tokens, 2)
        if correction.func in CORRECTIONS and not (weight == 1).all():
            raise ConfigError(
                f"algorithm.corrections: with these options {correction.func.__name__} rejects what the policy itself "
                "has drawn; ratios of 1 and divergences of 0 must lie inside all bounds"
            )
    _called("algorithm.advantage", rule.advantage, torch.tensor([0.0, 1.0], dtype=torch.float64), 2)
    weights = _called("algorithm.aggregation", rule.aggregation, torch.tensor([2.0, 1.0], dtype=torch.float64), 2)
    if not (weights > 0).all():
        raise ConfigError("algorithm.aggregation: with these options the weights are not above 0")


def _two_tokens(config: Config, advantages: Sequence[float]) -> Tokens:
    """Tokens that the policy has just drawn itself, and that reference and teacher, if any, find less likely."""
    drawn = torch.tensor([-1.0, -2.0], requires_grad=True)
    known, index = drawn.detach(), torch.zeros(2, dtype=torch.long)
    reference = known - 1 if config.algorithm.kl else None
    teacher = known - 1 if config.teacher.path or config.teacher.lag else None
    return Tokens(drawn, known, torch.tensor(advantages), index, index, known, reference, teacher)


def _slope(loss: Callable[[Tokens], Tensor], tokens: Tokens) -> Tensor:
    """The derivative of each token's loss. Raises `ConfigError` where there is none."""
    found = _called("algorithm.loss", loss, tokens, len(tokens.logprobs))
    if not found.requires_grad:
        raise ConfigError("algorithm.loss returned numbers that do not depend on tokens.logprobs")
    return torch.autograd.grad(found.sum(), tokens.logprobs)[0]


def _called(option: str, function: Callable[[Any], Tensor], argument: Any, size: int) -> Tensor:
    """What a function makes of an argument. Raises `ConfigError` where it fails or returns anything but numbers."""
    try:
        result = function(argument)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None
    except Exception as error:
        raise ConfigError(f"{option} failed on two tokens: {one_line(error)}") from None
    if not isinstance(result, Tensor) or result.shape != (size,) or not result.isfinite().all():
        shown = f"a tensor of shape {list(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
        raise ConfigError(f"{option} returned {shown} for {size} of its inputs; it returns one finite number each")
    return result
