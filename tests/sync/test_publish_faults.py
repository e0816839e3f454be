"""Faults in publishes by `delta` to three engines, with real processes: each kind at least once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "publish_faults.py"
KINDS = {
    "kill", "stop", "overlap", "flip after swap", "kill trainer", "flip on the wire", "cut", "slow", "wrong base",
    "flip during swap", "no memory", "clock set back",
}  # fmt: skip


@pytest.mark.e2e
def test_no_fault_lets_an_engine_sample_by_other_weights(tmp_path: Path) -> None:
    """`benchmarks/publish_faults.py` makes a thousand."""
    record = tmp_path / "record.json"
    command = [sys.executable, str(BENCHMARK), "--links", "Delta", "--faults", "22", f"--json={record}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(record.read_text())
    (link,) = found["links"]
    assert link["by_kind"].keys() == KINDS and found["faults"] == 13
    assert found["tokens"] > 1000 and not found["tokens_of_no_published_version"]
    assert all(kind["back_s_max"] < 60 for kind in link["by_kind"].values())
