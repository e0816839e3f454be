"""Changes between versions: their coding is exact, and shards and checksums of them are those of the tensors."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.sync import arrays
from slipstream.sync import update as staging
from slipstream.sync.blocks import Block, divide, gather, words
from slipstream.sync.changes import (
    HEADER,
    Changes,
    Entry,
    choose_coding,
    copy_changes,
    count_small,
    decode,
    encode,
    encode_rows,
    entries,
    merge,
)
from slipstream.sync.checksum import checksum
from slipstream.sync.link import ParameterShard
from slipstream.sync.update import Part, RolledBack, Tensors, Update

CPU = torch.device("cpu")
DTYPES = {2: torch.bfloat16, 4: torch.float32}
shapes = st.lists(
    st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=5
)  # of parameters
shares = st.lists(st.sampled_from([0.1, 0.3, 0.9]), min_size=1, max_size=3)  # of elements that each version changes


@pytest.fixture(autouse=True, params=["NumPy's arrays", "tensors"])
def kind_of_array(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tensors are used on a GPU, and staged by blocks: here they are on the CPU."""
    with pytest.MonkeyPatch.context() as patched:
        if request.param == "tensors":
            patched.setattr(arrays, "as_array", lambda tensor: tensor)
            patched.setattr(staging, "SLICE", 7)
        yield


def randomly(seed: int, shape: tuple[int, ...], size: int) -> Tensor:
    """A tensor of random bits, NaN among them."""
    draw = np.random.default_rng(seed)
    kind = {2: np.int16, 4: np.int32}[size]
    bits = draw.integers(np.iinfo(kind).min, np.iinfo(kind).max, shape, dtype=kind, endpoint=True)
    return torch.from_numpy(bits).view(DTYPES[size])


def change(tensor: Tensor, seed: int, share: float, by: int = 3, far: int = 1000) -> Tensor:
    """The tensor with about this share of its words replaced, most of them by a neighbour."""
    draw, new = torch.Generator().manual_seed(seed), tensor.clone()
    bits, places = words(new), torch.rand(tensor.numel(), generator=torch.Generator().manual_seed(seed)) < share
    steps = torch.randint(-by, by + 1, (int(places.sum()),), generator=draw)
    steps[::5] *= far
    bits[places] = (bits[places].long() + steps).to(bits.dtype)
    return new


def found(old: Tensor, new: Tensor) -> Changes:
    changes = copy_changes(words(old.clone()), words(new))
    assert changes is not None
    return changes


def encoded(block: int, length: int, changes: Changes, size: int) -> bytes:
    coding = choose_coding(length, len(changes.indices), arrays.to_ints(count_small(changes)), size)
    return encode(block, length, changes, size, coding)


@given(seed=st.integers(0, 10**6), count=st.integers(1, 3000), share=st.sampled_from([0.0, 0.001, 0.1, 0.35]),
       size=st.sampled_from([2, 4]), by=st.sampled_from([1, 100]), far=st.sampled_from([1, 1000]))  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_coded_changes_turn_the_old_words_into_the_new_ones(
    seed: int, count: int, share: float, size: int, by: int, far: int
) -> None:
    old = randomly(seed, (count,), size)
    new = change(old, seed + 1, share, by, far)
    changes = copy_changes(words(old.clone()), words(new))
    if changes is None:  # so many that the whole is smaller
        assert (words(old) != words(new)).sum() > 0.4 * count
        return
    ((entry, data),) = entries(memoryview(encoded(3, count, changes, size)))
    decoded = decode(entry, data, count, size, CPU).on_host()
    applied = words(old).clone()
    applied[torch.as_tensor(decoded.indices)] += torch.as_tensor(decoded.differences)
    assert torch.equal(applied, words(new)) and entry.place == 3


@pytest.mark.parametrize(("share", "most"), [(0.0001, 2.8), (0.001, 1.9), (0.01, 1.34), (0.1, 1.31), (0.3, 0.7)])
def test_a_change_of_a_percent_takes_about_a_byte(share: float, most: float) -> None:
    old = torch.randn(1_000_000).bfloat16()
    new, count = old.clone(), int(1_000_000 * share)
    words(new)[torch.randperm(1_000_000)[:count]] += 1
    assert len(encoded(0, 1_000_000, found(old, new), 2)) < most * count + 40


@given(data=st.binary(max_size=200), size=st.sampled_from([2, 4]), number=st.integers(0, 30), listed=st.integers(0, 3),
       low=st.sampled_from([0, 8, 16, 3]), width=st.integers(0, 4))  # fmt: skip
@settings(max_examples=300, deadline=None)
def test_damaged_data_is_refused_or_harmless(
    data: bytes, size: int, number: int, listed: int, low: int, width: int
) -> None:
    try:
        changes = decode(Entry(0, 0, len(data), number, listed, low, width), memoryview(data), 60, size, CPU)
    except ValueError:
        return
    assert len(changes.indices) == len(changes.differences)
    indices = changes.indices
    assert (np.diff(indices) > 0).all() and ((indices >= 0) & (indices < 60)).all()


