"""Memory of a process and its children, as the health rules read it, and garbage-collector tuning."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from slipstream.runtime.memory import raise_gc_thresholds, unshared_bytes

MEGABYTE = 2**20


def test_memory_of_this_process_and_its_children() -> None:
    before = unshared_bytes()
    held = bytearray(b"x") * (64 * MEGABYTE)
    assert 56 * MEGABYTE < unshared_bytes() - before < 128 * MEGABYTE
    code = "held = bytearray(b'x') * 2**26; print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdin is not None
        child.stdout.readline()  # it holds its memory now
        assert unshared_bytes(children=True) - unshared_bytes() > 56 * MEGABYTE
        child.stdin.close()
    assert len(held) == 64 * MEGABYTE


@pytest.fixture
def full_collections() -> Iterator[list[int]]:
    """Count full collections, in a list of one number. Restores the collector's settings at the end."""
    before, counted = gc.get_threshold(), [0]

    def count(phase: str, info: dict[str, Any]) -> None:
        counted[0] += phase == "stop" and info["generation"] == 2

    gc.callbacks.append(count)
    gc.freeze()  # as in every process of a run: else pytest's objects count as well
    yield counted
    gc.unfreeze()
    gc.callbacks.remove(count)
    gc.set_threshold(*before)


def keep_lists(count: int) -> None:
    kept = [[i] for i in range(count)]
    assert len(kept) == count


def test_full_collections_are_rare_in_a_process_with_many_tokens(full_collections: list[int]) -> None:
    keep_lists(300_000)
    assert full_collections[0]
    raise_gc_thresholds()
    full_collections[0] = 0
    keep_lists(300_000)
    assert not full_collections[0]


def test_reference_cycles_are_still_collected(full_collections: list[int]) -> None:
    raise_gc_thresholds()

    class Cycle:
        alive = 0

        def __init__(self) -> None:
            self.own = self
            Cycle.alive += 1

        def __del__(self) -> None:
            Cycle.alive -= 1

    for _ in range(50_000):
        Cycle()
    assert Cycle.alive < 20_000
