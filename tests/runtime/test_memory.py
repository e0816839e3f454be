"""Memory of a process and its children, as the health rules read it."""

from __future__ import annotations

import subprocess
import sys

from slipstream.runtime.memory import resident_bytes

MEGABYTE = 2**20


def test_memory_of_this_process_and_its_children() -> None:
    before = resident_bytes()
    held = bytearray(b"x") * (64 * MEGABYTE)
    assert 56 * MEGABYTE < resident_bytes() - before < 128 * MEGABYTE
    code = "held = bytearray(b'x') * 2**26; print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdin is not None
        child.stdout.readline()  # it holds its memory now
        assert resident_bytes(children=True) - resident_bytes() > 56 * MEGABYTE
        child.stdin.close()
    assert len(held) == 64 * MEGABYTE
