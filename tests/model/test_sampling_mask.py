"""Sampling masks from completions to the head, compared with plain lists."""

from __future__ import annotations

import dataclasses
import random
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.model import logprobs as logprobs_module
from slipstream.model.context_parallel import ContextParallelGroup
from slipstream.model.logprobs import head_logprobs
from slipstream.model.packing import MicroBatch, group_by_prefix, pack
from slipstream.model.policy import _local_micro_batch
from slipstream.model.sampling_mask import SamplingMask
from slipstream.rollout import Batch
from tests.trainers.test_trainer import random_batch

VOCABULARY = 38
CPU = torch.device("cpu")


def excluded_by(kept: list[Any]) -> torch.Tensor:
    """Expected mask: all ids of a row but the listed ones; none for a row without a list."""
    rows = [[ids is not None and token not in list(ids) for token in range(VOCABULARY)] for ids in kept]
    return torch.tensor(rows, dtype=torch.bool).reshape(-1, VOCABULARY)


IDS = st.none() | st.sets(st.integers(0, VOCABULARY - 1)).map(sorted)


@given(st.lists(IDS, min_size=1, max_size=30), st.integers(1, 30), st.randoms(use_true_random=False))
def test_slices_of_a_sampling_mask_exclude_the_ids_of_their_rows(
    kept: list[Any], size: int, rng: random.Random
) -> None:
    found = SamplingMask.from_token_ids(kept, CPU)
    if found is None:
        assert set(kept) == {None}
        return
    places = rng.sample(range(len(kept)), rng.randint(0, len(kept)))
    for part, wanted in ((found, kept), (found.at(places), [kept[place] for place in places])):
        for at in range(0, len(wanted), size):
            chunk = slice(at, at + size)
            assert torch.equal(part.excluded(chunk, VOCABULARY), excluded_by(wanted[chunk]))


def test_slicing_a_sampling_mask_does_not_synchronise() -> None:
    """On the meta device, reading a value would fail."""
    nowhere = torch.device("meta")
    kept = SamplingMask.from_token_ids([None, [3, 5], [4]] * 5, nowhere)
    assert kept is not None
    for part in (kept, kept.at([7, 2, 0])):
        outside = part.excluded(slice(1, 3), VOCABULARY)
        assert outside.device == nowhere and outside.shape == (2, VOCABULARY)


def mixed_batch() -> Batch:
    """Groups whose rollouts share prompts; half of the completions have masks."""
    batch = random_batch(VOCABULARY, groups=6, kept=True)
    prompt = batch.groups[0].rollouts[0].completions[0].prompt_ids

    def changed(rollout: Any, known: int) -> Any:
        (c,) = rollout.completions
        c = dataclasses.replace(c, prompt_ids=prompt, sampling_mask=c.sampling_mask if known % 2 else None)
        return dataclasses.replace(rollout, completions=(c,))

    groups = (dataclasses.replace(g, rollouts=tuple(map(changed, g.rollouts, range(9)))) for g in batch.groups)
    return dataclasses.replace(batch, groups=tuple(groups))


def packed(multiple: int = 1) -> tuple[MicroBatch, list[Any]]:
    """A micro-batch, and the kept ids of each of its sampled tokens."""
    samples = mixed_batch().samples()
    micro = pack(samples, group_by_prefix(samples, 10_000), CPU, multiple=multiple)
    return micro, list(chain.from_iterable(samples[i].sampling_mask for i in micro.order))


@pytest.mark.parametrize("frozen", [False, True])
def test_head_logprobs_apply_the_recorded_masks(frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks mix rows with and without masks; forward and backward pass equal those of full logits.

    With a frozen head the backward pass computes no logits.
    """
    monkeypatch.setattr(logprobs_module, "CHUNK", 64 * VOCABULARY)
    micro, kept = packed()
    known = [ids is not None for ids in kept]
    assert len(kept) > 2 * 64 and 0 < sum(known[:64]) < 64
    torch.manual_seed(0)
    hidden, weight = (torch.randn(rows, 8, dtype=torch.float64) for rows in (len(kept), VOCABULARY))
    results = []
    for plain in (False, True):
        inputs = [hidden.clone().requires_grad_(), weight.clone().requires_grad_(not frozen)]
        if plain:
            logits = inputs[0] @ inputs[1].T / micro.temperatures.double()[:, None]
            every = logits.masked_fill(excluded_by(kept), -torch.inf).log_softmax(-1)
            logprobs = every.gather(-1, micro.targets[:, None])[:, 0]
            entropy = torch.special.entr(every.exp()).sum(-1).detach()
        else:
            logprobs, entropy = head_logprobs(*inputs, micro.targets, micro.temperatures, micro.sampling_mask)
            if frozen:
                monkeypatch.delattr(logprobs_module, "head_product")
        trained = [tensor for tensor in inputs if tensor.requires_grad]
        results.append((logprobs, entropy, *torch.autograd.grad(logprobs.square().sum(), trained)))
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted)


def test_context_parallel_ranks_apply_their_rows_of_the_mask() -> None:
    """A prompt's last token predicts the first token of many completions, so a rank's entries are not contiguous."""
    micro, kept = packed(multiple=2)
    seen: list[int] = []
    for rank in range(2):
        context = ContextParallelGroup.__new__(ContextParallelGroup)
        context.size, context.rank = 2, rank
        own, places = _local_micro_batch(micro, context)
        assert own.sampling_mask is not None and torch.equal(own.targets, micro.targets[places])
        wanted = excluded_by([kept[place] for place in places.tolist()])
        assert torch.equal(own.sampling_mask.excluded(slice(0, len(places)), VOCABULARY), wanted)
        seen += places.tolist()
    assert sorted(seen) == list(range(len(kept))) and seen != sorted(seen)


def test_samples_without_masks_have_no_sampling_mask() -> None:
    samples = random_batch(VOCABULARY).samples()
    assert pack(samples, group_by_prefix(samples, 10_000), CPU).sampling_mask is None
