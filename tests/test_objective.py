"""The objective of a configuration: invalid ones are one-line errors, valid ones resolve to functions."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import tomllib
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.algorithms import losses
from slipstream.config.loading import dump, load_config, validate
from slipstream.config.schema import Config, ConfigError
from slipstream.objective import (
    ADVANTAGES,
    AGGREGATIONS,
    CORRECTIONS,
    IMPORTANCE,
    LOSSES,
    build_batch,
    has_signal,
    load_objective,
)
from slipstream.rollout import Completion, Group, Rollout, StepReward, VersionSpan
from tests.algorithms.cases import Case

DISTILL = "slipstream.algorithms.distillation:reverse_kl"


def configure(*flags: str) -> Config:
    """Flags without "--" are options of `algorithm`."""
    full = [f if f.startswith("--") else f"--algorithm.{f}" for f in flags]
    return load_config(None, ["--model.path=m", "--environment.name=mine.py:Mine", *full])


def test_a_bare_name_is_a_table_without_options() -> None:
    rule = configure("loss=gspo", "corrections=opsm", "advantage.normalize=true").algorithm
    assert rule.loss == {"name": "gspo"} and rule.corrections == [{"name": "opsm"}]
    assert rule.advantage == {"name": "group_mean", "normalize": True}
    config = configure('corrections=["opsm", { name = "mask_lag", most = 2 }]', "loss.clip_high=0.28")
    rule = config.algorithm
    assert rule.corrections == [{"name": "opsm"}, {"name": "mask_lag", "most": 2}]
    assert rule.loss == {"name": "grpo", "clip_high": 0.28}
    assert configure("loss=gspo", "loss.clip_high=0.1").algorithm.loss == {"name": "gspo", "clip_high": 0.1}
    assert load_objective(config).loss.func is losses.grpo


def test_dump_round_trips() -> None:
    config = configure(
        'corrections=["opsm", { name = "mask_lag", most = 2 }]', "loss.clip_high=0.28", "reward_weights={a=1.0}"
    )
    assert validate(tomllib.loads(dump(config))) == config


@pytest.mark.parametrize("function", [*LOSSES, *ADVANTAGES], ids=lambda f: f.__name__)
def test_every_function_works_with_its_defaults(function: Any) -> None:
    option = "loss" if function in LOSSES else "advantage"
    assert getattr(load_objective(configure(f"{option}={function.__name__}")), option).func is function


@pytest.mark.parametrize("function", CORRECTIONS, ids=lambda f: f.__name__)
def test_every_correction_works_with_a_loss_of_its_kind(function: Any) -> None:
    loss = "reinforce" if function in IMPORTANCE else "grpo"
    rule = load_objective(configure(f"corrections={function.__name__}", f"loss={loss}"))
    assert rule.corrections[0].func is function


@pytest.mark.parametrize("function", AGGREGATIONS, ids=lambda f: f.__name__)
def test_every_aggregation(function: Any) -> None:
    more = ["aggregation.length=8"] if function.__name__ == "constant" else []
    assert load_objective(configure(f"aggregation.name={function.__name__}", *more)).aggregation.func is function


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["loss=gsp"],
            "algorithm.loss = \"gsp\" can't be loaded: no such function (did you mean gspo?); your own is 'module:",
        ),
        (["loss=xyzzy"], "no such function; there are grpo, ppo, gspo"),
        (["loss=dr_grpo"], 'dr_grpo is no single function here but algorithm.loss = "ppo" with algorithm.aggregation'),
        (["loss.name=ppo", "loss.clip_hi=0.3"], "ppo has no option clip_hi (did you mean clip_high?)"),
        (["loss.name=reinforce", "loss.clip_high=0.3"], "reinforce has no option clip_high; it takes none"),
        (["loss.clip_high=wide"], 'clip_high = "wide" of grpo must be a finite number'),
        (["loss.clip_high=true"], "clip_high = true of grpo must be a finite number"),
        (["loss.name=decoupled", "loss.approximate=1"], "approximate = 1 of decoupled must be true or false"),
        (
            ["loss.truncate=1.1"],
            "algorithm.loss: truncate = 1.1 is below 1 + clip_high = 1.2; raise it, or set it to 0",
        ),
        (["loss.name=ppo", "loss.clip_low=-0.1"], "ratios of 1 must be inside all bounds"),
        (["loss.name=cispo", "loss.high=0.5"], "ratios of 1 must be inside all bounds"),
        (
            ["corrections=truncate_tokens"],
            '"truncate_tokens" would count the ratio twice, since the loss "grpo" has one',
        ),
        (["corrections=opms"], "no such function (did you mean opsm?)"),
        (["corrections=[{ bound = 1 }]"], "algorithm.corrections has no name"),
        (['corrections=[{ name = "mask_tokens", low = 2.0 }]'], "mask_tokens rejects on-policy tokens"),
        (['advantage={ name = "pass_at_k", k = 2.5 }'], "k = 2.5 of pass_at_k must be a whole number"),
        (["aggregation=constant"], 'constant needs length; give { name = "constant", length = ... }'),
        (['aggregation={ name = "constant", length = -1 }'], "the weights are not above 0"),
        (["loss=math:sqrt"], "algorithm.loss failed on two tokens: TypeError"),
        (["loss=math:pi"], 'algorithm.loss = "math:pi" is not a function'),
        (["loss=torch:sum"], "is not a function in Python"),
        (
            [f"loss={DISTILL}"],
            "algorithm.loss: the tokens have no log-probabilities under a teacher; set teacher.path or teacher.lag",
        ),
        (["loss=nowhere:loss"], "can't be loaded: No module named 'nowhere'"),
    ],
)
def test_faults_are_one_line(flags: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_objective(configure(*flags))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


DOCS = Path(__file__).parents[1] / "docs" / "algorithms.md"


def blocks(language: str, page: Path = DOCS) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("text", blocks("toml"), ids=lambda t: t.splitlines()[0])
def test_the_documented_recipes_work(text: str) -> None:
    load_objective(validate(tomllib.loads(text) | {"model": {"path": "m"}, "environment": {"name": "addition"}}))


def test_every_function_is_documented() -> None:
    text = DOCS.read_text(encoding="utf-8")
    for function in (*LOSSES, *ADVANTAGES, *CORRECTIONS, *AGGREGATIONS):
        assert f"`{function.__name__}`" in text or f'"{function.__name__}"' in text, function
        for name in inspect.signature(function).parameters.values():
            assert name.kind is not name.KEYWORD_ONLY or name.name in text, (function, name)


WRONG = """
def summed(tokens):
    return tokens.logprobs.sum()

