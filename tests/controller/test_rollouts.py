"""The end of a group: the warning that many groups in a row had no signal."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.config.loading import load_config
from slipstream.controller.rollouts import FILTERED_STEPS, end_group

DEFAULT = FILTERED_STEPS * 8  # groups of 20 steps


class NoSignal:
    """A loop state in which no group has signal."""

    step = 1
    filtered_in_a_row = 0

    def end(self, *_: Any, max_filtered_in_a_row: int, **__: Any) -> str:
        if self.filtered_in_a_row == max_filtered_in_a_row:
            return "ready"
        self.filtered_in_a_row += 1
        return "filtered"


@pytest.mark.parametrize(("option", "after"), [(0, DEFAULT), (2, 2), (DEFAULT + 40, DEFAULT)])
def test_groups_without_signal_are_warned_of_once_at_the_limit_or_after_20_steps(option: int, after: int) -> None:
    flags = ["--algorithm.filter_zero_advantage=true", f"--algorithm.max_filtered_in_a_row={option}"]
    config = load_config(None, ["--model.path=m", "--environment.name=addition", *flags])
    warnings: list[str] = []
    environments = [SimpleNamespace(loaded=SimpleNamespace(id_of=lambda task: task.id))]
    run: Any = SimpleNamespace(
        config=config, state=NoSignal(), progress=SimpleNamespace(warn=warnings.append),
        events=SimpleNamespace(group=lambda *_: None), environments=environments,
    )  # fmt: skip
    visit, task = SimpleNamespace(id=0, task=0, environment=0), SimpleNamespace(id="t")
    for _ in range(after - 1):
        end_group(run, visit, task, (), 0.0)  # type: ignore[arg-type]
    assert not warnings
    for _ in range(2 * DEFAULT):
        end_group(run, visit, task, (), 0.0)  # type: ignore[arg-type]
    [said] = warnings
    assert said.startswith(f"the last {after} groups had advantages of 0 and were replaced; after ")
    assert f"algorithm.max_filtered_in_a_row = {option or DEFAULT} in a row they are trained on as they are" in said
