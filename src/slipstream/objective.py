"""The objective of a configuration: advantage, loss, corrections and aggregation, built in or a user's own.

Every objective is evaluated on two tokens before a run starts, so that a faulty one is a `ConfigError` at the start.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from slipstream.algorithms import advantages, aggregation, corrections, losses
from slipstream.algorithms.tokens import Tokens
from slipstream.config.plugins import LoadError, load_option, message_of, user_code
from slipstream.config.schema import Config, ConfigError
from slipstream.config.suggestions import suggest
from slipstream.rollout import Batch, Group, Rollout

Result = TypeVar("Result")
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
RECIPES = {  # algorithms of the literature that are a combination of options
    "dr_grpo": 'algorithm.loss = "ppo" with algorithm.aggregation = { name = "constant", length = N }',
    "dapo": 'algorithm.loss = { name = "ppo", clip_high = 0.28 } with algorithm.filter_zero_advantage and overlong',
    "rloo": 'algorithm.advantage = "leave_one_out"',
    "reverse_kl": 'algorithm.loss = "slipstream.algorithms.distillation:reverse_kl" with a teacher',
    "tis": 'algorithm.loss = "reinforce" with algorithm.corrections = ["truncate_tokens"]',
}


@dataclasses.dataclass(frozen=True)
class Objective:
    """The functions of a step, with their options bound."""

    advantage: partial[Tensor]
    loss: partial[Tensor]
    corrections: tuple[partial[Tensor], ...]
    aggregation: partial[Tensor]
    policies: Mapping[str, tuple[Objective, Config]] = dataclasses.field(default_factory=dict)  # of several, by name

    @property
    def linear(self) -> bool:
        """Whether the loss is known to have no gradient where the advantage is 0, as every built-in loss."""
        return self.loss.func in LOSSES


def load_objective(config: Config) -> Objective:
    """The objective of a configuration. Raises `ConfigError`."""
    options = config.algorithm
    loss = _resolve("algorithm.loss", options.loss, LOSSES)
    chosen = tuple(_resolve("algorithm.corrections", each, CORRECTIONS) for each in options.corrections)
    for correction in chosen:
        if correction.func in IMPORTANCE and loss.func in LOSSES and loss.func is not losses.reinforce:
            raise ConfigError(
                f'algorithm.corrections: "{correction.func.__name__}" would count the ratio twice, since the loss '
                f'"{loss.func.__name__}" has one inside; use "reinforce", or a mask such as "mask_tokens"'
            )
    advantage = _resolve("algorithm.advantage", options.advantage, ADVANTAGES)
    denominator = _resolve("algorithm.aggregation", options.aggregation, AGGREGATIONS)
    objective = Objective(advantage, loss, chosen, denominator, _of_policies(config))
    _check_on_policy(objective, config)
    if options.filter_zero_advantage and _loss_gradient(objective.loss, _on_policy_tokens(config, [0.0, 0.0])).any():
        raise ConfigError(
            f'algorithm.filter_zero_advantage = true does not go with algorithm.loss = "{options.loss["name"]}", which '
            "has a gradient even where the advantage is 0; set it to false"
        )
    return objective


def _of_policies(config: Config) -> dict[str, tuple[Objective, Config]]:
    """Objective and configuration of each of `[[policies]]`. Raises `ConfigError`."""
    found = {}
    for name, own in config.each_policy.items():
        try:
            found[name] = load_objective(own), own
        except ConfigError as error:
            raise ConfigError(f'policy "{name}": {error}') from None
    return found


def build_batch(
    objective: Objective, config: Config, groups: Sequence[Group], version: int, *, strict: bool = True
) -> Batch:
    """The batch of a step on `version`, with the configured advantages; `strict` and errors as in `make_batch`.

    In a run of several policies, each has its own advantages, over its own rollouts.
    """
    if objective.policies:
        return _build_batch_of_policies(objective, groups, version, strict)
    options = config.algorithm
    longest = {each.label: config.sampling_of(each).max_tokens for each in config.each_environment}

    def truncated(rollout: Rollout) -> bool:
        return any(c.finish_reason == "length" for c in rollout.completions)

    def penalty(rollout: Rollout, environment: str) -> float:
        if not options.overlong_buffer:
            return -float(truncated(rollout))
        length = max(len(c.token_ids) for c in rollout.completions)
        most = longest.get(environment, config.sampling.max_tokens)
        return advantages.overlong_penalty(length, longest=most, soft=options.overlong_buffer)

    return advantages.make_batch(
        groups,
        objective.advantage,
        parts=options.reward_weights,
        penalty=penalty if options.overlong == "penalty" else lambda rollout, environment: 0.0,
        left_out=truncated if options.overlong == "filter" else lambda rollout: False,
        whitened=options.normalize_advantages,
        process=options.process_reward_coef,
        version=version,
        strict=strict,
    )


def _build_batch_of_policies(objective: Objective, groups: Sequence[Group], version: int, strict: bool) -> Batch:
    """The batch whose advantages are computed for each policy over its own rollouts. Raises as `make_batch`."""
    whole = Batch(tuple(groups), tuple((0.0,) * len(group.rollouts) for group in groups), version)
    advantages = {}  # of each policy's rollouts, in their order
    for name, (own, config) in objective.policies.items():
        batch = build_batch(own, config, whole.of_policy(name).groups, version, strict=strict)
        advantages[name] = iter([advantage for group in batch.advantages for advantage in group])
    each = tuple(tuple(next(advantages[rollout.policy]) for rollout in group.rollouts) for group in groups)
    return dataclasses.replace(whole, advantages=each)


def has_signal(objective: Objective, config: Config, group: Group, *, strict: bool = False) -> bool:
    """Whether any advantage of the group differs from 0.

    With `strict`, also True for a group without the named reward parts or steps, for which `build_batch` then raises.
    """
    try:
        return build_batch(objective, config, [group], 0, strict=strict).signal[0]
    except ValueError:
        return True


def _resolve(option: str, chosen: Mapping[str, Any], built_in: Sequence[Callable[..., Any]]) -> partial[Any]:
    """The function with the option's `name`, its other entries bound as keyword arguments. Raises `ConfigError`."""
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


