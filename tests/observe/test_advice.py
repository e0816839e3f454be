"""The advice for a run from its records."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from slipstream.observe import advice
from slipstream.observe.advice import advice_in_process, advise, describe_advice
from slipstream.observe.run_data import load_run
from tests.plan.test_calibration import records


def run(path: Path, *, decode: float, train: float, lag: int) -> Any:
    """A run whose completions of 100 tokens take `decode` seconds, 8 at once, and whose steps take `train`."""
    path.mkdir()
    (path / "config.toml").write_text(
        '[model]\npath = "0.6B"\n[environment]\nname = "addition"\n'
        f"[loop]\ngroups_per_step = 4\ngroup_size = 2\nmax_lag = {lag}\n[generator]\nmax_num_seqs = 8\n"
    )
    metrics, _ = records(30)
    events, length = [], max(decode, train) if lag else decode + train
    for step, record in enumerate(metrics):
        now = record["time/wall_s"] = record["time/window_s"] = (step + 1) * length
        record |= {
            "time/step_s": train,
            "time/batch_wait_s": length - train,
            "train/tokens": 800,
            "train/packed_tokens": 800,
        }
        record |= {"train/busy_s": now * train / length, "gen/busy_s": now * decode / length}
        rows = [["engine 0", now - decode, now, 100, 0, 0, 1.0, None, i] for i in range(8)]
        events.append({"kind": "group", "track": "controller", "start": now, "end": now, "rollouts": rows})
    for name, lines in (("metrics", metrics), ("events", events)):
        (path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return load_run(path)


def test_slow_generation_is_answered_by_an_engine(tmp_path: Path) -> None:
    found = advise(run(tmp_path / "run", decode=2.0, train=0.7, lag=1))
    assert found is not None
    assert found.change == "generator.replicas = 2"
    assert found.gain > 1.3
    assert "trainer idle 65%: generator.replicas = 2 would train" in str(found)


def test_slow_training_is_answered_by_a_rank(tmp_path: Path) -> None:
    found = advise(run(tmp_path / "run", decode=0.7, train=2.0, lag=2))
    assert found is not None and found.change == "trainer.ranks = 2"


def test_a_run_without_a_gpu_is_not_told_to_share_its_cores(tmp_path: Path) -> None:
    found = run(tmp_path / "run", decode=0.7, train=2.0, lag=2)
    metrics = found.path / "metrics.jsonl"
    lines = [json.loads(line) | {"train/max_memory_gb": 0.0} for line in metrics.read_text().splitlines()]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert advise(load_run(found.path)) is None


def test_a_synchronous_run_with_even_sides_is_told_to_overlap(tmp_path: Path) -> None:
    found = advise(run(tmp_path / "run", decode=2.0, train=2.0, lag=0))
    assert found is not None and found.change == "loop.max_lag = 1"
    assert found.gain == pytest.approx(2, rel=0.2)


def test_a_run_that_its_simulation_does_not_explain_gets_no_advice(tmp_path: Path) -> None:
    """Processes that share cores wait for them, which no rate tells."""
    found = run(tmp_path / "run", decode=2.0, train=0.7, lag=1)
    metrics = found.path / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    for line in lines:
        line["gen/busy_s"] *= 0.4
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert advise(load_run(found.path)) is None


def test_a_colocated_run_gets_no_advice(tmp_path: Path) -> None:
    found = run(tmp_path / "run", decode=2.0, train=2.0, lag=0)
    with (found.path / "config.toml").open("a") as file:
        file.write('[sync]\nplacement = "colocated"\nin_flight = "recompute"\n')
    assert advise(load_run(found.path)) is None


@pytest.mark.parametrize("given", ["ranks = 4\ncontext_parallel = 4", 'ranks = 2\nparallel = "tensor"'])
def test_changes_that_a_run_refuses_are_left_out(tmp_path: Path, given: str) -> None:
    found = run(tmp_path / "run", decode=0.7, train=2.0, lag=2)
    with (found.path / "config.toml").open("a") as file:
        file.write(f"[trainer]\n{given}\n")
    advice = advise(load_run(found.path))
    assert advice is None or "trainer.ranks" not in advice.change


def test_damaged_records_give_no_advice(tmp_path: Path) -> None:
    found = run(tmp_path / "run", decode=2.0, train=2.0, lag=0)
    (found.path / "metrics.jsonl").write_text('{"time/step_s": "much"}\n' * 9)
    assert describe_advice(load_run(found.path)) == ""


def test_steps_without_tokens_give_no_advice(tmp_path: Path) -> None:
    """As in a run of an environment that never rewards: a simulation at such a rate would not end."""
    found = run(tmp_path / "run", decode=2.0, train=0.7, lag=1)
    metrics = found.path / "metrics.jsonl"
    lines = [json.loads(line) | {"train/packed_tokens": 0, "train/tokens": 0} for line in metrics.open()]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert describe_advice(load_run(found.path)) == ""


def test_short_records_give_no_advice(tmp_path: Path) -> None:
    found = run(tmp_path / "run", decode=2.0, train=1.0, lag=1)
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    assert describe_advice(load_run(found.path)) == ""


def test_a_process_gives_the_same_advice_and_is_killed_after_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = run(tmp_path / "run", decode=2.0, train=0.7, lag=1)
    assert asyncio.run(advice_in_process(found.path)) == describe_advice(found) != ""
    monkeypatch.setattr(advice, "TIMEOUT_S", 0.05)
    assert asyncio.run(advice_in_process(found.path)) == ""
    monkeypatch.setattr(advice.sys, "executable", str(tmp_path / "missing"))
    assert asyncio.run(advice_in_process(found.path)) == "", "a process that can't be started ends no run"
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    assert not any("slipstream.observe.advice" in Path(f"/proc/{pid}/cmdline").read_text() for pid in children)
