"""Health rules: each warns of its trouble once, names a remedy, and is silent on a healthy run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from slipstream import ConfigError, load_config, load_run
from slipstream.config.loading import option_names
from slipstream.config.schema import HealthRule
from slipstream.controller.run_context import RunContext
from slipstream.observe.events import EventLog
from slipstream.observe.health import RULES, Health, HealthWarning, check
from tests.test_records import ROOT

CONFIG = {"loop": {"max_lag": 2, "steps": 1000}, "trainer": {"gradient_clip": 1.0}}
Values = dict[str, Any]


def healthy(step: int) -> Values:
    """The record of a step: busy on both sides, learning slowly, with some noise."""
    noise = 0.02 * ((step * 7919) % 11 - 5) / 5
    return {
        "step": step, "time/wall_s": 1.0 * step, "time/window_s": 1.0 * step, "time/step_s": 0.8,
        "time/batch_wait_s": 0.2, "reward/mean": 0.3 + 0.001 * step + noise, "reward/std": 0.45,
        "reward/frac_groups_with_signal": 0.8, "completions/mean_length": 200.0, "completions/clipped_ratio": 0.1,
        "completions/identical_fraction": 0.05, "lag/mean": 1.9, "lag/max": 2, "policy/entropy": 0.5 + noise,
        "policy/mismatch_kl": 0.01, "policy/ratio_mean": 1.0, "policy/effective_sample_size": 0.9,
        "train/grad_norm": 2.0 + 10 * noise, "train/skipped_steps": 0, "gen/busy_s": 0.9 * step,
        "engines/alive": 2, "engines/total": 2, "engines/lost": 0, "engines/tokens/0": 900 * step,
        "engines/tokens/1": 850 * step, "engines/busy_s/0": 0.9 * step, "engines/busy_s/1": 0.9 * step,
        "rollout/generated": 64 * step, "rollout/trained": 64 * step, "rollout/filtered": 0,
        "rollout/dropped_stale": 0, "rollout/reward_s": 0.01, "disk/free_gb": 100.0, "checkpoint/size_gb": None,
        "memory/controller_gb": 1.0 + 0.2 * min(step, 40) / 40, "memory/trainer_gb": 4.0,
    }  # fmt: skip


# The rule, and what differs from a healthy record at a step.
TROUBLE: dict[str, Callable[[int], Values]] = {
    "entropy-collapse": lambda s: {"policy/entropy": 0.5 if s < 50 else 0.02, "reward/mean": 0.3},
    "reward-collapse": lambda s: {"reward/mean": 0.6 if s < 100 else 0.2},
    "large-updates": lambda s: {"policy/mismatch_kl": 1.0 if 2 <= s <= 4 else 0.01},
    "mismatch": lambda s: {"policy/mismatch_kl": 0.01 if s < 50 else 0.4},
    "sample-size": lambda s: {"policy/effective_sample_size": 0.1},
    "no-signal": lambda s: {"reward/frac_groups_with_signal": 0.05},
    "lag-bound": lambda s: {"rollout/dropped_stale": 20 * s},
    "trainer-idle": lambda s: {"time/batch_wait_s": 2.0},
    "engines-idle": lambda s: {"gen/busy_s": 0.1 * s},
    "slow-rewards": lambda s: {"time/batch_wait_s": 2.0, "gen/busy_s": 0.1 * s, "rollout/reward_s": 1.5},
    "engine-lost": lambda s: {"engines/alive": 1, "engines/lost": 1} if s >= 60 else {},
    "engine-slow": lambda s: {"engines/tokens/1": 300 * s},
    "completions-cut": lambda s: {"completions/clipped_ratio": 0.7},
    "identical-completions": lambda s: {"completions/identical_fraction": 0.8},
    "gradient-spikes": lambda s: {"train/grad_norm": 80.0 if s in (60, 63) else 2.0},
    "nonfinite-steps": lambda s: {"train/skipped_steps": int(s >= 70)},
    "disk-full": lambda s: {"disk/free_gb": 8.0, "checkpoint/size_gb": 5.0},
    "memory-grows": lambda s: {"memory/reward_worker_gb": 1.0 + 0.02 * s},
}
REWARD_RISES = [{"step": 0, "eval/score": 0.5, "eval/tasks": 200}, {"step": 90, "eval/score": 0.3, "eval/tasks": 200}]


def warnings_of(change: Callable[[int], Values], steps: int = 250, evaluations: Any = (), **more: Any) -> list[Any]:
    health = Health(CONFIG | more.pop("config", {}), **more)
    return [w for s in range(1, steps + 1) for w in health.step(healthy(s) | change(s), evaluations)]


def test_a_healthy_run_is_silent() -> None:
    assert warnings_of(lambda step: {}) == []
    synchronous = {"loop": {"max_lag": 0}}
    assert warnings_of(lambda step: {}, config=synchronous) == []
    assert warnings_of(TROUBLE["lag-bound"], config=synchronous) == [], "dropped before a resume without lag"
    for rule in ("trainer-idle", "engines-idle"):
        assert warnings_of(TROUBLE[rule], config={"loop": {"max_lag": 2}, "sync": {"placement": "colocated"}}) == []


@pytest.mark.parametrize("rule", TROUBLE)
def test_a_rule_warns_once_of_its_trouble_alone(rule: str) -> None:
    found = warnings_of(TROUBLE[rule])
    assert [w.rule for w in found] == [rule]
    assert " nan" not in found[0].text and re.search(r"\d", found[0].text), "figures are named"


def test_steps_without_a_gradient_do_not_make_the_others_spikes() -> None:
    """Groups of equal rewards have gradients of 0."""
    assert warnings_of(lambda step: {} if step % 4 == 0 else {"train/grad_norm": 0.0}) == []


def test_rewards_of_a_function_that_raises_get_another_remedy() -> None:
    changed = {"reward/frac_groups_with_signal": 0.05, "rollout/generated": 100}
    for errors, remedy in ({"KeyError": 60}, "Mend the reward function"), ({"KeyError": 40}, "Give tasks that"):
        found = warnings_of(lambda s, errors=errors: changed | {"reward/errors": errors}, steps=20)  # type: ignore[misc]
        assert [w.rule for w in found] == ["no-signal"] and found[0].remedy.startswith(remedy)


def test_sides_that_both_wait_get_no_contradicting_advice() -> None:
    """With slow tools, or after restarts, neither is slower than the other."""
    (warning,) = warnings_of(lambda s: {"time/batch_wait_s": 2.0, "gen/busy_s": 0.1 * s})
    assert warning.rule == "trainer-idle" and warning.remedy.startswith("Raise loop.max_lag (now 2")


def test_the_score_falls_while_the_reward_rises() -> None:
    rises = {"reward/mean": 0.9}
    assert [w.rule for w in warnings_of(lambda s: rises if s > 20 else {}, evaluations=REWARD_RISES)] == ["score-falls"]
    shorter = {"env/correct": 0.02, "env/format": 0.9, "completions/mean_length": 90.0}
    start = {"env/correct": 0.4, "env/format": 0.9}
    by = {0: start, 1: start | shorter, 2: rises | shorter}
    (warning,) = warnings_of(lambda s: by[min(2, s // 20)], evaluations=REWARD_RISES)
    assert warning.text.endswith(
        "; env/correct went from 0.40 to 0.02; completions/mean_length went from 200.00 to 90.00"
    ), "what changed with the reward"
    assert warnings_of(lambda s: {}, steps=60, evaluations=REWARD_RISES) == [], "both are flat: chance"
    few = [e | {"eval/tasks": 10} for e in REWARD_RISES]
    assert warnings_of(lambda s: rises if s > 20 else {}, evaluations=few) == [], "within the error of ten tasks"


def test_answers_that_never_change_tell_of_stale_weights() -> None:
    def evaluations(last: str) -> list[Values]:
        answers = [{"samples": [{"id": str(i), "completion": a} for i in range(30)]} for a in ("1", last)]
        return [answers[0] | {"step": 0, "versions": [0, 0]}, answers[1] | {"step": 9, "versions": [8, 9]}]

    drifts = {"policy/mismatch_kl": 0.1}
    (warning,) = warnings_of(lambda s: drifts, evaluations=evaluations("1"))
    assert warning.rule == "stale-weights" and "after 8 publishes all 30 held-out answers are identical" in warning.text
    own = {"generator": {"engine": "mine.py:Engine"}, "sync": {"verify": "off", "link": "shared_memory"}}
    (warning,) = warnings_of(lambda s: drifts, evaluations=evaluations("1"), config=own)
    assert 'generator.engine (now "mine.py:Engine", default "torch")' in warning.remedy
    assert 'sync.verify (now "off", default "sampled") to "full"' in warning.remedy
    assert "sync.link" not in warning.remedy, "a link of the package"
    assert warnings_of(lambda s: drifts, evaluations=evaluations("2")) == []
    assert warnings_of(lambda s: {}, evaluations=evaluations("1")) == [], "a low learning rate changes no answer, too"
    sampled = {"evaluation": {"temperature": 1.0}}
    assert warnings_of(lambda s: drifts, evaluations=evaluations("1"), config=sampled) == []


def test_a_solved_task_has_no_entropy_and_is_healthy() -> None:
    def solved(step: int) -> Values:
        done = min(1.0, step / 100)
        return {"reward/mean": 0.3 + 0.7 * done, "policy/entropy": 0.5 - 0.49 * done, "reward/std": 0.46 * (1 - done)}

    assert warnings_of(solved) == []
    almost = {"reward/mean": 0.97, "reward/std": 0.17}  # from the start
    assert warnings_of(lambda s: almost if s < 50 else solved(200)) == []


def test_short_completions_may_be_identical() -> None:
    short = {"completions/identical_fraction": 0.8, "completions/mean_length": 4.0, "policy/entropy": 0.3}
    assert warnings_of(lambda step: short) == []
    unlikely = short | {"policy/entropy": 2.0}
    assert [w.rule for w in warnings_of(lambda step: unlikely)] == ["identical-completions"]


def test_slow_rewards_name_one_option() -> None:
    def scoring(mean_s: float, wait_s: float) -> Any:
        slow = {"time/batch_wait_s": 0.8, "gen/busy_s": 0.0, "rollout/reward_s": mean_s + wait_s}
        more = {"scoring/mean_s": mean_s, "scoring/mean_wait_s": wait_s, "scoring/in_flight": 64}
        (warning,) = warnings_of(lambda s: slow | more, config={"scoring": {"concurrency": 64}})
        return warning

    queued = scoring(0.3, 2.6)
    assert "(0.3 s scoring + 2.6 s queued, 64 of 64 slots busy); in the last 20 steps, the trainer" in queued.text
    assert "waited 80% of the time" in queued.text
    # 64 rollouts a step of 1 s, in 80% of which both sides wait: 320 rollouts/s of 0.3 s, rounded up.
    needed = "97: trainer and engines can process 320 rollouts/s"
    assert queued.remedy == f"Raise scoring.concurrency (now 64, the default) to {needed}. Or use a faster scorer"
    assert scoring(2.6, 0.3).remedy == "Use a faster scorer"


def test_rewards_at_the_bound_are_one_warning() -> None:
    waits = {"time/batch_wait_s": 0.8, "gen/busy_s": 0.0}
    near = [w.rule for w in warnings_of(lambda s: waits | {"rollout/reward_s": 0.27 if s // 40 % 2 == 0 else 0.22})]
    assert near.count("slow-rewards") == 1


def test_collapses_begin_at_the_values_of_the_start() -> None:
    def soon(step: int) -> Values:
        return {"policy/entropy": 0.7, "reward/mean": 0.9} if step < 4 else {"policy/entropy": 0.0, "reward/mean": 0.0}

    texts = {w.rule: w.text for w in warnings_of(soon)}
    assert texts["entropy-collapse"] == "entropy fell from 0.7 to 0 nats, while the mean reward changed by -0.9"
    assert texts["reward-collapse"] == "the mean reward fell from 0.9 at its best to 0"


def test_a_remedy_shows_values() -> None:
    config = {"trainer": {"learning_rate": 0.02, "warmup_steps": 0}}
    (warning,) = warnings_of(TROUBLE["large-updates"], config=config)
    assert warning.step == 3 and warning.text.startswith("updates are too large: mismatch KL 0.67 nats")
    rate = load_config(None, ["--model.path=m", "--environment.name=addition"]).trainer.learning_rate
    assert f"trainer.learning_rate (now 0.02, default {rate})" in warning.remedy
    assert "trainer.warmup_steps (now 0, the default)" in warning.remedy


def test_a_rule_warns_again_only_after_it_recovered() -> None:
    def ratio(*levels: float) -> Callable[[int], Values]:
        return lambda s: {"completions/clipped_ratio": levels[min(len(levels) - 1, s // 50)]}

    def steps(change: Callable[[int], Values]) -> list[int]:
        return [w.step for w in warnings_of(change)]

    assert len(steps(ratio(0.7, 0.45, 0.7))) == 1, "0.45 is between the bounds"
    first, second = steps(ratio(0.7, 0.2, 0.7))
    assert first < 50 and 100 < second < 150
    assert steps(lambda s: {"completions/clipped_ratio": 0.7 if s % 20 < 5 else 0.1}) == [], "never for long"


def test_engines_that_are_started_count_as_lost_after_three_minutes() -> None:
    def down(seconds: int) -> Callable[[int], Values]:
        return lambda s: {"engines/alive": 1 if 50 <= s < 50 + seconds else 2}

    assert warnings_of(down(170)) == []
    (warning,) = warnings_of(down(200))
    assert "1 of 2 engines serve: for 180 s" in warning.text


@pytest.mark.parametrize("missing", [(), (None,), (float("nan"),)])
def test_missing_values_are_no_trouble(missing: Any) -> None:
    health = Health(CONFIG)
    for step in range(1, 60):
        assert health.step({"step": step} | {k: m for k in healthy(1) if k != "step" for m in missing}) == []


def test_ignored_rules_are_silent() -> None:
    assert warnings_of(TROUBLE["completions-cut"], ignore=["completions-cut"]) == []


def test_a_run_is_checked_afterwards(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[loop]\nmax_lag = 2\n")
    lines = [json.dumps(healthy(s) | TROUBLE["engine-lost"](s)) for s in range(1, 100)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 100, "rew')
    (warning,) = check(load_run(tmp_path))
    assert warning.step == 60 and "generator.max_restarts" in str(warning) and "slipstream scale" in str(warning)
    (tmp_path / "metrics.jsonl").write_text("")
    assert check(load_run(tmp_path)) == []


def test_a_warning_is_shown_and_recorded(tmp_path: Path) -> None:
    shown: list[str] = []
    log = EventLog(tmp_path / "events.jsonl", clock=lambda: 5.0)
    run: Any = SimpleNamespace(progress=SimpleNamespace(warn=shown.append), events=log)
    RunContext.warn(run, HealthWarning("no-signal", 7, "90% of the groups", "Raise loop.group_size"))
    log.write()
    (tmp_path / "config.toml").write_text("")
    (event,) = load_run(tmp_path).events
    assert shown == ["90% of the groups. Raise loop.group_size (no-signal)"]
    assert event == {
        "kind": "warning", "track": "controller", "start": 0.0, "end": None, "rule": "no-signal", "step": 7,
        "text": "90% of the groups", "remedy": "Raise loop.group_size",
    }  # fmt: skip


def test_names_are_options_and_remedies_name_options_that_exist() -> None:
    assert [rule.name for rule in RULES] == list(get_args(HealthRule))
    assert {*TROUBLE, "score-falls", "stale-weights"} == set(get_args(HealthRule)), "each rule is tested"
    sections = "|".join({name.partition(".")[0] for name in option_names()})
    for rule in RULES:
        named = re.findall(rf"\b(?:{sections})\.[a-z_]+", rule.remedy)
        assert set(named) <= set(option_names()) and (named or "slipstream" in rule.remedy or "host" in rule.remedy)
        assert rule.ends <= rule.begins


def test_the_page_lists_each_rule() -> None:
    page = (ROOT / "docs" / "seeing-a-run.md").read_text().partition("## Health rules")[2]
    assert re.findall(r"^\| `([a-z-]+)` \|", page, re.M) == list(get_args(HealthRule))


def test_an_unknown_rule_is_refused() -> None:
    needed = ["--model.path=m", "--environment.name=addition"]
    with pytest.raises(ConfigError, match=r"observe\.ignore\.0 = \"entropy\": it must be 'engine-lost'"):
        load_config(None, [*needed, '--observe.ignore=["entropy"]'])
    assert load_config(None, [*needed, '--observe.ignore=["no-signal"]']).observe.ignore == ["no-signal"]
