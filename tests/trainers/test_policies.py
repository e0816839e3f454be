"""Several policies in one trainer: each takes steps on its own rollouts, over one base model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from slipstream.config.loading import validate
from slipstream.config.schema import Config
from slipstream.rollout import Batch, Completion, Group, Rollout, VersionSpan
from slipstream.trainers.policies import PolicyTrainers

POLICIES = ("a", "b")


def configured(tiny: Path) -> Config:
    policies = [{"name": name, "learning_rate": rate} for name, rate in zip(POLICIES, (0.1, 0.2), strict=True)]
    model, environment = {"path": str(tiny)}, {"name": "addition"}
    return validate({"model": model, "environment": environment, "lora": {"rank": 2}, "policies": policies})


def batch(*policies: str) -> Batch:
    """A group of two rollouts of each policy, with opposite advantages."""
    groups = []
    for number, policy in enumerate(policies):
        rollouts = [Rollout((Completion(
            (5, 6), tokens, (-1.0, -2.0), (VersionSpan(0, 0, 2),), "length", policy=policy),), reward, role=policy)
            for tokens, reward in (((7, 8), 1.0), ((9, 10), 0.0))]  # fmt: skip
        groups.append(Group(number, str(number), tuple(rollouts)))
    return Batch(tuple(groups), ((0.5, -0.5),) * len(groups))


def values(trainers: PolicyTrainers) -> dict[str, Any]:
    return {name: parameter.detach().clone() for name, parameter in trainers.parameters.items()}


def changed(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    """The policies with an adapter that differs."""
    names = {name for name in before if not torch.equal(before[name], after[name])}
    return {policy for policy in POLICIES if any(f".policy-{policy}." in name for name in names)}


def test_a_step_trains_the_policies_that_have_rollouts_in_it(tiny: Path) -> None:
    trainers = PolicyTrainers(configured(tiny))
    start = values(trainers)
    stats = trainers.step(batch("b"))
    assert changed(start, values(trainers)) == {"b"} and set(stats.policies) == {"b"}
    stats = trainers.step(batch("a", "b"))
    assert changed(start, values(trainers)) == {"a", "b"}
    assert {name: (each.step, each.learning_rate) for name, each in stats.policies.items()} == {
        "a": (1, 0.1), "b": (2, 0.2 * 0.99),
    }  # fmt: skip
    assert (stats.tokens, stats.step, stats.learning_rate) == (8, 2, (0.1 + 0.2 * 0.99) / 2)


def test_counters_include_the_policies_without_rollouts_in_a_step(tiny: Path) -> None:
    trainers = PolicyTrainers(configured(tiny))
    trainers._trainers["b"].skipped_count, trainers._trainers["b"].step_count = 3, 5
    stats = trainers.step(batch("a"))
    assert (stats.skipped_steps, stats.step, stats.policies["a"].step) == (3, 5, 1)


def test_policies_share_the_base_and_start_from_the_seed(tiny: Path) -> None:
    torch.manual_seed(1)
    first = PolicyTrainers(configured(tiny))
    torch.manual_seed(2)
    assert not changed(values(first), values(PolicyTrainers(configured(tiny)))), "the seed of the run sets the adapters"
    models = [trainer.model for trainer in first._trainers.values()]
    bases = [{p.data_ptr() for p in model.parameters() if not p.requires_grad} for model in models]
    assert bases[0] == bases[1] and len(bases[0]) > 10


def test_a_checkpoint_holds_all_policies(tiny: Path, tmp_path: Path) -> None:
    trainers = PolicyTrainers(configured(tiny))
    trainers.step(batch("a", "b"))
    trainers.save(tmp_path).result()
    saved = values(trainers)
    trainers.step(batch("a", "b"))
    continued = values(trainers)
    again = PolicyTrainers(configured(tiny))
    again.restore(tmp_path)
    assert not changed(saved, values(again))
    again.step(batch("a", "b"))
    assert not changed(continued, values(again)), "moments and counts are restored, too"