def _check_on_policy(objective: Objective, config: Config) -> None:
    """Raise `ConfigError` for an objective that fails on two tokens sampled by the current policy.

    On policy, built-in losses have the gradient -A and corrections the weight 1, unless bounds exclude a ratio of 1.
    """
    tokens = _on_policy_tokens(config, [1.0, -1.0])
    gradient = _loss_gradient(objective.loss, tokens)
    if objective.loss.func in LOSSES and not torch.allclose(gradient, -tokens.advantages):
        raise ConfigError(
            "algorithm.loss: with these options an on-policy token loses its gradient; "
            "ratios of 1 must be inside all bounds"
        )
    for correction in objective.corrections:
        weight = _evaluate("algorithm.corrections", correction, tokens, 2)
        if correction.func in CORRECTIONS and not (weight == 1).all():
            raise ConfigError(
                f"algorithm.corrections: with these options {correction.func.__name__} rejects on-policy "
                "tokens; ratios of 1 and divergences of 0 must be inside all bounds"
            )
    rewards, lengths = torch.tensor([[0.0, 1.0], [2.0, 1.0]], dtype=torch.float64)
    _evaluate("algorithm.advantage", objective.advantage, rewards, 2)
    if not (_evaluate("algorithm.aggregation", objective.aggregation, lengths, 2) > 0).all():
        raise ConfigError("algorithm.aggregation: with these options the weights are not above 0")


def _on_policy_tokens(config: Config, advantages: Sequence[float]) -> Tokens:
    """On-policy tokens that are less likely under the reference and the teacher, if any."""
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    behaviour, zeros = logprobs.detach(), torch.zeros(2, dtype=torch.long)
    reference = behaviour - 1 if config.algorithm.kl_coef else None
    teacher = behaviour - 1 if config.teacher.path or config.teacher.lag else None
    return Tokens(logprobs, behaviour, torch.tensor(advantages), zeros, zeros, behaviour, reference, teacher)


def _loss_gradient(loss: Callable[[Tokens], Tensor], tokens: Tokens) -> Tensor:
    """Derivative of each token's loss by its log-probability. Raises `ConfigError` for a loss without one."""
    found = _evaluate("algorithm.loss", loss, tokens, len(tokens.logprobs))
    if not found.requires_grad:
        raise ConfigError("algorithm.loss returned numbers that do not depend on tokens.logprobs")
    return _call("algorithm.loss", torch.autograd.grad, found.sum(), tokens.logprobs)[0]


def _call(option: str, function: Callable[..., Result], *arguments: Any) -> Result:
    """The function's result. Raises `ConfigError` if it fails."""
    try:
        with user_code():
            return function(*arguments)
    except LoadError as error:
        if isinstance(error.__cause__, ValueError):  # of a wrong option
            raise ConfigError(f"{option}: {message_of(error.__cause__)}") from error
        raise ConfigError(f"{option} failed on two tokens: {error}") from error


def _evaluate(option: str, function: Callable[[Any], Tensor], argument: Any, size: int) -> Tensor:
    """The function's value, `[size]`. Raises `ConfigError` if it fails or returns anything but finite numbers."""
    result = _call(option, function, argument)
    if not isinstance(result, Tensor) or result.shape != (size,) or not result.isfinite().all():
        shown = f"a tensor of shape {list(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
        raise ConfigError(f"{option} returned {shown} for {size} of its inputs; it returns one finite number each")
    return result
