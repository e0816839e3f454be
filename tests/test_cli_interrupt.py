"""Ctrl-C during the imports of a command, and output that nobody reads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

SENDS = """
import os, sys
class Finder:
    def find_spec(self, name, *_):
        if name == {at!r}:
            os.kill(os.getpid(), 2)
sys.meta_path.insert(0, Finder())
import runpy
sys.modules.pop({at!r}, None)
sys.argv = ["slipstream", "config"]
runpy.run_module({module!r}, run_name="__main__")
"""


def test_an_interrupt_during_imports_is_one_line(tmp_path: Path) -> None:
    places = ("typing", "enum", "signal", "slipstream.cli", "pydantic", "slipstream.config.schema")
    for module, at in [
        *(("slipstream", at) for at in places),
        *(("slipstream.cli", at) for at in ("signal", "pydantic")),
    ]:
        program = SENDS.format(module=module, at=at)
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path
        )
        assert (done.returncode, done.stdout, done.stderr) == (130, "", "slipstream: stopped at once\n"), at


def test_a_command_whose_output_nobody_reads_ends_quietly() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as pipe:
        command = [sys.executable, "-m", "slipstream", "config"]
        ended = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, check=False)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, b"")


def test_a_command_without_standard_output_succeeds() -> None:
    script = f"exec {sys.executable} -m slipstream config >&-"
    ended = subprocess.run(script, shell=True, stderr=subprocess.PIPE, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")