def constant(tokens):
    return tokens.advantages
"""


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["kl_coef=0.1"],
            "does not go with algorithm.kl_coef = 0.1, which trains tokens without an advantage, too",
        ),
        (
            ["normalize_advantages=true", "advantage=reward"],
            "does not go with algorithm.normalize_advantages = true where groups have no baseline",
        ),
        (
            [f"loss={DISTILL}", "--teacher.path=t"],
            'reverse_kl", which has a gradient even where the advantage is 0; set it to false',
        ),
    ],
)
def test_filter_zero_advantage_conflicts_with_gradients_without_advantage(flags: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_objective(configure("filter_zero_advantage=true", *flags))
    assert said in str(caught.value) and "\n" not in str(caught.value)


SAME = (1.0, 2, "stop"), (1.0, 2, "length")


@pytest.mark.parametrize(
    ("flags", "rewarded", "signal"),
    [
        ([], {}, False),
        (["normalize_advantages=true"], {}, False),
        (["advantage=reward"], {}, True),
        (["overlong=penalty"], {}, True),
        (["process_reward_coef=0.5"], {"steps": [2.0, 3.0]}, True),
        (["process_reward_coef=0.5"], {"steps": [2.0, 2.0]}, False),
        (["reward_weights={style = 1.0}"], {"style": [0.0, 1.0]}, True),
        (["reward_weights={style = 1.0}"], {"style": [1.0, 1.0]}, False),
    ],
)
def test_signal_depends_on_advantages(flags: list[str], rewarded: dict[str, list[float]], signal: bool) -> None:
    config = configure("filter_zero_advantage=true", *flags)
    made = group(*SAME, metrics=rewarded)
    steps = [((StepReward(1, value),),) for value in rewarded.get("steps", ())]
    rollouts = (dataclasses.replace(r, steps=s) for r, s in zip_longest(made.rollouts, steps, fillvalue=()))
    made = dataclasses.replace(made, rollouts=tuple(rollouts))
    assert has_signal(load_objective(config), config, made) is signal


def test_a_group_of_excluded_rollouts_has_no_signal() -> None:
    made = group((1.0, 2, "length"), (0.0, 2, "length"))
    for choice, signal in (("train", True), ("filter", False)):
        config = configure("filter_zero_advantage=true", f"overlong={choice}")
        assert has_signal(load_objective(config), config, made) is signal


def test_a_missing_reward_part_raises_instead_of_filtering_all_groups() -> None:
    config = configure("filter_zero_advantage=true", "reward_weights={style = 1.0}")
    assert has_signal(load_objective(config), config, group(*SAME), strict=True)
    assert not has_signal(load_objective(config), config, group(*SAME)), (
        "later it is filtered as one in which all is equal"
    )
    assert not any(build_batch(load_objective(config), config, [group(*SAME)], 0, strict=False).signal)


def test_custom_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (text,) = blocks("python")
    assert len(text.splitlines()) <= 10
    (tmp_path / "mine.py").write_text(text + WRONG)
    monkeypatch.chdir(tmp_path)
    rule = load_objective(configure("loss.name=mine.py:soft", "loss.strength=2.0", "corrections=truncate_tokens"))
    assert rule.loss.keywords == {"strength": 2.0}
    for name, said in (
        ("summed", "returned a tensor of shape [] for 2 of its inputs; it returns one finite number each"),
        ("constant", "do not depend on tokens.logprobs"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_objective(configure(f"loss=mine.py:{name}"))
        assert said in str(caught.value)


def test_custom_loss_with_rewards_and_teacher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (text,) = blocks("python", DOCS.with_name("scoring.md"))
    (tmp_path / "both.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    rule = load_objective(configure("loss=both.py:both", "loss.weight=0.5", "--teacher.lag=1"))
    drawn = [[-1.0, -2.0]]
    tokens = Case(drawn, drawn, [[1.0, 0.0]], [[0, 0]], drawn).tokens()
    rule.loss(dataclasses.replace(tokens, teacher=torch.tensor([-2.0, -3.0]))).sum().backward()
    assert tokens.logprobs.grad is not None
    assert tokens.logprobs.grad.tolist() == pytest.approx([-1 + 0.5, 0.5])


def group(*outcomes: tuple[float, int, str], metrics: dict[str, list[float]] | None = None) -> Group:
    """Rollouts by reward, length and finish reason."""
    rollouts = []
    for i, (reward, length, finish) in enumerate(outcomes):
        completion = Completion((1,), (2,) * length, (-1.0,) * length, (VersionSpan(0, 0, length),), finish)
        rollouts.append(Rollout((completion,), reward, {name: v[i] for name, v in (metrics or {}).items()}))
    return Group(0, "0", tuple(rollouts))


def test_advantages_are_by_member_for_any_group_size() -> None:
    config = configure()
    groups = [group(*((r, 1, "stop") for r in rewards)) for rewards in ([1, 0], [2, 2, 2], [0, 0, 3, 1])]
    batch = build_batch(load_objective(config), config, groups, 7)
    assert batch.advantages == ((0.5, -0.5), (0, 0, 0), (-1, -1, 2, 0)) and batch.version == 7


def test_overlong_rollouts_are_trained_on_penalized_or_excluded() -> None:
    made = group((1.0, 4, "stop"), (0.0, 8, "length"), (0.0, 7, "stop"))
    found = {}
    for choice in ("train", "filter", "penalty"):
        config = configure(f"overlong={choice}", *["overlong_buffer=4"] * (choice == "penalty"))
        config = config.model_copy(update={"sampling": config.sampling.model_copy(update={"max_tokens": 8})})
        (found[choice],) = build_batch(load_objective(config), config, [made], 0).advantages
    assert found["train"] == pytest.approx((2 / 3, -1 / 3, -1 / 3))
    assert found["filter"] == pytest.approx((2 / 3, float("nan"), -1 / 3), nan_ok=True)
    mean = (1 - 1 - 0.75) / 3
    assert found["penalty"] == pytest.approx((1 - mean, -1 - mean, -0.75 - mean))


def test_the_penalty_of_overlong_rollouts_rises_to_the_token_limit_of_their_environment() -> None:
    values = configure("overlong=penalty", "overlong_buffer=4").model_dump()
    short = {"name": "a", "sampling": {"max_tokens": 4}}
    config = validate(values | {"environment": {"name": ""}, "environments": [short, {"name": "b"}]})
    made = group((0.0, 4, "length"), (0.0, 2, "stop"))
    groups = [dataclasses.replace(made, environment=label) for label in ("a", "b")]
    first, second = build_batch(load_objective(config), config, groups, 0).advantages
    assert first == pytest.approx((-0.25, 0.25)) and second == pytest.approx((0.0, 0.0)), "of 4 and of 128 tokens"


def test_parts_of_the_reward_are_metrics() -> None:
    metrics = {"right": [1.0, 0.0], "short": [0.0, 100.0]}
    made = group((0.0, 1, "stop"), (0.0, 1, "stop"), metrics=metrics)
    config = configure("reward_weights={right = 1.0, short = 0.5}", "advantage.normalize=true")
    (found,) = build_batch(load_objective(config), config, [made], 0).advantages
    assert found == pytest.approx((0.5, -0.5))
    config = configure("reward_weights={right = 1.0, style = 0.5}")
    with pytest.raises(
        ValueError, match=r"no rollout of the step has the metric 'style', which algorithm\.reward_weights names"
    ):
        build_batch(load_objective(config), config, [made], 0)


def test_whitened_without_a_baseline_is_reinforce_plus_plus() -> None:
    config = configure("advantage=reward", "normalize_advantages=true")
    groups = [group((1.0, 1, "stop"), (0.0, 1, "stop")), group((4.0, 1, "stop"), (3.0, 1, "stop"))]
    batch = build_batch(load_objective(config), config, groups, 0)
    deviation = torch.tensor([1.0, 0.0, 4.0, 3.0]).std(correction=0).item()
    assert batch.advantages[0] == pytest.approx(((1 - 2) / deviation, (0 - 2) / deviation))
    assert json.dumps(batch.advantages)
