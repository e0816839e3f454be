"""Passes over made-up tokens, which compile code before the first step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slipstream.config.trainer import TrainerConfig
from slipstream.model.policy import PackedPolicy
from slipstream.trainers.parallel import TrainerRanks
from slipstream.trainers.warm_up import warm_up
from tests.conftest import save_model
from tests.families import FAMILIES
from tests.trainers.test_trainer import make_trainer, random_batch

CPU = torch.device("cpu")
LORA = ("--lora.rank=2", "--lora.dropout=0.3", "--algorithm.kl_coef=0.1")


@pytest.mark.parametrize("flags", [(), LORA], ids=["all weights", "adapters with dropout"])
def test_a_warm_up_changes_no_step(tmp_path: Path, flags: tuple[str, ...]) -> None:
    save_model(tmp_path, vocab_size=40)
    cold, warm = make_trainer(tmp_path, *flags), make_trainer(tmp_path, *flags)
    warm.warm_up()
    assert all(parameter.grad is None for parameter in warm.parameters.values())
    for seed in range(2):
        expected, found = cold.step(random_batch(seed=seed)), warm.step(random_batch(seed=seed))
        assert (found.loss, found.grad_norm, found.step) == (expected.loss, expected.grad_norm, expected.step)
    assert all(torch.equal(warm.parameters[name], wanted) for name, wanted in cold.parameters.items())


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_can_be_warmed_up(tmp_path: Path, name: str) -> None:
    """Routed experts, recurrent states, biased heads: made-up tokens are tokens as any."""
    model = FAMILIES[name].build()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    warm_up(PackedPolicy(model), TrainerRanks(TrainerConfig(), CPU), CPU, 512)
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    assert not any(p.grad is not None and p.grad.any() for p in model.parameters())
