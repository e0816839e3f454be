"""The embedded generator: continuous batching over a Hugging Face causal language model's own forward pass.

Between two forward passes sequences join and leave, and weights may be swapped. Each pass sees one version of all
weights, and each token is tagged with the version of the pass that sampled it. `Interruption` says what a swap does to
sequences in flight.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from slipstream.generators.base import AWAKE, GenerationError, Interruption, nonfinite_logits_error, validate_prompt
from slipstream.generators.torch.attention import ATTENTION, SlotCache, StepLayout
from slipstream.generators.torch.sampling import Sampler
from slipstream.model.inspection import end_of_sequence
from slipstream.model.logprobs import head_product
from slipstream.model.moe_routing import ExpertRouting
from slipstream.rollout import Completion, Sampling, float32_array, int32_array, version_spans
from slipstream.sync.single_copy import export_ipc_handles

MODEL_TYPES = (
    "gemma2", "gemma3_text", "granite", "llama", "mistral", "mixtral", "olmo2", "olmoe", "phi", "phi3", "qwen2",
    "qwen3", "qwen3_moe",
)  # fmt: skip
LAYER_TYPES = {"full_attention", "sliding_attention"}
REMEDY = 'set generator.engine = "vllm"'
REPLACEMENT = "\ufffd"  # decoded from an incomplete UTF-8 sequence
PROMPT_TOKENS = 4096  # limit of padded prompt tokens in one pass, which delay the running sequences


class Prefill(NamedTuple):
    """Prompt and sampled tokens of a sequence, and its policy. The cache needs the keys of all tokens but the last."""

    policy: str
    ids: tuple[int, ...]


@dataclass(eq=False)
class _Sequence:
    """A request in flight."""

    key: Hashable
    prompt: tuple[int, ...]
    sampling: Sampling
    stop_tokens: frozenset[int]
    limit: int
    stop_bytes: int = 0  # length of the longest stop string
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    sampling_mask: list[Any] = field(default_factory=list)
    experts: list[Any] = field(default_factory=list)
    finish: str | None = None

    @property
    def prefill(self) -> Prefill:
        """What the cache needs before the next token is sampled."""
        return Prefill(self.sampling.policy, (*self.prompt, *self.tokens))

    def restart(self) -> None:
        """Drop all sampled tokens."""
        for values in (self.tokens, self.logprobs, self.versions, self.sampling_mask, self.experts):
            values.clear()


class Engine:
    """Decodes up to `slots` sequences at once. Synchronous and single-threaded: `submit`, then `step` while `busy`.

    `context` bounds prompt plus completion in tokens (0: the model's limit). `tokenizer` is needed for stop strings
    only. `policies` are the names that requests may ask for: those of the model's LoRA adapters, or the one name of a
    model without adapters; empty in a single-policy run. The model is changed: its attention is replaced. Raises
    `GenerationError` for an unsupported model.
    """

    def __init__(
        self, model: Any, *, slots: int = 64, context: int = 0, tokenizer: Any = None, version: int = 0,
        policies: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.model, config = model.eval(), model.config
        validate_supported(config)
        self.model.set_attn_implementation(ATTENTION)
        _use_fast_head(self.model)
        self.slots, self.version = slots, version
        self.context: int = min(context or config.max_position_embeddings, config.max_position_embeddings)
        self.draining = False  # while set, no request joins; `swap` and `sleep` clear it
        self.asleep = False
        self.versions_known = True  # between two steps the version that sampled each token is always known
        self.tokens_generated = 0
        self.tokens_discarded = 0  # generated tokens that `retry` dropped
        self.busy_seconds = 0.0
        self._tokenizer = tokenizer
        self._device = next(model.parameters()).device
        self._cache = SlotCache(config, slots, next(model.parameters()).dtype, self._device)
        self._eos = end_of_sequence(getattr(model, "generation_config", None), model.config)
        self._queue: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._sampler: Sampler | None = None
        self._routing = ExpertRouting(model)
        self.policies, self._adapters = frozenset(policies), None
        if policies:
            from slipstream.generators.torch.adapters import AdapterRows  # imports peft, which takes seconds

            self._adapters = AdapterRows(model)

    @property
    def busy(self) -> bool:
        return bool(self._queue or self._running)

    @property
    def running(self) -> int:
        """Number of unfinished requests that hold a slot."""
        return sum(s.finish is None for s in self._running)

    def export_ipc_handles(self, shapes: dict[str, list[int]]) -> list[dict[str, str]]:
        """CUDA IPC handles of the parameters named in `shapes`, by name: one mapping, of the one process."""
        return [export_ipc_handles({name: p for name, p in self.model.named_parameters() if name in shapes})]

    def longest_in_flight(self) -> int:
        """Sampled tokens of the longest running sequence; 0 without one."""
        return max((len(s.tokens) for s in self._running), default=0)

    def submit(self, key: Hashable, prompt_ids: Sequence[int], sampling: Sampling) -> None:
        """Queue a request; `step` returns its completion under `key`. Raises `GenerationError`."""
        if self.asleep:
            raise RuntimeError("this engine sleeps: nothing may be asked of it before it is woken")
        prompt = tuple(prompt_ids)
        validate_prompt(prompt, self.context, self.model.config.vocab_size)
        if sampling.stop_strings and self._tokenizer is None:
            raise GenerationError("stop strings need a tokenizer")
        if sampling.policy and sampling.policy not in self.policies:
            raise GenerationError(f"this engine serves no policy {sampling.policy!r}")
        if sampling.json_schema:
            raise GenerationError(f"the embedded generator can't follow a JSON schema; {REMEDY}")
        if sampling.record_routing and not self._routing.experts:
            raise GenerationError("record_routing: this model has no experts")
        stop_tokens = frozenset(sampling.stop_tokens) | (frozenset() if sampling.ignore_eos else self._eos)
        limit = min(sampling.max_tokens, self.context - len(prompt))
        stop_bytes = max((len(stop.encode(errors="surrogatepass")) for stop in sampling.stop_strings), default=0)
        self._queue.append(_Sequence(key, prompt, sampling, stop_tokens, limit, stop_bytes))

    def abort(self, key: Hashable) -> None:
        """Drop a request. Unknown keys are ignored: the request may just have finished."""
        self._queue = deque(s for s in self._queue if s.key != key)
        for sequence in self._running:
            if sequence.key == key:
                sequence.finish = "abort"

    def swap(self, version: int, apply: Callable[[], None], how: Interruption = "continue") -> float:
        """Replace the weights under the running sequences by calling `apply`. Returns the seconds it took.

        Call it between two steps, so that each pass sees one version. To drain, set `draining` and `step` while
        `running` first. Afterwards requests may join again. If `apply` raises, the version stays and no sequence is
        recomputed or retried.
        """
        if how == "drain" and self.running:
            raise RuntimeError(f"drain: {self.running} sequences still run; set `draining` and step until none does")
        began = time.perf_counter()
        try:
            apply()
        finally:
            self.draining = False
        self.version = version
        if how in ("recompute", "retry"):
            self._join_again()
        if how == "retry":
            for sequence in self._queue:
                self.tokens_discarded += len(sequence.tokens)
                sequence.restart()
        return time.perf_counter() - began

    def sleep(self, level: int) -> None:
        """Stop sampling until `wake`. Above `level` 0, free the memory of all keys and values; weights stay. Call it
        between two steps.

        Sequences that lost keys and values are recomputed, unless a `swap` says otherwise.
        """
        if level:
            self._join_again()
            self._cache.clear()
        self.draining, self.asleep = False, True

    def wake(self, tags: Sequence[str]) -> None:
        """Continue decoding if `tags` include the "kv_cache", or "scheduling" after `sleep(0)`."""
        self.asleep = self.asleep and AWAKE.isdisjoint(tags)

    def _join_again(self) -> None:
        """Move running sequences to the front of the queue, to be recomputed with their sampled tokens."""
        self._queue.extendleft(s for s in reversed(self._running) if s.finish is None)
        self._running = []

    @torch.inference_mode()
    def step(self) -> list[tuple[Hashable, Completion | GenerationError]]:
        """Sample a token for each running and joining sequence, unless asleep. Returns finished and failed requests."""
        if self.asleep:
            return []
        began = time.perf_counter()
        joining = self._admit()
        if not self._running:
            return []
        row, layout = self._lay_out(joining)
        newest = torch.arange(len(self._running), device=self._device)
        positions = {"position_ids": self._positions[None], "logits_to_keep": newest}
        logits = self.model(input_ids=row[None], use_cache=False, slots=layout, **positions).logits[0]
        if any(s.sampling.record_routing for s in self._running):
            self._record_experts(joining)
        self._sample(logits)
        finished = [(s.key, self._outcome(s)) for s in self._running if s.finish not in (None, "abort")]
        self.tokens_generated += len(self._running)
        self.busy_seconds += time.perf_counter() - began
        return finished

    def _admit(self) -> dict[Prefill, list[int]]:
        """Give free slots to queued requests. Returns the slots of joining sequences by the tokens to compute.

        Running sequences always fill slots `0:len(running)`, so that attention reads one view of the cache. A joining
        sequence takes the slot of a finished one; without one, the last sequence moves into the free slot.
        """
        joining: dict[Prefill, list[int]] = {}
        holes = deque(i for i, s in enumerate(self._running) if s.finish)
        longest = 0
        while self._queue and not self.draining and (holes or len(self._running) < self.slots):
            prefill = self._queue[0].prefill
            if prefill not in joining:
                longest = max(longest, len(prefill.ids))
                if joining and longest * (len(joining) + 1) > PROMPT_TOKENS:
                    break
            slot = holes.popleft() if holes else len(self._running)
            self._running[slot : slot + 1] = [self._queue.popleft()]
            joining.setdefault(prefill, []).append(slot)
            self._sampler = None
        while holes:
            hole = holes.pop()
            last = self._running.pop()
            if hole < len(self._running):
                self._cache.copy(len(self._running), hole, len(last.prompt) + len(last.tokens))
                self._running[hole] = last
            self._sampler = None
        return joining

    def _lay_out(self, joining: dict[Prefill, list[int]]) -> tuple[Tensor, StepLayout]:
        """Token ids of the packed row, and its layout. Sets `_positions`, the position of each token."""
        n = len(self._running)
        row = [s.tokens[-1] if s.tokens else s.prompt[-1] for s in self._running]
        lengths = [len(s.prompt) + len(s.tokens) for s in self._running]
        positions = [length - 1 for length in lengths]
        source, slot, position = list(range(n)), list(range(n)), list(positions)
        policies = [s.sampling.policy for s in self._running]
        longest = max((len(prefill.ids) for prefill in joining), default=1) - 1
        gather: list[list[int]] = []
        scatter: list[int] = []
        for index, ((policy, tokens), slots) in enumerate(joining.items()):
            earlier = range(len(row), len(row) + len(tokens) - 1)
            policies += [policy] * len(earlier)
            row += tokens[:-1]
            positions += range(len(earlier))
            for taken in slots:
                source += earlier
                slot += [taken] * len(earlier)
                position += range(len(earlier))
            # Padding of the same sequence: attention to a masked NaN of another one yields NaN.
            padding = earlier[0] if earlier else 0
            gather.append([*earlier, *[padding] * (longest - len(earlier))])
            scatter += range(index * longest, index * longest + len(earlier))
        if self._adapters:
            self._adapters.set(policies, self._device)
        self._cache.reserve(max(lengths))
        self._positions = self._ids(positions)
        layout = StepLayout(
            self._cache, n, max(lengths), self._ids(lengths), self._ids(slot), self._ids(position),
            *([self._ids(source), self._ids(gather), self._ids(scatter)] if scatter else ()),
        )  # fmt: skip
        return self._ids(row), layout

    def _ids(self, values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._device)

    def _sample(self, logits: Tensor) -> None:
        """Append the next token of each running sequence, and set `finish` of those that end with it."""
        if self._sampler is None:
            self._sampler = Sampler([s.sampling for s in self._running], self._device)
        sampled = self._sampler.sample(logits, np.array([len(s.tokens) for s in self._running], dtype=np.uint64))
        for i, sequence in enumerate(self._running):
            token = sampled.tokens[i]
            if not math.isfinite(sampled.logprobs[i]):
                sequence.finish = sequence.finish or "failed"
                self._cache.clear_slot(i)  # attention to a masked NaN would make the slot's next sequence NaN
            sequence.tokens.append(token)
            sequence.logprobs.append(sampled.logprobs[i])
            sequence.versions.append(self.version)
            if sequence.sampling.record_sampling_mask:
                sequence.sampling_mask.append(sampled.sampling_masks[i])
            if sequence.finish is None:
                if token in sequence.stop_tokens or (sequence.sampling.stop_strings and self._stops(sequence)):
                    sequence.finish = "stop"
                elif len(sequence.tokens) >= sequence.limit:
                    sequence.finish = "length"

    def _stops(self, sequence: _Sequence) -> bool:
        """Whether the newest token completes a stop string.

        A token has at least one byte, so the longest stop string has at most `stop_bytes` tokens. The decoded tail must
        start at a character, which has at most 4 bytes: byte-level tokenizers decode a run of byte tokens that starts
        inside a character to replacement characters alone.
        """
        first = len(sequence.tokens) - sequence.stop_bytes - len(REPLACEMENT.encode())
        for start in range(first, first - 4, -1):
            text = self._tokenizer.decode(sequence.tokens[max(0, start) :])
            if any(stop in text for stop in sequence.sampling.stop_strings):
                return True
            if start <= 0 or REPLACEMENT not in text:
                return False
        return False

    def _record_experts(self, joining: dict[Prefill, list[int]]) -> None:
        """Record the experts that each layer chose for each token of this pass, for requests with `record_routing`.

        A recomputed sequence keeps the experts with which its tokens were sampled.
        """
        narrow = torch.uint8 if self._routing.experts <= 256 else torch.int16
        routes = self._routing.chosen().to("cpu", narrow).numpy()
        row = len(self._running)
        for (_, tokens), slots in joining.items():
            for sequence in (self._running[slot] for slot in slots):
                if sequence.sampling.record_routing and not sequence.tokens:
                    sequence.experts.append(routes[row : row + len(tokens) - 1])
            row += len(tokens) - 1
        for slot, sequence in enumerate(self._running):
            if sequence.sampling.record_routing:
                sequence.experts.append(routes[slot : slot + 1])

    def _outcome(self, sequence: _Sequence) -> Completion | GenerationError:
        sampling = sequence.sampling
        if sequence.finish == "failed":
            return nonfinite_logits_error(len(sequence.tokens))
        return Completion(
            prompt_ids=int32_array(sequence.prompt),
            token_ids=int32_array(sequence.tokens),
            logprobs=float32_array(sequence.logprobs),
            spans=version_spans(sequence.versions),
            finish_reason=sequence.finish or "",
            temperature=sampling.temperature,
            sampling_mask=tuple(sequence.sampling_mask) if sampling.record_sampling_mask else None,
            experts=np.concatenate(sequence.experts) if sampling.record_routing else None,
            policy=sampling.policy,
        )


def _use_fast_head(model: Any) -> None:
    """Make the output head compute its product by `head_product`, if it is on a CPU."""
    head: Any = model.get_output_embeddings()
    if type(head) is nn.Linear and getattr(head, "bias", None) is None and head.weight.device.type == "cpu":
        vars(head)["forward"] = MethodType(_head_forward, head)  # a bound method, so that it is copied with its module


def _head_forward(head: Any, hidden: Tensor) -> Tensor:
    return head_product(hidden, head.weight)


def validate_supported(config: Any) -> None:
    """Raise `GenerationError` with the reason for a model that the engine is not tested to serve exactly."""
    if config.model_type not in MODEL_TYPES:
        raise GenerationError(
            f"the embedded generator can't serve model type {config.model_type!r}; {REMEDY} (it serves "
            f"{', '.join(MODEL_TYPES)})"
        )
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES)
    if unknown:
        raise GenerationError(f"the embedded generator can't serve layers of type {', '.join(unknown)}; {REMEDY}")
    if getattr(config, "use_bidirectional_attention", None):
        raise GenerationError(
            f"the embedded generator can't serve a {config.model_type} with use_bidirectional_attention; {REMEDY}"
        )
