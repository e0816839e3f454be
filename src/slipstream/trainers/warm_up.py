"""Compile a trainer's passes before its first step, by passes over made-up tokens, while engines start."""

from __future__ import annotations

import sys

import torch

from slipstream.model.images import ImageProcessor
from slipstream.model.packing import group_by_prefix, pack
from slipstream.model.policy import PackedPolicy
from slipstream.rollout import Completion, Sample, VersionSpan, build_samples, float32_array, int32_array
from slipstream.trainers.parallel import TrainerRanks

# Tokens of made-up prompts, which are equal if their sizes are, and of completions. No two sizes of a micro-batch are
# equal by chance: code that was compiled for equal sizes would be compiled again for others.
SHARED, ALONE = ((37, 11), (37, 23), (37, 17)), ((37, 11), (29, 23))


def warm_up(
    policy: PackedPolicy, ranks: TrainerRanks, device: torch.device, images: ImageProcessor | None = None
) -> None:
    """Run the passes of a step: with and without a shared prompt, with and without gradients, which are zeros."""
    multiple = ranks.context.size if ranks.context else 1
    for sizes in (SHARED, ALONE):
        samples = [_made_up_sample(*each) for each in sizes]
        groups = group_by_prefix(samples, sys.maxsize, policy.packs)
        micro = pack(samples, groups, device, multiple=multiple, processor=images)
        with torch.no_grad():
            policy(micro)
        ranks.reshard(policy)
        logprobs, _ = policy(micro)
        torch.autograd.backward(logprobs, torch.zeros_like(logprobs))


def _made_up_sample(prompt: int, drawn: int) -> Sample:
    tokens, logprobs = int32_array((0,) * drawn), float32_array((-1.0,) * drawn)
    completion = Completion(int32_array((0,) * prompt), tokens, logprobs, (VersionSpan(0, 0, drawn),), "length")
    return build_samples([completion])[0]
