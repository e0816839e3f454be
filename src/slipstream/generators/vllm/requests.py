"""A request to vLLM, in-process or over HTTP: its sampling parameters, and the version that sampled each token."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from slipstream.errors import UserError
from slipstream.generators.base import GenerationError, Interruption, nonfinite_logits_error, validate_prompt
from slipstream.model.images import ImageProcessor, InvalidImages, collapse, decode_image
from slipstream.rollout import Completion, Sampling, VersionSpan, float32_array, int32_array

LEASE_S = 30.0  # after which a silent run's claim on a server expires
MAX_SEED = 2**63 - 1  # vLLM takes a signed 64-bit seed

# Sampled tokens by vLLM's request id; None for a finished request. A request that never started is missing.
TokenCounts = dict[str, int | None]


@dataclass(eq=False)
class VllmRequest:
    """A request in flight. `starts` has (first token, version) of each version that sampled from it, the first at 0.

    `finished` is whether the workers are done with it; its output may still be on the way.
    """

    key: Hashable
    prompt: tuple[int, ...]
    sampling: Sampling
    name: str = ""
    starts: list[tuple[int, int]] = field(default_factory=list)
    finished: bool = False

    def start(self, name: str, version: int) -> None:
        """Record that the request is sent to vLLM under this name while `version` is served."""
        self.name, self.starts, self.finished = name, [(0, version)], False

    def validate(self, context: int, vocabulary: int, max_logprobs: int) -> None:
        """Raise `GenerationError` if no engine of this context, vocabulary and `max_logprobs` can serve it."""
        validate_prompt(self.prompt, context, vocabulary)
        if not self.sampling.record_sampling_mask:
            return
        most = vocabulary if max_logprobs == -1 else max_logprobs
        if not self.sampling.top_k:
            raise GenerationError(
                "vLLM does not return all tokens that top_p or a JSON schema kept; set sampling.top_k too, to 64 for "
                "example"
            )
        if self.sampling.top_k > most:
            raise GenerationError(
                f"vLLM returns at most {most} tokens that top_k kept, and top_k is {self.sampling.top_k}; lower it, or "
                "raise generator.engine_args.max_logprobs (of a server, --max-logprobs)"
            )

    @property
    def records_logprobs(self) -> bool:
        return self.sampling.record_logprobs or self.sampling.record_sampling_mask

    def parameters(self, context: int, eos: Collection[int], seeded: bool) -> dict[str, Any]:
        """vLLM's sampling parameters, by the names that its Python and HTTP interfaces share.

        `context` is the most tokens of a sequence: `max_tokens` is at most what the prompt leaves of it. `eos` are the
        model's end tokens. Without `seeded`, vLLM does not get the seed.
        """
        sampling = self.sampling
        return {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "max_tokens": min(sampling.max_tokens, context - len(self.prompt)),
            "stop_token_ids": [*(() if sampling.ignore_eos else eos), *sampling.stop_tokens],
            # vLLM's is the tokenizer's, which may differ from the model's. A grammar ends with vLLM's.
            "ignore_eos": not sampling.json_schema,
            "stop": list(sampling.stop_strings),
            # A random number generator for each sequence costs time, and only synchronous runs are reproducible.
            "seed": sampling.seed & MAX_SEED if seeded else None,
            # Without them a step of vLLM takes its processes less time.
            "logprobs": sampling.top_k if sampling.record_sampling_mask else 0 if self.records_logprobs else None,
            # Applied to the logits, so log-probabilities are under it, and the tokens that it removes have -inf.
            "structured_outputs": {"json": sampling.json_schema} if sampling.json_schema else None,
        }

    def completion(
        self, tokens: Sequence[int], logprobs: Iterable[float], finish_reason: str, kept: Iterable[Sequence[int]],
        experts: Any = None,
    ) -> Completion:  # fmt: skip
        """The completion of these tokens, with version spans. `logprobs` are empty unless they are recorded.

        Raises `GenerationError` if vLLM has failed, or for a log-probability that is not finite: the logits were no
        distribution.
        """
        if finish_reason == "error":
            schema = ": it can't follow this JSON schema" if self.sampling.json_schema else ""
            raise GenerationError(f"vLLM has failed to sample the request{schema}")
        logprobs = tuple(logprobs)
        if broken := next((i for i, logprob in enumerate(logprobs, 1) if not math.isfinite(logprob)), 0):
            raise nonfinite_logits_error(broken)
        starts = [(min(start, len(tokens)), version) for start, version in self.starts]
        ends = [*(start for start, _ in starts[1:]), len(tokens)]
        spans = [VersionSpan(v, start, end) for (start, v), end in zip(starts, ends, strict=True) if start < end]
        greedy, masked = self.sampling.temperature == 0, self.sampling.record_sampling_mask
        same = 0.0 if greedy else None if self.records_logprobs else math.nan
        return Completion(
            prompt_ids=int32_array(self.prompt),
            token_ids=int32_array(tokens),
            logprobs=float32_array(logprobs) if same is None else float32_array((same,)) * len(tokens),
            spans=tuple(spans),
            finish_reason=finish_reason,
            temperature=self.sampling.temperature,
            sampling_mask=tuple(sorted(set(tokens)) for tokens in kept) if masked else None,
            experts=experts if self.sampling.record_routing else None,
            policy=self.sampling.policy,
        )


AnyRequest = TypeVar("AnyRequest", bound=VllmRequest)


def vllm_prompt(request: VllmRequest, images: ImageProcessor | None) -> dict[str, Any]:
    """The prompt of a request as vLLM takes it: with one placeholder for each image. Raises `GenerationError`."""
    if images is None:
        return {"prompt_token_ids": list(request.prompt)}
    try:
        token_ids = collapse(request.prompt, request.sampling.images, images.placeholder)
        decoded = [decode_image(image.data) for image in request.sampling.images]
    except InvalidImages as error:
        raise GenerationError(str(error)) from None
    return {"prompt_token_ids": token_ids} | ({"multi_modal_data": {"image": decoded}} if decoded else {})


def resolve_in_flight(
    counts: Iterable[tuple[AnyRequest, int | None, int]], version: int, how: Interruption
) -> tuple[list[AnyRequest], int]:
    """Apply a swap to `version` to the requests in flight. Returns the requests to restart, and the tokens discarded.

    `counts` has for each request the tokens sampled before the swap (None: finished before it) and the tokens of its
    output (0: no output yet). Requests that continue get a span of `version` from there on. A request without a token
    restarts, too: a sequence must not start on keys that old weights have written.
    """
    restart, discarded = [], 0
    for request, sampled, output in counts:
        if sampled is None or 0 < output <= sampled:
            request.finished = True
        elif how == "retry" or not sampled:
            discarded += max(sampled, output)
            restart.append(request)
        else:
            request.starts.append((sampled, version))
    return restart, discarded


def same_checksums(workers: Sequence[Mapping[str, str]]) -> dict[str, int]:
    """Checksums of adapters, which each worker has whole. Raises `UserError` if they differ."""
    if any(each != workers[0] for each in workers):
        raise UserError("vLLM's workers have different adapters")
    return {name: int(value) for name, value in workers[0].items()}


def sum_checksums(shards: Sequence[Mapping[str, str]], names: Iterable[str], stages: int = 1) -> dict[str, int]:
    """Checksum of each parameter: the sum of the checksums of its shards in the workers of a pipeline stage.

    Workers are in order of their stage. Raises `UserError` for a parameter that no stage holds, or of which two stages
    hold different values.
    """
    each, sums = len(shards) // stages, {}
    for name in names:
        held = [shards[i : i + each] for i in range(0, len(shards), each) if name in shards[i]]
        found = {sum(int(shard[name]) for shard in stage) for stage in held}
        if len(found) != 1:
            raise UserError(f"vLLM's pipeline stages hold {len(found)} values of {name} instead of one")
        sums[name] = found.pop()
    return sums
