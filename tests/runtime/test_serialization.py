"""The state of a checkpoint survives serialization."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.rollout import Completion, Group, Rollout, StepReward, VersionSpan, float32_array, int32_array
from slipstream.runtime.run_directory import read_ready, write_state


def group(visit_id: int) -> Group:
    tokens, logprobs = int32_array([7, 2**31 - 1, 0]), float32_array([-0.1, -1e-30, 0.0])
    spans = (VersionSpan(2, 0, 1), VersionSpan(3, 1, 3))
    experts = np.arange(8, dtype=np.uint8).reshape(4, 1, 2)
    kept = (None, [1, 2], np.array([3], dtype=np.int32))
    completion = Completion(int32_array([5, 6]), tokens, logprobs, spans, "stop", 0.7, "text \u00e9", kept, experts)
    steps = ((StepReward(2, 0.5),),)
    return Group(visit_id, "task", (Rollout((completion,), 0.25, {"correct": 1.0}, steps, (logprobs,), "solver"),))


def read(checkpoint: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((checkpoint / "run.json").read_text())
    return state


def test_ready_groups_are_restored_unchanged(tmp_path: Path) -> None:
    write_state(tmp_path, {"step": 4}, [group(1), group(2)])
    known = read(tmp_path)
    first, second = read_ready(tmp_path, known)
    assert known["step"] == 4 and (first.visit_id, second.visit_id) == (1, 2)
    for found in (first, second):
        (rollout,), (wanted,) = found.rollouts, group(1).rollouts
        (completion,), (drawn,) = rollout.completions, wanted.completions
        assert (completion.token_ids, completion.logprobs, completion.spans) == (
            drawn.token_ids, drawn.logprobs, drawn.spans
        )  # fmt: skip
        assert completion.experts.dtype == np.uint8 and (completion.experts == drawn.experts).all()
        assert [None if k is None else list(k) for k in completion.sampling_mask] == [None, [1, 2], [3]]
        assert (rollout.steps, rollout.teacher, rollout.role) == (wanted.steps, wanted.teacher, wanted.role)


def test_a_kill_during_the_update_of_a_checkpoint_leaves_it_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups and ledger are replaced together: else entries would be trained on twice, or never."""
    write_state(tmp_path, {"step": 4}, [group(1)])

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("slipstream.runtime.run_directory.write_json", killed)
        with pytest.raises(KeyboardInterrupt):
            write_state(tmp_path, {"step": 4}, [group(1), group(2)])
    assert [g.visit_id for g in read_ready(tmp_path, read(tmp_path))] == [1]
    write_state(tmp_path, {"step": 4}, [group(3)])
    assert [g.visit_id for g in read_ready(tmp_path, read(tmp_path))] == [3]
    assert len(list(tmp_path.iterdir())) == 2
