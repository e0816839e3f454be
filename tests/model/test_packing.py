"""Padding of micro-batches: its tokens belong to no sample, and change nothing."""

from __future__ import annotations

import random

import pytest
import torch

from slipstream.model.context_parallel import ContextParallelGroup
from slipstream.model.packing import group_by_prefix, pack
from slipstream.model.policy import PackedPolicy
from slipstream.rollout import Completion, Sample, VersionSpan, build_samples
from tests.conftest import build_model

CPU = torch.device("cpu")


def samples() -> list[Sample]:
    rng = random.Random(0)
    made = []
    for prompt, drawn in ((3, 4), (5, 2), (5, 6), (1, 1)):
        prompt_ids, ids = (tuple(rng.randrange(2, 40) for _ in range(count)) for count in (prompt, drawn))
        completion = Completion(prompt_ids, ids, (-1.0,) * drawn, (VersionSpan(0, 0, drawn),), "length")
        made += build_samples([completion])
    return made


@pytest.mark.parametrize(
    ("least", "multiple", "length"), [(0, 1, 23), (20, 1, 23), (50, 1, 50), (50, 16, 64), (0, 8, 24)]
)
def test_padding_is_cut_into_segments_that_are_no_longer_than_the_longest_sample(
    least: int, multiple: int, length: int
) -> None:
    every = samples()
    groups = group_by_prefix(every, 1000)
    plain, padded = pack(every, groups, CPU), pack(every, groups, CPU, multiple=multiple, least=least)
    assert (len(padded.input_ids), padded.padding, plain.padding) == (length, length - 23, 0)
    assert padded.positions.max() == plain.positions.max() == 9
    assert padded.segments.pairs == plain.segments.pairs
    assert padded.segments.query_bounds[-1] == length
    assert padded.segments.query_bounds.diff().max() <= 10
    policy = PackedPolicy(build_model())
    with torch.no_grad():
        torch.testing.assert_close(policy(padded), policy(plain))


@pytest.mark.parametrize(("tokens", "count", "parts"), [(12, 12, [4, 4, 4]), (12, 5, [4, 1, 0]), (12, 0, [0, 0, 0])])
def test_ranks_know_how_many_of_the_first_tokens_are_theirs(tokens: int, count: int, parts: list[int]) -> None:
    group = ContextParallelGroup.__new__(ContextParallelGroup)
    group.size = 3
    for group.rank, own in enumerate(parts):
        assert group.own_count(tokens, count) == own
