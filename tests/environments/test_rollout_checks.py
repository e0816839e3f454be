"""An environment's own rollouts are valid if they consist of the episode's completions."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from slipstream.environments.base import Policy, Task
from slipstream.environments.chat_tokenizer import ChatTokenizer
from slipstream.environments.episode import EpisodeOptions, RolloutFailed, run_episode
from slipstream.environments.rollout_checks import copy_arrays
from slipstream.generators.torch.engine import Engine
from slipstream.generators.torch.generator import TorchGenerator
from slipstream.rollout import Completion, Rollout, Sampling, StepReward, VersionSpan
from tests.conftest import build_model, build_tokenizer

TASK = Task("t", "12+34=")
Build = Callable[[Policy, Completion, Completion], Any]


def play(build: Build, seed: str = "0") -> tuple[tuple[Rollout, ...] | RolloutFailed, Policy]:
    """Outcome of an episode that returns `build(completions)` of two completions, and its policy."""
    tokenizer = build_tokenizer()
    engine = Engine(build_model(vocab_size=len(tokenizer)), slots=2, tokenizer=tokenizer, version=3)
    policy = Policy(
        TorchGenerator(engine),
        ChatTokenizer(tokenizer),
        Sampling(max_tokens=4, top_k=5, record_sampling_mask=True),
        seed,
    )

    class Built:
        train = test = (TASK,)

        async def rollout(self, task: Task, policy: Policy) -> Any:
            outcome = build(policy, await policy.sample("12"), await policy.sample("3"))
            return await outcome if asyncio.iscoroutine(outcome) else outcome

    try:
        return asyncio.run(run_episode(Built(), TASK, policy, EpisodeOptions(10.0))), policy
    except RolloutFailed as failure:
        return failure, policy


def changed(**changes: Any) -> Build:
    return lambda _, one, other: Rollout((one, dataclasses.replace(other, **changes)), 1.0)


def of_rollout(**changes: Any) -> Build:
    return lambda _, one, other: dataclasses.replace(Rollout((one, other), 1.0), **changes)


ELSEWHERE = Completion((3, 4), (5,), (-1.0,), (VersionSpan(3, 0, 1),), "stop")
DIFFERS = r"is not what the policy sampled in this episode"


@pytest.mark.parametrize(
    ("build", "field", "problem"),
    [
        (changed(token_ids=(5, 6, 7, 8)), "completions.token_ids", rf"completions\[1\].token_ids {DIFFERS}"),
        (changed(token_ids=(5, 6, 7, 10**6)), "completions.token_ids", DIFFERS),
        (changed(token_ids=(-1,)), "completions.token_ids", DIFFERS),
        (changed(token_ids=(2**70,)), "completions.token_ids", DIFFERS),
        (changed(token_ids=()), "completions.token_ids", DIFFERS),
        (changed(token_ids=None), "completions.token_ids", DIFFERS),
        (changed(prompt_ids=(3, 4, 5)), "completions.prompt_ids", DIFFERS),
        (changed(logprobs=(-0.5,)), "completions.logprobs", rf"completions\[1\].logprobs {DIFFERS}"),
        (changed(logprobs=(np.nan,) * 4), "completions.logprobs", DIFFERS),
        (changed(spans=(VersionSpan(3, 0, 2),)), "completions.spans", DIFFERS),
        (changed(spans=(VersionSpan(99, 0, 4),)), "completions.spans", DIFFERS),
        (changed(temperature=0.5), "completions.temperature", DIFFERS),
        (changed(sampling_mask=None), "completions.sampling_mask", DIFFERS),
        (changed(sampling_mask=(np.array([1]),) * 4), "completions.sampling_mask", DIFFERS),
        (changed(experts=np.zeros((5, 1, 1))), "completions.experts", DIFFERS),
        (changed(text="\ud800"), "completions.text", "half of a surrogate pair"),
        (changed(text=7), "completions.text", r"completions\[1\].text is a int, not text"),
        (lambda _, one, other: Rollout((ELSEWHERE,), 1.0), "completions.token_ids", DIFFERS),
        (lambda _, one, other: [Rollout((one,), 1.0), Rollout((one,), 0.0)], "completions", "of its role already"),
        (lambda _, one, other: Rollout((other, other), 1.0), "completions", r"completions\[1\] is in the rollouts"),
        (of_rollout(completions=({"token_ids": [5]},)), "completions", r"completions\[0\] is a dict, not a completion"),
        (of_rollout(completions="12"), "completions", "completions is a str"),
        (of_rollout(role=7), "role", "role is a int, not text"),
        (of_rollout(role="\ud800"), "role", "surrogate"),
        (of_rollout(metrics={7: 1.0}), "metrics", "metrics is a int"),
        (of_rollout(metrics=[1.0]), "metrics", "metrics is a list"),
        (of_rollout(steps=((StepReward(3, 1.0),),)), "steps", "1 entries for 2 completions"),
        (of_rollout(steps=((StepReward(4, 1.0),), ())), "steps", r"steps\[0\] ends at token 4, .* completion has 4"),
        (of_rollout(steps=((StepReward(-1, 1.0),), ())), "steps", "ends at token -1"),
        (of_rollout(steps=(7, 8)), "steps", "pairs"),
        (of_rollout(teacher=((0.0,) * 4,)), "teacher", "one log-probability for each sampled token"),
        (of_rollout(teacher=((0.0,) * 4, (np.inf,) * 4)), "teacher", "not finite"),
    ],
)  # fmt: skip
def test_a_rollout_that_differs_from_the_policys_completions_fails_with_the_field(
    build: Build, field: str, problem: str
) -> None:
    failure, _ = play(build)
    assert isinstance(failure, RolloutFailed) and failure.reason == f"invalid rollout: {field}"
    with pytest.raises(RolloutFailed, match=problem):
        raise failure
    assert "\n" not in failure.detail and "task t" in failure.detail


def extended(name: str, value: float) -> Build:
    """An environment that changes an array of a completion in place."""

    def build(policy: Policy, one: Completion, other: Completion) -> Rollout:
        getattr(other, name).append(value)
        return policy.rollout(1.0)

    return build


@pytest.mark.parametrize(("name", "value"), [("prompt_ids", 5), ("token_ids", 5), ("logprobs", -1.0)])
def test_a_completion_changed_in_place_fails_its_rollout(name: str, value: float) -> None:
    failure, _ = play(extended(name, value))
    assert isinstance(failure, RolloutFailed) and failure.reason == f"invalid rollout: completions.{name}"


def test_the_record_has_its_own_routing_and_masks() -> None:
    """An environment may reorder the experts or the kept tokens of its completion."""
    experts, kept = np.zeros((3, 1, 2), np.int32), np.array([5, 6], np.int32)
    recorded = copy_arrays(dataclasses.replace(ELSEWHERE, sampling_mask=(kept,), experts=experts))
    experts[:] = 9
    kept[:] = 9
    assert recorded.experts.max() == 0 and recorded.sampling_mask and list(recorded.sampling_mask[0]) == [5, 6]


@pytest.mark.parametrize("reward", [1e308, -1e39, 1e13, float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["reward", "step"])
def test_a_reward_beyond_float32_fails_its_rollout(reward: float, where: str) -> None:
    steps = ((StepReward(0, reward),), ())
    failure, _ = play(of_rollout(reward=reward) if where == "reward" else of_rollout(steps=steps))
    assert isinstance(failure, RolloutFailed) and "finite number" in failure.detail
    assert failure.reason.endswith("above 1e+12" if math.isfinite(reward) else str(reward))


def test_a_rollout_of_an_earlier_episode_is_invalid() -> None:
    earlier, _ = play(lambda policy, *_: policy.rollout(1.0))
    assert isinstance(earlier, tuple)
    failure, policy = play(lambda *_: earlier[0], seed="1")
    assert isinstance(failure, RolloutFailed) and failure.reason == "invalid rollout: completions.token_ids"
    assert policy.recorded


@pytest.mark.parametrize(
    "build",
    [
        lambda policy, one, other: policy.rollout(1.0, turn_rewards=[1.0, 0.0], style=0.5),
        lambda policy, one, other: 1.0,
        lambda policy, one, other: Rollout((other, one), 1.0),
        lambda policy, one, other: Rollout((other,), 1.0),
        lambda policy, one, other: [Rollout((one,), 1.0, role="a"), Rollout((one, other), 0.0, role="b")],
        lambda policy, one, other: Rollout([dataclasses.replace(one)], 1.0),  # type: ignore[arg-type]
        changed(text="without its thoughts", finish_reason="cut"),
    ],
)  # fmt: skip
def test_any_order_selection_and_role_of_the_completions_is_valid(build: Build) -> None:
    """Values of tokens are those of the engine; the text may be changed by the environment, for a scorer."""
    rollouts, policy = play(build)
    assert isinstance(rollouts, tuple)
    for rollout in rollouts:
        for completion in rollout.completions:
            given = [dataclasses.replace(drawn, text=completion.text) for drawn in policy.recorded]
            assert any(
                completion.logprobs is drawn.logprobs and completion.sampling_mask is drawn.sampling_mask
                for drawn in given
            )
            assert completion.text in ("without its thoughts", *(drawn.text for drawn in policy.recorded))


def test_an_invalid_request_fails_its_rollout_with_one_line() -> None:
    failure, _ = play(lambda policy, *_: policy.sample([99]))
    assert isinstance(failure, RolloutFailed) and failure.reason == "GenerationError"
    assert failure.detail.startswith("task t: the prompt has the token id 99") and "\n" not in failure.detail


def test_rollouts_of_the_policy_keep_the_sampled_completions() -> None:
    rollouts, policy = play(lambda policy, one, other: policy.rollout(1.0))
    assert isinstance(rollouts, tuple)
    assert all(a is b for a, b in zip(rollouts[0].completions, policy.recorded, strict=True))


def test_completions_that_an_environment_adds_are_invalid() -> None:
    def build(policy: Policy, one: Completion, other: Completion) -> float:
        policy.completions.append(ELSEWHERE)
        return 1.0

    failure, _ = play(build)
    assert isinstance(failure, RolloutFailed) and failure.reason == "invalid rollout: completions.token_ids"


def test_subclasses_of_an_environment_become_what_every_process_knows() -> None:
    class Named(str):
        pass

    @dataclasses.dataclass(frozen=True)
    class Own(Rollout):
        more: Any = None

    def build(_: Policy, one: Completion, other: Completion) -> Rollout:
        return Own((one, dataclasses.replace(other, text=Named("more"))), 1.0, {Named("m"): 2.0}, role=Named("judge"))

    outcome, _ = play(build)
    assert not isinstance(outcome, RolloutFailed)
    [rollout] = outcome
    texts = [rollout.role, *rollout.metrics, *(completion.text for completion in rollout.completions)]
    assert type(rollout) is Rollout and {type(text) for text in texts} == {str}
    assert pickle.loads(pickle.dumps(rollout)).role == "judge"


@pytest.mark.parametrize("reward", [np.array([1.0, 2.0]), 10**400])
def test_a_reward_that_is_no_single_number_fails_its_rollout(reward: Any) -> None:
    outcome, _ = play(lambda *_: reward)
    assert isinstance(outcome, RolloutFailed) and "return a number" in outcome.one_line
