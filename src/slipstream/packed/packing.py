"""From samples to micro-batches: planned as plain indices, then turned into tensors.

A micro-batch is one row of tokens without padding. Samples that begin with the same prompt are laid out behind one copy
of it, each a *segment* that attends to the prompt and to itself:

    tokens    prompt  a a a a  b b b      attention   prompt to prompt, a to prompt + a, b to prompt + b
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.packed.attention import Run, Segments, tensor
from slipstream.packed.kept import Kept
from slipstream.rollout import Sample

Bundle = list[int]  # indices of samples behind one copy of their prompt
EVEN = 0.002  # of the fuller of two micro-batches: no difference between them


@dataclass(frozen=True)
class MicroBatch:
    """Tokens of one forward pass, and an entry for each of those that the policy drew and that are trained on.

    `input_ids` and `positions` `[tokens]`. `predicts` are the tokens whose output predicts a drawn one; `targets`,
    `temperatures`, `behaviour`, `advantages`, `lags` (in versions) and `sequences` (which sample it is of) `[drawn]` go
    with them, `teacher` `[drawn]` if all have one, and `kept` are the ids that top-k/top-p left there (None: all).
    `experts` `[tokens, layers, experts per token]` are those that generation chose, -1 where they are not known (None:
    nowhere). `order[i]` is the index in the step of the i-th sample here. A `filler` keeps a rank in step with
    others and counts nothing.
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
    kept: Kept | None
    experts: Tensor | None
    order: Sequence[int]
    teacher: Tensor | None = None
    filler: bool = False


