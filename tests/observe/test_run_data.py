"""Reading a run's records: while it is written, after a kill, and damaged."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipstream import ConfigError, load_run
from slipstream.observe.health import Health, replay
from slipstream.observe.run_data import read_lines
from slipstream.runtime.run_directory import lock, write_atomically


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "config.toml").write_text("[loop]\nsteps = 3\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n{"step": 2, "rew')
    (tmp_path / "rollouts").mkdir()
    pq.write_table(pa.table({"step": [1], "completion": ["4"]}), tmp_path / "rollouts" / "step_000001.parquet")
    (tmp_path / "rollouts" / "step_000002.parquet").write_bytes(b"PAR1 damaged")
    return tmp_path


def test_a_line_is_read_once_it_is_complete(path: Path) -> None:
    run = load_run(path)
    assert run.metrics == [{"step": 1, "reward/mean": 0.5}] and run.config == {"loop": {"steps": 3}}
    assert not run.poll()
    with (path / "metrics.jsonl").open("a") as file:
        file.write('ard/mean": 1.0}\n')
    assert run.poll() and [record["step"] for record in run.metrics] == [1, 2]


def test_a_resumed_run_replaces_its_records(path: Path) -> None:
    run = load_run(path)
    write_atomically(path / "metrics.jsonl", '{"step": 1, "reward/mean": 0.25}\n{"step": 2}\n')
    assert run.poll() and [record.get("reward/mean") for record in run.metrics] == [0.25, None]


def test_damage_is_named_and_the_rest_is_read(path: Path) -> None:
    with (path / "metrics.jsonl").open("a") as file:
        file.write("\xff\n[1]\n" + json.dumps({"step": 3}) + "\n")
    run = load_run(path)
    assert [record["step"] for record in run.metrics] == [1, 3]
    assert run.rollout_steps == [1, 2] and run.rollouts(2) == [] and run.rollouts(1)[0]["completion"] == "4"
    assert run.rollouts(9) == []
    problems = "\n".join(run.problems)
    assert "metrics.jsonl: 2 damaged lines" in problems and "step_000002.parquet can't be read" in problems


def test_states(path: Path) -> None:
    run = load_run(path)
    assert run.state == "dead" and any("without a summary" in problem for problem in run.problems)
    held = lock(path / "lock")
    assert run.state == "running"
    held.close()
    (path / "summary.json").write_text('{"stopped": null}')
    assert run.state == "complete"
    (path / "summary.json").write_text('{"stopped": "SIGTERM"}')
    assert run.state == "stopped"


def test_frames(path: Path) -> None:
    pytest.importorskip("pandas")
    run = load_run(path)
    assert run.metrics_frame().loc[1, "reward/mean"] == 0.5
    assert list(run.rollouts_frame()["completion"]) == ["4"]


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        load_run(tmp_path)


def test_a_long_run_is_replayed_without_being_in_memory_whole(tmp_path: Path) -> None:
    """A restart of the trainer replays all steps: what that takes must not grow with them."""
    path = tmp_path / "metrics.jsonl"
    assert list(read_lines(path)) == []
    with path.open("w") as file:
        for step in range(1, 2001):
            file.write(
                json.dumps({"step": step, "reward/mean": 0.5} | {f"metric/{i}": i / 7 for i in range(100)}) + "\n"
            )
        file.write('[1]\n{"step": 2001, "rew')
    health = Health({})
    tracemalloc.start()
    try:
        replay(read_lines(path), [], health)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [record["step"] for record in read_lines(path)] == list(range(1, 2001))
    assert peak < path.stat().st_size, "200 records are kept, of 2,000"


def test_records_share_the_names_of_their_values(tmp_path: Path) -> None:
    """A run of 10,000 steps would otherwise need 2.5 times the memory."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"reward/mean": 0.5}\n{"reward/mean": 0.6}\n')
    first, second = (next(iter(record)) for record in read_lines(path))
    assert first is second
