"""Scoring in whole runs, configured by `[scoring]` and `[teacher]` for any environment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from slipstream.runtime.serialization import read_lines
from tests.e2e.test_runs import lines, model, slipstream, train  # noqa: F401

pytestmark = pytest.mark.e2e
SCORER = """
from slipstream.environments.base import Task

class Silent:
    train = test = [Task(str(i), f"w{i} w7") for i in range(1, 20)]

    async def rollout(self, task, policy):
        await policy.sample(task.prompt)

def score(task, rollout):
    (completion,) = rollout.completions
    if sum(completion.token_ids) % 11 == 0:
        raise KeyError("no answer")
    odd = [float(t % 2) for t in completion.token_ids]
    return {"reward": sum(odd), "parts": {"length": len(odd)}, "tokens": [odd]}
"""


def test_a_run_may_be_resumed_with_a_new_teacher(model: Path, tmp_path: Path) -> None:  # noqa: F811
    """Groups of the restored buffer have no teacher log-probabilities, which the loss needs."""
    directory = tmp_path / "run"
    summary = train(model, directory, loop__max_lag=3, loop__force_max_lag="true", loop__steps=40, loop__max_tokens=150)
    ready = read_lines(max((directory / "checkpoints").glob("*/ready_*.jsonl")))
    assert ready and not any(rollout.teacher for group in ready for rollout in group.rollouts)
    distill = "--algorithm.loss=slipstream.algorithms.distillation:reverse_kl"
    more = (
        f"--loop.steps={summary['steps'] + 5}",
        "--loop.max_tokens=0",
        f"--teacher.path={model}",
        "--teacher.threads=1",
    )
    slipstream("train", "--resume", directory, distill, *more)
    rows = pq.read_table(directory / "rollouts").to_pylist()
    assert all(len(row["teacher"]) == len(row["logprobs"]) for row in rows if row["step"] > summary["steps"])


def test_a_function_scores_and_an_earlier_policy_version_is_the_teacher(model: Path, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "mine.py").write_text(SCORER)
    mine: dict[str, Any] = {
        "environment__name": f"{tmp_path / 'mine.py'}:Silent", "environment__options": "{}",
        "scoring__kind": f"{tmp_path / 'mine.py'}:score", "scoring__weights": "{ score = 1, length = -0.5 }",
        "teacher__lag": 2, "teacher__threads": 1,
    }  # fmt: skip
    directory = tmp_path / "run"
    summary = train(model, directory, **mine)
    records = lines(directory / "metrics.jsonl")
    assert sum(line["scoring/scored"] for line in records) >= 72 and not summary["failures"]
    for line in records:
        names = {f"scoring/{name}" for name in ("scored", "in_flight", "queued", "mean_s", "mean_wait_s", "retries")}
        assert names <= line.keys()
    rows = pq.read_table(directory / "rollouts").to_pylist()
    gaps = set()
    for row in rows:
        if sum(row["completion_ids"]) % 11 == 0:  # the function raised
            assert row["reward"] == 0.0
            continue
        odd = [t % 2 for t in row["completion_ids"]]
        assert row["reward"] == sum(odd) - 0.5 * len(odd)
        assert {"score": sum(odd), "length": len(odd)}.items() <= dict(row["metrics"]).items()
        assert row["steps"] == [{"end": i, "reward": r} for i, r in enumerate(odd)]
        gaps |= {abs(b - t) > 1e-4 for b, t in zip(row["logprobs"], row["teacher"], strict=True)}
    assert gaps == {True, False}  # the first rollouts are the teacher's own, later ones are not
    assert [p.name for p in sorted((directory / "teacher").iterdir())] == [f"version_{v:06d}" for v in (4, 5, 6)]

    slipstream("train", "--resume", directory, "--loop.steps=7", "--checkpoint.every=1")
    assert json.loads((directory / "summary.json").read_text())["steps"] == 7
    slipstream("eval", directory)  # which needs the scorer, too
