import gc
from collections.abc import Iterator
from typing import Any

import pytest

from slipstream.heap import collect_seldom


@pytest.fixture
def full_collections() -> Iterator[list[int]]:
    """How many there were, in a list of one; what is asked of the collector is taken back at the end."""
    before, counted = gc.get_threshold(), [0]

    def count(phase: str, info: dict[str, Any]) -> None:
        counted[0] += phase == "stop" and info["generation"] == 2

    gc.callbacks.append(count)
    gc.freeze()  # as in every process of a run: else what pytest holds counts as well
    yield counted
    gc.unfreeze()
    gc.callbacks.remove(count)
    gc.set_threshold(*before)


def keep_lists(count: int) -> None:
    kept = [[i] for i in range(count)]
    assert len(kept) == count


def test_a_process_that_keeps_many_tokens_does_not_stand_still_for_garbage(full_collections: list[int]) -> None:
    keep_lists(300_000)
    assert full_collections[0]
    collect_seldom()
    full_collections[0] = 0
    keep_lists(300_000)
    assert not full_collections[0]


def test_cycles_are_found_all_the_same(full_collections: list[int]) -> None:
    collect_seldom()

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
