"""Operating systems: macOS, simulated on Linux, and Windows, which is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.cli import main

MACOS = """
import os, socket, sys

LINUX = ("/proc", "/sys", "/dev/shm")
for module, name in ((os, "memfd_create"), (os, "sched_getaffinity"), (socket, "SO_PEERCRED")):
    delattr(module, name)

def refuse(event, arguments):
    if event in ("open", "os.listdir", "os.scandir") and str(arguments[0]).startswith(LINUX):
        raise FileNotFoundError(2, "not on macOS", arguments[0])

def stat(path, *arguments, _stat=os.stat, **named):
    refuse("open", (path,))
    return _stat(path, *arguments, **named)

os.stat = stat
sys.addaudithook(refuse)
"""
REWARD = "def reward(task, completion): return float(len(completion.text) % 2)\n"


@pytest.mark.e2e
def test_a_run_works_without_features_of_linux(tiny: Path, tmp_path: Path) -> None:
    """All processes, reward workers included, work without /proc, anonymous memory files and CPU affinity."""
    (tmp_path / "sitecustomize.py").write_text(MACOS)
    (tmp_path / "mine.py").write_text(REWARD)
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": "2+1="}\n' * 3)
    (tmp_path / "run.toml").write_text(
        f'[model]\npath = "{tiny}"\n[environment]\nname = "mine.py:reward"\noptions = {{ train = "tasks.jsonl" }}\n'
        "[sampling]\nmax_tokens = 4\n[loop]\nsteps = 2\ngroups_per_step = 1\n"
    )
    (tmp_path / "temporary").mkdir()
    paths = {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}", "TMPDIR": str(tmp_path / "temporary")}
    done = subprocess.run(
        [sys.executable, "-m", "slipstream", "train", "run.toml", "--run.dir", "run"],
        cwd=tmp_path, env={**os.environ, **paths}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr and "Traceback" not in done.stderr
    assert (tmp_path / "run" / "policy" / "model.safetensors").exists()
    assert not list((tmp_path / "temporary").glob("slipstream*")), "a named file outlived the run"


@pytest.mark.parametrize("command", [["config"], ["train", "run.toml"], ["study", "lag", "--draw"]])
def test_windows_is_refused_in_one_line(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert main(command) == 2
    said = capsys.readouterr()
    assert said.err == "slipstream: Slipstream runs on Linux, and on macOS on the CPU; on Windows use WSL 2\n"


def test_the_library_is_refused_if_file_locks_are_missing() -> None:
    code = (
        "import sys; sys.modules['fcntl'] = None\n"
        "import slipstream\n"
        "try: slipstream.train\n"
        "except slipstream.ConfigError as error: assert 'on Windows use WSL 2' in str(error)\n"
        "else: raise SystemExit('not refused')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
