"""Runs whose episodes are played in worker processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.observe.run_data import load_run
from tests.e2e.test_runs import model, train  # noqa: F401

pytestmark = pytest.mark.e2e

FAULTY = """
import os, random, time
from slipstream.environments.base import Task

leaked = []

class Faulty:
    test = ()
    def __init__(self): self.train = [Task(str(n), f"{n}+1=") for n in range(40)]

    async def rollout(self, task, policy):
        completion = await policy.sample(task.prompt)
        chance = random.Random(policy._seed).random()
        if chance < 0.05: os._exit(3)
        if chance < 0.10:
            while True: pass
        if chance < 0.15: leaked.append(bytearray(b"x" * 30_000_000))
        return float(completion.token_ids[0] % 3)
"""


def test_a_synchronous_run_has_the_same_bits_with_workers_and_without(model: Path, tmp_path: Path) -> None:  # noqa: F811
    policies, records = [], []
    for workers in (0, 2):
        run = tmp_path / str(workers)
        train(model, run, loop__max_lag=0, environment__workers=workers)
        policies.append((run / "policy" / "model.safetensors").read_bytes())
        rows = [row for step in load_run(run).rollout_steps for row in load_run(run).rollouts(step)]
        records.append([(row["task_id"], row["completion"], row["reward"], row["advantage"]) for row in rows])
    assert policies[0] == policies[1] != (model / "model.safetensors").read_bytes()
    assert records[0] == records[1] != []


def test_a_run_survives_episodes_that_crash_block_and_leak(model: Path, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "faulty.py").write_text(FAULTY)
    summary = train(
        model, tmp_path / "run", environment__name=f"{tmp_path / 'faulty.py'}:Faulty", environment__options="{}",
        environment__workers=2, environment__worker_memory_gb=0.3, environment__rollout_retries=20,
        environment__max_failures=40, environment__timeout=10, loop__steps=4,
    )  # fmt: skip
    assert {*summary["failures"]} <= {"environment worker died", "blocked the event loop"} and summary["failures"]
    rows = [
        row for step in load_run(tmp_path / "run").rollout_steps for row in load_run(tmp_path / "run").rollouts(step)
    ]
    visits = [row["visit_id"] for row in rows]
    assert {visits.count(visit) for visit in visits} == {4}, "a group lost a rollout"
