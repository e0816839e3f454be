"""The records of steps."""

from __future__ import annotations

from dataclasses import fields

import pytest

from slipstream.controller.metrics import trainer_metrics
from slipstream.step_stats import StepStats


@pytest.mark.parametrize(("packed", "rate"), [(0, None), (150, 50.0)])
def test_a_step_without_a_pass_has_no_rate(packed: int, rate: float | None) -> None:
    """All advantages were 0, so the trainer skipped it."""
    zeros = {each.name: 0 for each in fields(StepStats) if each.name != "policies"}
    stats = StepStats(**zeros | {"tokens": 100, "seconds": 2.0, "packed_tokens": packed})
    assert trainer_metrics(stats)["train/tokens_per_s"] == rate
