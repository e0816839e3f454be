"""`slipstream verify` as a user runs it: exact where it has to be, and a failure where it can't be."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import save_model

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("verify") / "model"
    save_model(path, head_dim=32)
    return path


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("flags", "status", "said"),
    [
        pytest.param(["--generator.kind=vllm", "--sync.link=nccl"], 0, "EXACT", marks=needs_vllm),
        (["--sync.placement=colocated", "--tokens=60"], 0, "EXACT"),
        pytest.param(
            ["--generator.kind=vllm", "--sync.link=lora", "--lora.rank=8", "--sync.interruption=continue"],
            0,
            "EXACT",
            marks=needs_vllm,
        ),
        (["--sync.link=shared"], 0, "EXACT"),
        (["--sync.link=checkpoint", "--sync.interruption=continue"], 1, "NOT EXACT"),
        (["--tokens", "4", "--after", "400"], 1, "raise --tokens"),
    ],
)
def test_verify(flags: list[str], status: int, said: str, model: Path) -> None:
    """Sequences that keep old keys under new weights are not what a fresh engine draws: a verifier has to see that."""
    command = [sys.executable, "-m", "slipstream.cli", "verify", str(model), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == status, done.stdout + done.stderr
    assert said in done.stdout
    assert ("NOT EXACT" in done.stdout) == bool(status)
