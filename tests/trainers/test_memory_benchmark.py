"""benchmarks/memory.py with a tiny model on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "memory.py"


def test_a_recipe_is_measured_beside_its_estimate(tmp_path: Path) -> None:
    """On two ranks with too little memory for the defaults."""
    command = [sys.executable, str(BENCHMARK), "--small", "--recipes", "1M-two", "--recipe-s", "200"]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "found.json")], capture_output=True, text=True, check=True
    )
    (found,) = json.loads((tmp_path / "found.json").read_text())
    assert "1M-two: used" in done.stdout and found["ranks"] == 2
    assert found["tokens_per_s"] > 0 and found["estimate_tokens_per_s"] > 0
    assert 3.5 < found["estimate_gb"] <= found["free_gb"]
    assert "tokens_per_microbatch = " in found["chosen"] and "without, 4 GB" in found["chosen"]
