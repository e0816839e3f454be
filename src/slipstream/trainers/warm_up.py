"""Compile a trainer's passes before its first step, by passes over made-up tokens, while engines start."""

from __future__ import annotations

import sys

import torch

from slipstream.model.images import ImageProcessor
from slipstream.model.inspection import causal_lm
from slipstream.model.packing import group_by_prefix, pack
from slipstream.model.policy import PackedPolicy
from slipstream.rollout import Completion, Sample, VersionSpan, build_samples, float32_array, int32_array
from slipstream.trainers.parallel import TrainerRanks

MOST_TOKENS = 8192  # of a micro-batch
LONGEST = 256  # tokens of a sample, unless the model's context is shorter
GROUP = 4  # samples that share a prompt


def warm_up(
    policy: PackedPolicy, ranks: TrainerRanks, device: torch.device, tokens: int, multiple: int = 1,
    images: ImageProcessor | None = None,
) -> None:  # fmt: skip
    """Run the passes of a step: with and without a shared prompt, with and without gradients, which are zeros.

    `tokens` is the most that a micro-batch of the run has, and their number is a multiple of `multiple`. The compiler
    takes the sizes of its first input as typical. Code that was compiled for a few hundred tokens takes 6% longer for
    a step of a model of 1.7 B parameters.
    """
    for group in (GROUP, 1):
        samples = _made_up_samples(policy, min(tokens, MOST_TOKENS), group, images)
        groups = group_by_prefix(samples, sys.maxsize, policy.packs)
        micro = pack(samples, groups, device, multiple=multiple, processor=images)
        with torch.no_grad():
            policy(micro)
        ranks.reshard(policy)
        logprobs, _ = policy(micro)
        torch.autograd.backward(logprobs, torch.zeros_like(logprobs))


def _made_up_samples(policy: PackedPolicy, tokens: int, group: int, images: ImageProcessor | None) -> list[Sample]:
    """Samples with about `tokens` tokens and without placeholders of `images`, of which `group` share a prompt.

    Their lengths differ, so that no two sizes of a micro-batch are equal by chance: code that was compiled for equal
    sizes would be compiled again for others.
    """
    config = causal_lm(policy.model).config.get_text_config()
    context = getattr(config, "max_position_embeddings", None) or LONGEST
    longest = min(LONGEST, context, max(4, tokens // (GROUP + 1)))
    quarter, count = max(1, longest // 4), max(GROUP + 1, tokens // longest)
    lengths = ((quarter + (i // group) % quarter, 2 * quarter - i % min(5, quarter)) for i in range(count))
    vocabulary = images.placeholder if images else config.vocab_size
    return [_made_up_sample(prompt, drawn, vocabulary) for prompt, drawn in lengths]


def _made_up_sample(prompt: int, drawn: int, vocabulary: int) -> Sample:
    """A sample of various tokens, which routers send to various experts. Prompts of equal length are equal."""
    ids = [i % vocabulary for i in range(prompt + drawn)]
    logprobs, span = float32_array((-1.0,) * drawn), VersionSpan(0, 0, drawn)
    completion = Completion(int32_array(ids[:prompt]), int32_array(ids[prompt:]), logprobs, (span,), "length")
    return build_samples([completion])[0]
