"""Copies that are recorded once and replayed with other values, into other slots."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from slipstream.generators.vllm.copy_replay import CopyRecorder, RecordedCopies

SLOTS = 4


class Slots:
    """Slots filled by foreign code: some values are scaled, and each is a corner of a larger stack."""

    def __init__(self, shapes: list[tuple[int, int]], factors: list[float]) -> None:
        self.shapes, self.factors = shapes, factors
        self.stacks = [torch.zeros(SLOTS, 1, rows + 1, columns + 2) for rows, columns in shapes]

    def fill(self, slot: int, parts: list[Tensor]) -> None:
        for part, factor in zip(parts, self.factors, strict=True):
            if factor != 1:
                part.mul_(factor)
        for stack, part in zip(self.stacks, parts, strict=True):
            stack[slot] = 0
            stack[slot, 0, : part.shape[0], : part.shape[1]].copy_(part, non_blocking=True)


sizes = st.integers(1, 4)
slots = st.integers(0, SLOTS - 1)


@given(
    st.lists(st.tuples(sizes, sizes, st.sampled_from([1.0, 0.5, 3.0])), min_size=1, max_size=5), slots, slots, st.data()
)
def test_a_replay_copies_the_same_values_as_the_original(
    parts: list[tuple[int, int, float]], first: int, second: int, data: st.DataObject
) -> None:
    shapes, factors = [part[:2] for part in parts], [part[2] for part in parts]
    theirs, ours = Slots(shapes, factors), Slots(shapes, factors)
    values = torch.zeros(sum(rows * columns for rows, columns in shapes))

    def named() -> list[Tensor]:
        split = torch.split(values, [rows * columns for rows, columns in shapes])
        return [one.view(shape) for one, shape in zip(split, shapes, strict=True)]

    torch.manual_seed(data.draw(st.integers(0, 9)))
    values.normal_()
    with CopyRecorder(values) as watched:
        ours.fill(first, named())
    copies = RecordedCopies(watched, first, SLOTS)
    new = torch.randn_like(values)
    values.copy_(new)
    copies.replay(second)
    values.copy_(new)
    theirs.fill(second, named())
    for mine, wanted in zip(ours.stacks, theirs.stacks, strict=True):
        assert torch.equal(mine[second], wanted[second])
    for mine in ours.stacks:  # other slots stay zero
        others = [n for n in range(SLOTS) if n not in (first, second)]
        assert not mine[others].any()


def put_together(values: Tensor, places: Tensor) -> None:
    places[1].copy_(torch.stack([values, values]).sum(0))


def in_another_format(values: Tensor, places: Tensor) -> None:
    places[1].copy_(values.double())


def scaled_by_a_tensor(values: Tensor, places: Tensor) -> None:
    values *= torch.arange(6.0)
    places[1].copy_(values)


def scaled_afterwards(values: Tensor, places: Tensor) -> None:
    places[1].copy_(values)
    values *= 2


def elsewhere(values: Tensor, places: Tensor) -> None:
    places[2].copy_(values)


def nothing(values: Tensor, places: Tensor) -> None: ...


@pytest.mark.parametrize(
    "work", [put_together, in_another_format, scaled_by_a_tensor, scaled_afterwards, elsewhere, nothing]
)
def test_copies_that_a_replay_would_not_reproduce_are_refused(work: object) -> None:
    values, places = torch.randn(6), torch.zeros(SLOTS, 6)
    with CopyRecorder(values) as watched:
        work(values, places)  # type: ignore[operator]
    with pytest.raises(ValueError, match=r"done again|another place"):
        RecordedCopies(watched, 1, SLOTS)


def test_targets_without_one_part_for_each_slot_are_refused() -> None:
    values, places = torch.randn(6), torch.zeros(5, 6)
    with CopyRecorder(values) as watched:
        places[1].copy_(values)
    with pytest.raises(ValueError, match="as many parts as there are slots"):
        RecordedCopies(watched, 1, SLOTS)