@given(data=st.binary(max_size=100), parameter=st.integers(0, 2), row=st.integers(0, 9), low=st.sampled_from([0, 255]))
@settings(max_examples=200, deadline=None)
def test_a_damaged_frame_is_refused_and_changes_nothing(data: bytes, parameter: int, row: int, low: int) -> None:
    tensor = torch.zeros(7, 5, dtype=torch.bfloat16)
    update = Update(Tensors({"w": Part(ParameterShard(tensor, (7, 5)))}, divide({"w": (7, 5)}, 10)), fresh=False)
    for frame in (data, HEADER.pack(parameter, row, len(data), len(data) // 10, 0, low, 0) + data):
        try:
            update.add(update.decode(memoryview(frame)))
        except ValueError:
            continue
    assert not tensor.any()


def coded(number: int, block: Block, old: Tensor, new: Tensor) -> list[bytes]:
    """The entries of a block."""
    changes = copy_changes(old.clone(), new)
    if changes is None:
        return [entry for segment in block.segments for entry in encode_rows(segment, new.numpy())]
    return [encoded(number, block.length, changes, 2)]


@given(sizes=shapes, seed=st.integers(0, 10**6), halves=st.booleans(), shares=shares)
@settings(max_examples=150, deadline=None)
def test_shards_get_the_changes_of_their_slices(
    sizes: list[tuple[int, ...]], seed: int, halves: bool, shares: list[float]
) -> None:
    """For any slices of the first two dimensions; the checksums rise by what the changed slices' checksums differ.

    Of one version or several, in one stream.
    """
    draw = np.random.default_rng(seed)
    old = {str(i): randomly(seed + i, shape, 2) for i, shape in enumerate(sizes)}
    index = {}
    for name, tensor in old.items():
        bounds = [
            sorted(draw.integers(0, size, 2, endpoint=True))
            for size in tensor.shape[: 1 + (halves and tensor.dim() == 2)]
        ]
        index[name] = tuple(slice(int(low), int(high)) for low, high in bounds)
    served = {name: tensor[index[name]].contiguous().clone() for name, tensor in old.items()}
    blocks = divide({name: tensor.shape for name, tensor in old.items()}, 20)
    parts = {name: Part(ParameterShard(served[name], tuple(old[name].shape), index[name])) for name in old}
    update, new = Update(Tensors(parts, blocks), fresh=False, steps=len(shares)), old
    for step, share in enumerate(shares):
        last, new = new, {name: change(tensor, seed + step, share) for name, tensor in new.items()}
        both = (gather(blocks, tensors, torch.bfloat16) for tensors in (last, new))
        for number, (block, one, other) in enumerate(zip(blocks, *both, strict=True)):
            for data in coded(number, block, one, other):
                update.add(update.decode(memoryview(data)))
    before = {name: checksum(t, index[name]) if t.numel() else 0 for name, t in served.items()}
    sums = update.checksums(before)
    update.apply()
    update.confirm()
    for name, tensor in served.items():
        part = new[name][index[name]].contiguous()
        assert torch.equal(words(tensor), words(part))
        assert sums[name] == (checksum(part, index[name]) if part.numel() else 0)


@given(sizes=shapes, seed=st.integers(0, 10**6), size=st.sampled_from([10, 1000]))
@settings(max_examples=50, deadline=None)
def test_checksums_rise_by_what_changes(sizes: list[tuple[int, ...]], seed: int, size: int) -> None:
    """Of every parameter, whether it shares its block or has several."""
    old = {str(i): randomly(seed + i, shape, 2) for i, shape in enumerate(sizes)}
    new = {name: change(tensor, seed, 0.2) for name, tensor in old.items()}
    blocks = divide({name: tensor.shape for name, tensor in old.items()}, size)
    sums = {name: checksum(tensor) for name, tensor in old.items()}
    both = (gather(blocks, tensors, torch.bfloat16) for tensors in (old, new))
    for block, one, other in zip(blocks, *both, strict=True):
        changes = copy_changes(one, other)
        if changes is None:
            return
        for segment, rise in zip(block.segments, block.rises(*changes).tolist(), strict=True):
            sums[segment.name] += rise
    assert {name: total % 2**64 for name, total in sums.items()} == {n: checksum(t) for n, t in new.items()}


def test_merged_changes_lead_from_the_first_version_to_the_last() -> None:
    versions = [randomly(3, (500,), 2)]
    for seed in range(4):
        versions.append(change(versions[-1], seed, 0.1))
    first, *others = (found(a, b).on_host() for a, b in pairwise(versions))
    for other in others:
        first = merge(first, other)
    served = versions[0].clone()
    words(served)[torch.as_tensor(first.indices)] += torch.as_tensor(first.differences).to(torch.int16)
    assert torch.equal(words(served), words(versions[-1]))


@pytest.mark.parametrize("whole", [False, True])
def test_an_update_that_can_not_be_read_back_is_undone(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    old = randomly(4, (40,), 2)
    new, served = change(old, 5, 0.2), old.clone()
    (block,) = divide({"w": (40,)}, 100)
    update = Update(Tensors({"w": Part(ParameterShard(served, (40,)))}, [block]), fresh=False)
    rows = encode_rows(block.segments[0], words(new).numpy())
    data = next(rows) if whole else encoded(0, 40, found(old, new), 2)
    update.add(update.decode(memoryview(data)))
    kind = staging._Replaced if whole else staging._Changed
    swap = kind.swap

    def fail(staged: Any) -> Any:
        """As if memory had failed once the words were written."""
        swapped = swap(staged)
        words(served)[3] ^= 1
        return swapped[0] ^ 1, swapped[1]

    monkeypatch.setattr(kind, "swap", fail)
    update.apply()
    with pytest.raises(RolledBack, match="has the old ones again"):
        update.confirm()
    untouched = words(old) != words(new) if not whole else torch.ones(40, dtype=torch.bool)
    assert torch.equal(words(served)[untouched], words(old)[untouched])
