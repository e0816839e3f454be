import gc
from collections.abc import Iterator
from typing import Any

import pytest

from slipstream.runtime.memory import raise_gc_thresholds


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
