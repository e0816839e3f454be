"""Packs samples into micro-batches: `group_by_prefix` and `plan` choose indices, `pack` makes the tensors.

`plan` distributes prefix groups over micro-batches and data-parallel ranks so that their costs are about equal. A
micro-batch is one row of concatenated tokens; only `pack(multiple=..., least=...)` adds padding, at its end. Samples
with the same prompt share one copy of it; each is a *segment* that attends to the prompt and to itself. The last token
of a sample is not in the row, since it is only a target:

    tokens    prompt  a a a a  b b b      attention   prompt to prompt, a to prompt + a, b to prompt + b
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.model.attention import SegmentRanges, Segments, concat_to_device
from slipstream.model.images import ImageProcessor, image_positions, image_starts
from slipstream.model.sampling_mask import SamplingMask
from slipstream.rollout import Image, Sample

PrefixGroup = list[int]  # indices of samples that share one copy of their prompt
BALANCE_TOLERANCE = 0.002  # relative cost difference of two micro-batches that is not worth a swap


@dataclass(frozen=True)
class MicroBatch:
    """Tensors of one forward pass: an entry for each token, and one for each sampled token that is trained on.

    `input_ids` and `positions` are `[tokens]`. `experts` `[tokens, layers, experts per token]` are those that the
    engine chose, -1 if unknown (None: all unknown). These are `[sampled]`: `predicts` are indices of the tokens whose
    output predicts a sampled token; `targets`, `temperatures`, `behaviour` log-probabilities, `advantages`, `lags` in
    versions, `sequences` (index of the sample in `order`), and `teacher` log-probabilities. `sampling_mask` has the ids
    that top-k/top-p kept (None: all). `order[i]` is the index in the step of the i-th sample here. A `filler` adds
    nothing to the gradient; it lets a rank join the collectives of the others.

    For models that read images, `positions` are `[3, tokens]`, and `images` more arguments of the forward method.
    `placeholders` are indices of placeholders that the policy sampled, which are no images; `input_ids` have 0 there.
    The last `padding` tokens belong to no sample.
    """

    input_ids: Tensor
    positions: Tensor
    segments: Segments
    predicts: Tensor
    targets: Tensor
    temperatures: Tensor
    behaviour: Tensor
    advantages: Tensor
    lags: Tensor
    sequences: Tensor
    sampling_mask: SamplingMask | None
    experts: Tensor | None
    order: Sequence[int]
    teacher: Tensor | None = None
    filler: bool = False
    padding: int = 0
    images: Mapping[str, Tensor] = field(default_factory=dict)
    placeholders: Tensor | None = None


def group_by_prefix(samples: Sequence[Sample], budget: int, share: bool = True, ranks: int = 1) -> list[PrefixGroup]:
    """Group samples with equal prompts, images, and experts for the prompt, up to `budget` tokens a group.

    With several ranks a group has at most half of a rank's tokens, so that long groups do not leave ranks without work.
    """
    if ranks > 1:
        budget = min(budget, sum(map(forward_length, samples)) // (2 * ranks))
    prefix_groups: list[PrefixGroup] = []
    open_groups: dict[tuple[bytes, bytes, tuple[Image, ...]], tuple[PrefixGroup, int]] = {}
    for index, sample in enumerate(samples):
        prompt = sample.prompt_ids
        own = forward_length(sample) - len(prompt)
        experts = b"" if sample.experts is None else _experts(sample)[: len(prompt)].tobytes()
        key = prompt.tobytes(), experts, sample.images
        members, used = open_groups.get(key, ([], 0))
        if not members or used + own > budget:
            members, used = [], len(prompt)
            prefix_groups.append(members)
        members.append(index)
        if share:
            open_groups[key] = members, used + own
    return prefix_groups


def plan(
    sizes: Sequence[int], budget: int, ranks: int = 1, costs: Sequence[int] | None = None
) -> list[list[list[int]]]:
    """Distribute items over micro-batches and ranks: `[rank][micro-batch]` lists of indices.

    Every rank gets the same number of micro-batches and about the same cost; some may be empty. A micro-batch has at
    most `budget` tokens, unless a single item is longer. `costs` are in any unit (None: tokens).
    """
    costs = sizes if costs is None else costs
    count = max(1, -(-sum(sizes) // (budget * ranks)))
    while True:
        bins = _fill(sizes, budget, count * ranks)
        if bins:
            _balance(bins, costs, sizes, budget)
            bins.sort(key=lambda items: -sum(costs[i] for i in items))
            # Micro-batches of similar cost go to different ranks, so that ranks finish each round together.
            return [bins[rank::ranks] for rank in range(ranks)]
        count += 1


def _fill(sizes: Sequence[int], budget: int, count: int) -> list[list[int]] | None:
    """Put items into `count` bins of `budget`, the largest first into the emptiest; None if they do not fit."""
    bins: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        emptiest = min(range(count), key=loads.__getitem__)
        if bins[emptiest] and loads[emptiest] + sizes[index] > budget:
            return None
        bins[emptiest].append(index)
        loads[emptiest] += sizes[index]
    return bins


def _balance(bins: list[list[int]], costs: Sequence[int], sizes: Sequence[int], budget: int) -> None:
    """Move or swap items out of the costliest bin while that lowers its cost; then continue with the next costliest.

    Changes `bins` in place. Every bin stays within `budget`.
    """
    loads = [sum(costs[i] for i in items) for items in bins]
    remaining = list(range(len(bins)))
    while remaining:
        costliest = max(remaining, key=loads.__getitem__)
        gaps = [(other, loads[costliest] - loads[other]) for other in sorted(remaining, key=loads.__getitem__)]
        uneven = [(other, gap) for other, gap in gaps if gap > BALANCE_TOLERANCE * loads[costliest]]
        swaps = ((other, _best_swap(bins[costliest], bins[other], gap, costs, sizes, budget)) for other, gap in uneven)
        found = next(((other, trade) for other, trade in swaps if trade), None)
        if not found:
            remaining.remove(costliest)
            continue
        other, (leaving, arriving) = found
        for target, items in ((costliest, arriving), (other, leaving)):
            bins[target] = [i for i in bins[target] if i not in (*leaving, *arriving)] + items
            loads[target] = sum(costs[i] for i in bins[target])


def _best_swap(
    costly: Sequence[int], cheap: Sequence[int], gap: int, costs: Sequence[int], sizes: Sequence[int], budget: int
) -> tuple[list[int], list[int]] | None:
    """The move or swap of items that best evens out the cost of two bins within `budget`, or None.

    `costly` costs `gap` more than `cheap`. Returns the items that leave `costly`, and those that leave `cheap`.
    """
    rooms = [budget - sum(sizes[i] for i in items) for items in (costly, cheap)]
    swaps: list[list[int]] = [[], *([i] for i in cheap)]  # items to take for the one that leaves `costly`
    best: tuple[int, list[int], list[int]] | None = None
    for leaving in costly:
        for arriving in swaps:
            moved = costs[leaving] - sum(costs[i] for i in arriving)
            tokens = sizes[leaving] - sum(sizes[i] for i in arriving)
            if 0 < moved < gap and -rooms[0] <= tokens <= rooms[1]:
                uneven = abs(gap - 2 * moved)
                if best is None or uneven < best[0]:
                    best = uneven, [leaving], arriving
    return best and best[1:]


def forward_length(sample: Sample) -> int:
    """Tokens of a sample in the forward pass: all but the last."""
    return len(sample.token_ids) - 1


def prefix_group_length(samples: Sequence[Sample], members: PrefixGroup) -> int:
    """Tokens of a prefix group in the forward pass: its prompt once, and completions without their last token."""
    prompt = len(samples[members[0]].prompt_ids)
    return prompt + sum(forward_length(samples[i]) - prompt for i in members)


def attention_pairs(samples: Sequence[Sample], members: PrefixGroup) -> int:
    """Attended (query, key) pairs of a prefix group in the forward pass."""
    prompt = len(samples[members[0]].prompt_ids)
    own = (forward_length(samples[i]) - prompt for i in members)
    return prompt * (prompt + 1) // 2 + sum(n * prompt + n * (n + 1) // 2 for n in own)


def pack(
    samples: Sequence[Sample], prefix_groups: Sequence[PrefixGroup], device: torch.device, version: int = 0,
    multiple: int = 1, processor: ImageProcessor | None = None, least: int = 0,
) -> MicroBatch:  # fmt: skip
    """Tensors of a micro-batch of these prefix groups. `version` is the trainer's version, for lags.

    `processor` is that of a model that reads images. The number of tokens is padded to at least `least`, and to a
    multiple of `multiple`, by segments without sampled tokens that are no longer than the longest sample. Raises
    `ValueError` if recorded experts of a sample do not cover its tokens.
    """
    order = [index for members in prefix_groups for index in members]
    pieces, predicts, segments, end = _lay_out(samples, prefix_groups)
    length = -(-max(end, least) // multiple) * multiple
    longest = max(at.stop for _, at in pieces)  # some models choose rotary frequencies by the largest position
    padding = [range(start, min(start + longest, length)) for start in range(end, length, longest)]
    token_ids, placeholders = _row_tokens(pieces, length - end, processor)
    images = processor.inputs(_images_in_row(pieces, processor.placeholder)) if processor else {}
    return MicroBatch(
        input_ids=concat_to_device([token_ids], torch.long, device),
        positions=_positions(pieces, padding, processor, device),
        segments=Segments.from_ranges(segments, device, padding),
        predicts=concat_to_device(predicts, torch.long, device),
        experts=_packed_experts(pieces, length - end, device),
        order=order,
        padding=length - end,
        images={name: tensor.to(device) for name, tensor in images.items()},
        placeholders=concat_to_device([placeholders], torch.long, device) if placeholders else None,
        **_of_sampled_tokens([samples[index] for index in order], version, device),
    )


def _of_sampled_tokens(samples: Sequence[Sample], version: int, device: torch.device) -> dict[str, Any]:
    """The fields of a `MicroBatch` that have an entry for each sampled token, by name."""

    def joined(parts: Sequence[Any], dtype: torch.dtype = torch.float32) -> Tensor:
        return concat_to_device(parts, dtype, device)

    teacher = [s.teacher for s in samples]
    return {
        "targets": joined([np.asarray(s.token_ids)[np.asarray(s.sampled_positions)] for s in samples], torch.long),
        "temperatures": joined([s.temperatures for s in samples]),
        "behaviour": joined([s.logprobs for s in samples]),
        "advantages": joined([s.advantages for s in samples]),
        "lags": version - joined([s.versions for s in samples], torch.long),
        "sequences": joined([[n] * len(s.sampled_positions) for n, s in enumerate(samples)], torch.long),
        "sampling_mask": SamplingMask.from_token_ids(
            list(chain.from_iterable(s.sampling_mask for s in samples)), device
        ),
        "teacher": joined(teacher) if all(teacher) else None,
    }


def _lay_out(
    samples: Sequence[Sample], prefix_groups: Sequence[PrefixGroup]
) -> tuple[list[tuple[Sample, range]], list[Any], list[SegmentRanges], int]:
    """The row of a micro-batch: each prefix group's prompt, then the further tokens of its samples.

    Returns the token ranges of samples in the order of the row, the indices in the row that predict the sampled tokens
    of each sample, the segments, and the number of tokens.
    """
    pieces: list[tuple[Sample, range]] = []
    predicts: list[Any] = []
    segments: list[SegmentRanges] = []
    end = 0
    for members in prefix_groups:
        prompt = len(samples[members[0]].prompt_ids)
        shared = range(end, end := end + prompt)
        pieces.append((samples[members[0]], range(prompt)))
        if len(members) > 1:
            segments.append((shared, (shared,)))
        for index in members:
            sample = samples[index]
            own = range(end, end := end + forward_length(sample) - prompt)
            pieces.append((sample, range(prompt, forward_length(sample))))
            # A token is predicted by the token before it: the prompt's last, or one of `own`.
            before = np.asarray(sample.sampled_positions) - 1 - prompt
            predicts.append(np.where(before < 0, shared.stop - 1, before + own.start))
            if len(members) == 1:
                whole = range(shared.start, own.stop)
                segments.append((whole, (whole,)))
            elif own:
                segments.append((own, (shared, own)))
    return pieces, predicts, segments, end


def _row_tokens(
    pieces: Sequence[tuple[Sample, range]], padding: int, processor: ImageProcessor | None
) -> tuple[np.ndarray, list[int]]:
    """The token ids of the row, and the indices of placeholders that the policy has sampled: 0 stands for them."""
    token_ids = np.concatenate([*(s.token_ids[at.start : at.stop] for s, at in pieces), np.zeros(padding, np.int32)])
    placeholders = _sampled_placeholders(pieces, processor) if processor else []
    token_ids[placeholders] = 0
    return token_ids, placeholders


def _positions(
    pieces: Sequence[tuple[Sample, range]], padding: Sequence[range], processor: ImageProcessor | None,
    device: torch.device,
) -> Tensor:  # fmt: skip
    own = [range(len(each)) for each in padding]
    if processor is None:
        return concat_to_device([*(at for _, at in pieces), *own], torch.long, device)
    each = [image_positions(s.token_ids, s.images, processor.placeholder)[:, at.start : at.stop].T for s, at in pieces]
    rest = (np.tile(np.asarray(positions)[:, None], 3) for positions in own)
    return concat_to_device([*each, *rest], torch.long, device).T.contiguous()


def _sampled_placeholders(pieces: Sequence[tuple[Sample, range]], processor: ImageProcessor) -> list[int]:
    """Indices in the row of placeholders of images that the policy sampled."""
    found, end = list[int](), 0
    for sample, at in pieces:
        positions = (p for p in sample.sampled_positions if p in at and sample.token_ids[p] == processor.placeholder)
        found += [end + p - at.start for p in positions]
        end += len(at)
    return found


def _images_in_row(pieces: Sequence[tuple[Sample, range]], placeholder: int) -> list[Image]:
    """The images whose first placeholder is in the row's pieces, in the row's order."""
    return [
        image
        for sample, at in pieces
        for start, image in zip(image_starts(sample.token_ids, sample.images, placeholder), sample.images, strict=True)
        if start in at
    ]


def _packed_experts(pieces: Sequence[tuple[Sample, range]], padding: int, device: torch.device) -> Tensor | None:
    """Experts that the engine chose for each token of `pieces`, and -1 for `padding` tokens of padding."""
    recorded = next((_experts(sample) for sample, _ in pieces if sample.experts is not None), None)
    if recorded is None:
        return None
    parts = []
    for sample, at in pieces:
        unrecorded = np.full((len(at), *recorded.shape[1:]), -1)
        parts.append(unrecorded if sample.experts is None else _experts(sample)[at.start : at.stop])
        if len(parts[-1]) != len(at):
            raise ValueError(f"{at.start + len(parts[-1])} tokens have experts, of {forward_length(sample)}")
    return concat_to_device([*parts, np.full((padding, *recorded.shape[1:]), -1)], torch.int16, device)


def _experts(sample: Sample) -> Any:
    assert sample.experts is not None
    return np.concatenate([np.asarray(part, dtype=np.int16) for part in sample.experts])
