"""What top-k and top-p left, on its way from completions to the head, against lists of it."""

from __future__ import annotations

import dataclasses
import random
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.packed import logprobs as logprobs_module
from slipstream.packed.context import Context
from slipstream.packed.kept import Kept
from slipstream.packed.logprobs import head_logprobs
from slipstream.packed.packing import MicroBatch, bundle, pack
from slipstream.packed.policy import _own
from slipstream.rollout import Batch
from tests.trainers.test_trainer import random_batch

VOCABULARY = 38
CPU = torch.device("cpu")


def outside_of(kept: list[Any]) -> torch.Tensor:
    """By the definition: of each row all but its ids are left out, and nothing where there are none."""
    rows = [[ids is not None and token not in list(ids) for token in range(VOCABULARY)] for ids in kept]
    return torch.tensor(rows, dtype=torch.bool).reshape(-1, VOCABULARY)


IDS = st.none() | st.sets(st.integers(0, VOCABULARY - 1)).map(sorted)


@given(st.lists(IDS, min_size=1, max_size=30), st.integers(1, 30), st.randoms(use_true_random=False))
def test_chunks_and_parts_leave_out_what_their_rows_leave_out(kept: list[Any], size: int, rng: random.Random) -> None:
    found = Kept.of(kept, CPU)
    if found is None:
        assert set(kept) == {None}
        return
    places = rng.sample(range(len(kept)), rng.randint(0, len(kept)))
    for part, wanted in ((found, kept), (found.at(places), [kept[place] for place in places])):
        for at in range(0, len(wanted), size):
            chunk = slice(at, at + size)
            assert torch.equal(part.outside(chunk, VOCABULARY), outside_of(wanted[chunk]))


def test_nobody_waits_for_a_device_to_find_what_is_left_out() -> None:
    """A device without memory has nothing to tell, so whoever asked it for a number would fail."""
    nowhere = torch.device("meta")
    kept = Kept.of([None, [3, 5], [4]] * 5, nowhere)
    assert kept is not None
    for part in (kept, kept.at([7, 2, 0])):
        outside = part.outside(slice(1, 3), VOCABULARY)
        assert outside.device == nowhere and outside.shape == (2, VOCABULARY)


def mixed_batch() -> Batch:
    """Groups whose rollouts share prompts, half of whose completions tell what was left."""
    batch = random_batch(VOCABULARY, groups=6, kept=True)
    prompt = batch.groups[0].rollouts[0].completions[0].prompt_ids

    def changed(rollout: Any, known: int) -> Any:
        (c,) = rollout.completions
        c = dataclasses.replace(c, prompt_ids=prompt, kept=c.kept if known % 2 else None)
        return dataclasses.replace(rollout, completions=(c,))

    groups = (dataclasses.replace(g, rollouts=tuple(map(changed, g.rollouts, range(9)))) for g in batch.groups)
    return dataclasses.replace(batch, groups=tuple(groups))


def packed(multiple: int = 1) -> tuple[MicroBatch, list[Any]]:
    """A micro-batch, and what was left at each of its drawn tokens."""
    samples = mixed_batch().samples()
    micro = pack(samples, bundle(samples, 10_000), CPU, multiple=multiple)
    return micro, list(chain.from_iterable(samples[i].kept for i in micro.order))


def test_the_head_leaves_out_what_is_recorded_and_nothing_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks of which some rows are recorded and others are not, forward and backward, against full logits."""
    monkeypatch.setattr(logprobs_module, "CHUNK", 64 * VOCABULARY)
    micro, kept = packed()
    known = [ids is not None for ids in kept]
    assert len(kept) > 2 * 64 and 0 < sum(known[:64]) < 64
    torch.manual_seed(0)
    hidden, weight = (torch.randn(rows, 8, dtype=torch.float64) for rows in (len(kept), VOCABULARY))
    results = []
    for plain in (False, True):
        inputs = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
        if plain:
            logits = inputs[0] @ inputs[1].T / micro.temperatures.double()[:, None]
            every = logits.masked_fill(outside_of(kept), -torch.inf).log_softmax(-1)
            logprobs = every.gather(-1, micro.targets[:, None])[:, 0]
        else:
            logprobs, _ = head_logprobs(*inputs, micro.targets, micro.temperatures, micro.kept)
        results.append((logprobs, *torch.autograd.grad(logprobs.square().sum(), inputs)))
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted)


def test_ranks_that_share_a_row_leave_out_what_all_of_it_does() -> None:
    """A prompt's last token predicts the first of many completions, so what a rank has is not in one piece."""
    micro, kept = packed(multiple=2)
    seen: list[int] = []
    for rank in range(2):
        context = Context.__new__(Context)
        context.size, context.rank = 2, rank
        own, places = _own(micro, context)
        assert own.kept is not None and torch.equal(own.targets, micro.targets[places])
        wanted = outside_of([kept[place] for place in places.tolist()])
        assert torch.equal(own.kept.outside(slice(0, len(places)), VOCABULARY), wanted)
        seen += places.tolist()
    assert sorted(seen) == list(range(len(kept))) and seen != sorted(seen)


def test_where_nothing_is_recorded_there_is_nothing() -> None:
    samples = random_batch(VOCABULARY).samples()
    assert pack(samples, bundle(samples, 10_000), CPU).kept is None
