"""A request to vLLM, in this process or over HTTP: what is asked, and which version drew which token of the answer."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from slipstream.generators.base import GenerationError, Interruption, refuse_prompt, refused_logits
from slipstream.rollout import Completion, Sampling, VersionSpan, ids, numbers

CLAIM = 30.0  # seconds for which a server is a run's that says nothing
SEEDS = 2**63 - 1  # as many bits as vLLM takes

# Tokens that requests have drawn, by vLLM's names; None of one that has ended. One that is missing was never begun.
Drawn = dict[str, int | None]


@dataclass(eq=False)
class VllmRequest:
    """A request in flight. `starts` has (first token, version) for every version that drew of it, the first at 0.
    `ended` is whether the workers are known to be done with it; its answer may be on the way still."""

    key: Hashable
    prompt: tuple[int, ...]
    sampling: Sampling
    name: str = ""
    starts: list[tuple[int, int]] = field(default_factory=list)
    ended: bool = False

    def begin(self, name: str, version: int) -> None:
        """It is sent to vLLM under this name, to be drawn by this version."""
        self.name, self.starts, self.ended = name, [(0, version)], False

    def refuse_impossible(self, context: int, vocabulary: int, max_logprobs: int) -> None:
        """Raise `GenerationError` for what no engine of this context, vocabulary and `max_logprobs` can serve."""
        refuse_prompt(self.prompt, context, vocabulary)
        if not self.sampling.record_kept:
            return
        most = vocabulary if max_logprobs == -1 else max_logprobs
        if not self.sampling.top_k:
            raise GenerationError("vLLM can't tell which tokens top_p kept; set sampling.top_k too, to 64 for example")
        if self.sampling.top_k > most:
            raise GenerationError(
                f"vLLM tells at most {most} tokens that top_k kept, and top_k is {self.sampling.top_k}; lower it, or "
                "raise generator.options.max_logprobs (of a server, --max-logprobs)"
            )

    def parameters(self, context: int, eos: Collection[int], seeded: bool) -> dict[str, Any]:
        """vLLM's sampling parameters, by the names that its Python and its HTTP interface share."""
        sampling = self.sampling
        return {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "max_tokens": min(sampling.max_tokens, context - len(self.prompt)),
            "stop_token_ids": [*(() if sampling.ignore_eos else eos), *sampling.stop_tokens],
            "ignore_eos": True,  # which is the tokenizer's, and need not be the model's
            "stop": list(sampling.stop_strings),
            # A generator of random numbers for each sequence costs time, and only a synchronous run can repeat itself.
            "seed": sampling.seed & SEEDS if seeded else None,
            "logprobs": sampling.top_k if sampling.record_kept else 0,
        }

    def completion(
        self,
        tokens: Sequence[int],
        logprobs: Iterable[float],
        finish_reason: str,
        kept: Iterable[Sequence[int]],
        experts: Any = None,
    ) -> Completion:
        """The completion that these tokens are, each with the version that drew it.

        Raises `GenerationError` if a log-probability is not finite: the token was drawn from no distribution.
        """
        logprobs = tuple(logprobs)
        if broken := next((i for i, logprob in enumerate(logprobs, 1) if not math.isfinite(logprob)), 0):
            raise refused_logits(broken)
        starts = [(min(start, len(tokens)), version) for start, version in self.starts]
        ends = [*(start for start, _ in starts[1:]), len(tokens)]
        spans = [VersionSpan(v, start, end) for (start, v), end in zip(starts, ends, strict=True) if start < end]
        greedy = self.sampling.temperature == 0
        return Completion(
            prompt_ids=ids(self.prompt),
            token_ids=ids(tokens),
            logprobs=numbers((0.0,)) * len(tokens) if greedy else numbers(logprobs),
            spans=tuple(spans),
            finish_reason=finish_reason,
            temperature=self.sampling.temperature,
            kept=tuple(sorted(set(left)) for left in kept) if self.sampling.record_kept else None,
            experts=experts if self.sampling.record_experts else None,
        )


R = TypeVar("R", bound=VllmRequest)


def interrupted(drawn: Iterable[tuple[R, int | None, int]], version: int, how: Interruption) -> tuple[list[R], int]:
    """What a swap to `version` does to requests, each with the tokens that it had drawn before, None if it had ended by
    then, and those of its answer, 0 if there is none yet. Returns those that have to start again, and the tokens that
    this wastes. Of the others, one that went on has `version` as the one that draws from there on.

    One without a token starts again, too, so that no new sequence reads keys that old weights have written.
    """
    again, wasted = [], 0
    for request, tokens, answered in drawn:
        if tokens is None or 0 < answered <= tokens:
            request.ended = True
        elif how == "retry" or not tokens:
            wasted += max(tokens, answered)
            again.append(request)
        else:
            request.starts.append((tokens, version))
    return again, wasted


def added(parts: Sequence[Mapping[str, str]], names: Iterable[str]) -> dict[str, int]:
    """Checksums of whole parameters from those of the workers' parts."""
    return {name: sum(int(part[name]) for part in parts) for name in names}