def bundle(samples: Sequence[Sample], budget: int, share: bool = True, ranks: int = 1) -> list[Bundle]:
    """Samples with one prompt, and one choice of experts for it, together: as many as fit into `budget` tokens, and
    into half of what each of several ranks gets, or a few long groups would leave ranks without work."""
    if ranks > 1:
        budget = min(budget, sum(map(length, samples)) // (2 * ranks))
    bundles: list[Bundle] = []
    open_bundles: dict[tuple[bytes, bytes], tuple[Bundle, int]] = {}
    for index, sample in enumerate(samples):
        prompt = sample.prompt_ids
        own = length(sample) - len(prompt)
        key = prompt.tobytes(), b"" if sample.experts is None else _experts(sample)[: len(prompt)].tobytes()
        members, used = open_bundles.get(key, ([], 0))
        if not members or used + own > budget:
            members, used = [], len(prompt)
            bundles.append(members)
        members.append(index)
        if share:
            open_bundles[key] = members, used + own
    return bundles


def plan(
    sizes: Sequence[int], budget: int, ranks: int = 1, costs: Sequence[int] | None = None
) -> list[list[list[int]]]:
    """Which items go into which micro-batch of which rank: `[rank][micro-batch]` lists of indices.

    Every rank gets the same number of micro-batches, of at most `budget` tokens each unless one item alone is longer,
    and about the same work: `costs` are what an item of so many tokens takes, in any unit (None: its tokens). A rank
    may get empty micro-batches.
    """
    costs = sizes if costs is None else costs
    count = max(1, -(-sum(sizes) // (budget * ranks)))
    while True:
        bins = _fill(sizes, budget, count * ranks)
        if bins:
            _even_out(bins, costs, sizes, budget)
            bins.sort(key=lambda items: -sum(costs[i] for i in items))
            # Neighbours in cost go to different ranks, so that ranks wait little for each other in any round.
            return [bins[rank::ranks] for rank in range(ranks)]
        count += 1


def _fill(sizes: Sequence[int], budget: int, count: int) -> list[list[int]] | None:
    """Items into `count` bins of `budget`, the largest first into the emptiest; None if they do not fit."""
    bins: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        emptiest = min(range(count), key=loads.__getitem__)
        if bins[emptiest] and loads[emptiest] + sizes[index] > budget:
            return None
        bins[emptiest].append(index)
        loads[emptiest] += sizes[index]
    return bins


def _even_out(bins: list[list[int]], costs: Sequence[int], sizes: Sequence[int], budget: int) -> None:
    """Trade items between the dearest bin and others as long as that leaves both of them less dear than it was. One
    that no trade makes less dear is left out of it, and the next dearest goes on."""
    loads = [sum(costs[i] for i in items) for items in bins]
    left = list(range(len(bins)))
    while left:
        dearest = max(left, key=loads.__getitem__)
        gaps = [(other, loads[dearest] - loads[other]) for other in sorted(left, key=loads.__getitem__)]
        uneven = [(other, gap) for other, gap in gaps if gap > EVEN * loads[dearest]]
        traded = ((other, _trade(bins[dearest], bins[other], gap, costs, sizes, budget)) for other, gap in uneven)
        found = next(((other, trade) for other, trade in traded if trade), None)
        if not found:
            left.remove(dearest)
            continue
        other, (given, taken) = found
        for target, items in ((dearest, taken), (other, given)):
            bins[target] = [i for i in bins[target] if i not in (*given, *taken)] + items
            loads[target] = sum(costs[i] for i in bins[target])


def _trade(
    dearer: Sequence[int], cheaper: Sequence[int], gap: int, costs: Sequence[int], sizes: Sequence[int], budget: int
) -> tuple[list[int], list[int]] | None:
    """The item to give away, and the one to take for it if any, that make two bins most alike, of which one costs `gap`
    more, and keep both within the budget; None if none does."""
    rooms = [budget - sum(sizes[i] for i in items) for items in (dearer, cheaper)]
    takes: list[list[int]] = [[], *([i] for i in cheaper)]
    best: tuple[int, list[int], list[int]] | None = None
    for given in dearer:
        for taken in takes:
            moved = costs[given] - sum(costs[i] for i in taken)
            tokens = sizes[given] - sum(sizes[i] for i in taken)
            if 0 < moved < gap and -rooms[0] <= tokens <= rooms[1]:
                uneven = abs(gap - 2 * moved)
                if best is None or uneven < best[0]:
                    best = uneven, [given], taken
    return best and best[1:]


def length(sample: Sample) -> int:
    """Tokens that go into the forward pass: the last one predicts nothing."""
    return len(sample.token_ids) - 1


def bundle_length(samples: Sequence[Sample], members: Bundle) -> int:
    """Tokens of a bundle in the forward pass."""
    prompt = len(samples[members[0]].prompt_ids)
    return prompt + sum(length(samples[i]) - prompt for i in members)


def bundle_pairs(samples: Sequence[Sample], members: Bundle) -> int:
    """Pairs of a query and a key that it sees, of a bundle in the forward pass."""
    prompt = len(samples[members[0]].prompt_ids)
    own = (length(samples[i]) - prompt for i in members)
    return prompt * (prompt + 1) // 2 + sum(n * prompt + n * (n + 1) // 2 for n in own)


def pack(
    samples: Sequence[Sample], bundles: Sequence[Bundle], device: torch.device, version: int = 0, multiple: int = 1
) -> MicroBatch:
    """Tensors for these bundles of `samples`. Lags are counted from `version`.

    The tokens are a multiple of `multiple`, made so by a last sequence of which nothing is drawn.
    """
    order = [index for members in bundles for index in members]
    pieces: list[tuple[Sample, range]] = []  # which tokens of which sample, in the order of the row
    predicts: list[Any] = []
    segments: list[Run] = []
    end = 0
    for members in bundles:
        prompt = len(samples[members[0]].prompt_ids)
        shared = range(end, end := end + prompt)
        pieces.append((samples[members[0]], range(prompt)))
        if len(members) > 1:
            segments.append((shared, (shared,)))
        for index in members:
            sample = samples[index]
            own = range(end, end := end + length(sample) - prompt)
            pieces.append((sample, range(prompt, length(sample))))
            # What predicts a token is the one before it: the prompt's last, or its own, which lie from own.start on.
            before = np.asarray(sample.drawn) - 1 - prompt
            predicts.append(np.where(before < 0, shared.stop - 1, before + own.start))
            if len(members) == 1:
                whole = range(shared.start, own.stop)
                segments.append((whole, (whole,)))
            elif own:
                segments.append((own, (shared, own)))
    if left := -end % multiple:
        rest = range(end, end + left)
        segments.append((rest, (rest,)))
    chosen = [samples[index] for index in order]

    def of(name: str) -> list[Any]:
        return [getattr(sample, name) for sample in chosen]

    return MicroBatch(
        input_ids=tensor([*(s.token_ids[at.start : at.stop] for s, at in pieces), [0] * left], torch.long, device),
        positions=tensor([*(at for _, at in pieces), range(left)], torch.long, device),
        segments=Segments.of(segments, device),
        predicts=tensor(predicts, torch.long, device),
        targets=tensor([np.asarray(s.token_ids)[np.asarray(s.drawn)] for s in chosen], torch.long, device),
        temperatures=tensor(of("temperatures"), torch.float32, device),
        behaviour=tensor(of("logprobs"), torch.float32, device),
        advantages=tensor(of("advantages"), torch.float32, device),
        lags=version - tensor(of("versions"), torch.long, device),
        sequences=tensor([[n] * len(s.drawn) for n, s in enumerate(chosen)], torch.long, device),
        kept=Kept.of(list(chain.from_iterable(of("kept"))), device),
        experts=_packed_experts(pieces, left, device),
        order=order,
        teacher=tensor(of("teacher"), torch.float32, device) if all(of("teacher")) else None,
    )


def _packed_experts(pieces: Sequence[tuple[Sample, range]], left: int, device: torch.device) -> Tensor | None:
    """What generation chose for each token of these pieces, and of `left` more that fill the row."""
    known = next((_experts(sample) for sample, _ in pieces if sample.experts is not None), None)
    if known is None:
        return None
    parts = []
    for sample, at in pieces:
        unknown = np.full((len(at), *known.shape[1:]), -1)
        parts.append(unknown if sample.experts is None else _experts(sample)[at.start : at.stop])
        if len(parts[-1]) != len(at):
            raise ValueError(f"{at.start + len(parts[-1])} tokens have experts, of {length(sample)}")
    return tensor([*parts, np.full((left, *known.shape[1:]), -1)], torch.int16, device)


def _experts(sample: Sample) -> Any:
    assert sample.experts is not None
    return np.concatenate([np.asarray(part, dtype=np.int16) for part in sample.experts])
