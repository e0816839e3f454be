"""Changes between versions: their coding is exact, and shards and checksums of them are those of the tensors."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.sync.changes import (
    Changes,
    ElementSpace,
    RolledBack,
    Update,
    checksum_change,
    decode,
    encode,
    find_changes,
    merge,
    words,
)
from slipstream.sync.checksum import checksum

CPU = torch.device("cpu")
DTYPES = {2: torch.bfloat16, 4: torch.float32}
shapes = st.lists(
    st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=5
)  # of parameters


def randomly(seed: int, shape: tuple[int, ...], size: int) -> Tensor:
    """A tensor of random bits, NaN among them."""
    draw = np.random.default_rng(seed)
    kind = {2: np.int16, 4: np.int32}[size]
    bits = draw.integers(np.iinfo(kind).min, np.iinfo(kind).max, shape, dtype=kind, endpoint=True)
    return torch.from_numpy(bits).view(DTYPES[size])


def change(tensor: Tensor, seed: int, share: float) -> Tensor:
    """The tensor with about this share of its words replaced, most of them by a neighbour."""
    draw, new = torch.Generator().manual_seed(seed), tensor.clone()
    bits, places = words(new), torch.rand(tensor.numel(), generator=torch.Generator().manual_seed(seed)) < share
    by = torch.randint(-3, 4, (int(places.sum()),), generator=draw)
    by[::5] *= 1000
    bits[places] = (bits[places].long() + by).to(bits.dtype)
    return new


@given(seed=st.integers(0, 10**6), count=st.integers(1, 3000), share=st.sampled_from([0.0, 0.001, 0.1, 0.35]),
       size=st.sampled_from([2, 4]))  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_coded_changes_turn_the_old_words_into_the_new_ones(seed: int, count: int, share: float, size: int) -> None:
    old = randomly(seed, (count,), size)
    new = change(old, seed + 1, share)
    changes = find_changes(words(old), words(new))
    if changes is None:  # so many that the whole is smaller
        assert (words(old) != words(new)).sum() > 0.4 * count
        return
    found = decode(encode(changes, size), size, CPU)
    applied = words(old).clone()
    applied[found.indices] = (applied[found.indices].long() + found.differences).to(applied.dtype)
    assert torch.equal(applied, words(new))


def test_a_change_of_a_percent_takes_about_a_byte_each() -> None:
    old = torch.randn(1_000_000).bfloat16()
    new = old.clone()
    words(new)[torch.randperm(1_000_000)[:10_000]] += 1
    changes = find_changes(words(old), words(new))
    assert changes and 20_000 <= len(encode(changes, 2)) < 22_000  # before compression; the whole takes 2,000,000


@given(data=st.binary(max_size=200), size=st.sampled_from([2, 4]))
@settings(max_examples=300, deadline=None)
def test_damaged_data_is_refused_or_harmless(data: bytes, size: int) -> None:
    try:
        found = decode(data, size, CPU)
    except ValueError:
        return
    assert len(found.indices) == len(found.differences)
    assert (found.indices.diff() > 0).all() and (found.indices >= 0).all()


@given(sizes=shapes, seed=st.integers(0, 10**6), halves=st.booleans())
@settings(max_examples=60, deadline=None)
def test_changes_of_shards_are_those_of_their_slices(sizes: list[tuple[int, ...]], seed: int, halves: bool) -> None:
    """For any slices of the first two dimensions; the checksums rise by what the changed slices' checksums differ."""
    draw = np.random.default_rng(seed)
    whole = {str(i): shape for i, shape in enumerate(sizes)}
    index = {}
    for name, shape in whole.items():
        bounds = [sorted(draw.integers(0, size, 2, endpoint=True)) for size in shape[: 1 + halves * (len(shape) == 2)]]
        index[name] = tuple(slice(int(low), int(high)) for low, high in bounds)
    space, own = ElementSpace(whole, CPU), ElementSpace(whole, CPU, index)
    old = {name: randomly(seed + i, shape, 2) for i, (name, shape) in enumerate(whole.items())}
    new = {name: change(tensor, seed, 0.3) for name, tensor in old.items()}
    flat_old, flat_new = (torch.cat([words(t) for t in tensors.values()]) for tensors in (old, new))
    indices = (flat_old != flat_new).nonzero().flatten()
    changes = Changes(indices, flat_new[indices].long() - flat_old[indices].long())

    within = own.within(changes, space)
    shards = {name: tensor[index[name]].contiguous().clone() for name, tensor in old.items()}
    raised = own.checksum_changes(within)
    Update(own, [words(shard) for shard in shards.values()], within, {}).apply()
    for (name, shard), by in zip(shards.items(), raised, strict=True):
        part = new[name][index[name]]
        assert torch.equal(words(shard), words(part.contiguous()))
        if shard.numel():
            before = checksum(old[name][index[name]], index[name])
            assert (before + by) % 2**64 == checksum(part, index[name])


def test_checksum_changes_agree() -> None:
    old = randomly(1, (7, 5), 2)
    new = change(old, 2, 0.2)
    changes = find_changes(words(old), words(new))
    assert changes
    assert (checksum(old) + int(checksum_change(changes, 5))) % 2**64 == checksum(new)


def test_merged_changes_lead_from_the_first_version_to_the_last() -> None:
    versions = [randomly(3, (500,), 2)]
    for seed in range(4):
        versions.append(change(versions[-1], seed, 0.1))
    found = [find_changes(words(a), words(b)) for a, b in pairwise(versions)]
    served = versions[0].clone()
    Update(ElementSpace({"w": (500,)}, CPU), [words(served)], merge([c for c in found if c]), {}).apply()
    assert torch.equal(words(served), words(versions[-1]))


@pytest.mark.parametrize("whole", [False, True])
def test_an_update_that_can_not_be_read_back_is_undone(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    old = randomly(4, (40,), 2)
    new, served = change(old, 5, 0.2), old.clone()
    changes = find_changes(words(old), words(new))
    assert changes
    none = Changes.join((), CPU)
    update = Update(
        ElementSpace({"w": (40,)}, CPU), [words(served)], none if whole else changes, {0: words(new)} if whole else {}
    )
    with monkeypatch.context() as patched:
        patched.setattr(torch, "stack", lambda same: torch.tensor([False]))
        patched.setattr(torch, "equal", lambda one, other: False)
        with pytest.raises(RolledBack, match="has the old ones again"):
            update.apply()
    assert torch.equal(words(served), words(old))
