"""Warnings of groups without signal, and of one of several policies that episodes do not ask."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.config.loading import load_config
from slipstream.controller.rollouts import FILTERED_STEPS, UNASKED_STEPS, end_group, note_failure, take_groups
from slipstream.environments.episode import RolloutFailed
from slipstream.errors import RunError
from slipstream.rollout import Completion, Group, Rollout, VersionSpan
from slipstream.scheduling.loop_state import LoopState

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


def test_the_first_failed_rollout_is_told_of_with_its_place() -> None:
    warnings: list[str] = []
    ledger = SimpleNamespace(running_tasks=lambda environment: set())
    streak = SimpleNamespace(failed=lambda task, running: False)
    run: Any = SimpleNamespace(
        cluster=SimpleNamespace(generator=SimpleNamespace(dead=None)),
        scoring=None,
        warned_of_failure=False,
        state=SimpleNamespace(ledger=ledger),
        environments=[SimpleNamespace(failure_streak=streak)],
        progress=SimpleNamespace(warn=warnings.append),
    )
    failure = RolloutFailed("KeyError", 'task t:\n  File "mine.py", line 7, in rollout\n    x["a"]\nKeyError: \'a\'')
    for _ in range(3):
        note_failure(run, SimpleNamespace(environment=0, task=0), failure)  # type: ignore[arg-type]
    [said] = warnings
    assert said.startswith("a rollout failed: KeyError: 'a' (mine.py:7); ")


def test_a_policy_may_be_asked_after_the_first_step() -> None:
    config = load_config(None, ["--model.path=m", "--environment.name=addition", "--loop.groups_per_step=1"])
    warnings: list[str] = []

    def take(rare_in: int) -> None:
        """The batches of the first steps, with a rollout of "rare" in one of them."""
        state = LoopState(config.loop, 1, [], ["often", "rare"])
        state.ledger.trained = lambda visit_id: None  # type: ignore[method-assign]
        run: Any = SimpleNamespace(state=state, progress=SimpleNamespace(warn=warnings.append))
        for step in range(UNASKED_STEPS + 1):
            policy = "rare" if step == rare_in else "often"
            completion = Completion((5,), (6,), (-1.0,), (VersionSpan(step, 0, 1),), "stop", policy=policy)
            state.ready, state.step = [Group(step, "t", (Rollout((completion,), 1.0),))], step
            assert len(take_groups(run)) == 1
            state.stage()

    take(rare_in=UNASKED_STEPS - 1)
    assert warnings == [
        'policy["rare"] has no rollout in the first step; the run ends if it has none in 10 steps: ask it in the '
        "environment, or remove it from [[policies]]"
    ]
    with pytest.raises(RunError, match=r'policy\["rare"\] has no rollout in the first 10 steps: ask it in the'):
        take(rare_in=UNASKED_STEPS)
