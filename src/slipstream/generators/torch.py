"""The embedded generator: continuous batching over a Hugging Face causal language model's own forward pass.

Consumes requests, produces completions; between two forward passes sequences join and leave, and weights may be
swapped. Each pass sees one version of all weights, and each token is tagged with the version of the pass that drew it.
What becomes of a sequence that outlives a swap is the caller's choice, swap by swap (`Interruption`).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from slipstream.generators.attention import ATTENTION, SlotCache, StepLayout
from slipstream.generators.base import EngineFailed, GenerationError, Interruption, refuse_prompt, refused_logits
from slipstream.generators.clock import Clock, Slots
from slipstream.generators.sampling import Sampler
from slipstream.models import end_of_sequence
from slipstream.rollout import Completion, Sampling, ids, numbers, spans_of
from slipstream.routing import Routing
from slipstream.sync.single_copy import lend

SERVED = ("gemma3_text", "llama", "mistral", "mixtral", "olmoe", "qwen2", "qwen3", "qwen3_moe")
INSTEAD = 'set generator.kind = "vllm"'
LAYER_TYPES = {"full_attention", "sliding_attention"}
REPLACEMENT = "\ufffd"  # of bytes that are no character
LARGE_HEAD = 2**24  # weights of a language-model head that is read from memory, not from a cache, in each pass
PROMPT_TOKENS = 4096  # padded prompt tokens in one pass: bounds how long running sequences wait for joining ones


@dataclass(eq=False)
class _Sequence:
    """A request in flight."""

    key: Hashable
    prompt: tuple[int, ...]
    sampling: Sampling
    stop_tokens: frozenset[int]
    limit: int
    stop_bytes: int = 0  # of the longest stop string
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)
    experts: list[Any] = field(default_factory=list)
    finish: str | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        """What has to be in the cache, but for the last, before the next token: all of it when the sequence joins."""
        return (*self.prompt, *self.tokens)

    def forget(self) -> None:
        """Back to the prompt."""
        for drawn in (self.tokens, self.logprobs, self.versions, self.kept, self.experts):
            drawn.clear()


class Engine:
    """A model with `slots` places for sequences. Synchronous and single-threaded: `submit`, then `step` while `busy`.

    `context` bounds prompt plus completion (0: the model's own limit). `tokenizer` is needed for stop strings only.
    Raises `GenerationError` for a model that it can't serve.
    """

    def __init__(
        self, model: Any, *, slots: int = 64, context: int = 0, tokenizer: Any = None, version: int = 0
    ) -> None:
        self.model = model.eval()
        config = self.model.config
        refuse_unserved(config)
        self.model.set_attn_implementation(ATTENTION)
        _speed_up_head(self.model)
        self.slots = slots
        self.context: int = min(context or config.max_position_embeddings, config.max_position_embeddings)
        self.version = version
        self.draining = False  # while set, nothing joins; `swap` and `sleep` clear it
        self.asleep = False
        self.tokens_generated = 0
        self.tokens_wasted = 0  # of those generated: thrown away by `retry`
        self.busy_seconds = 0.0
        self._tokenizer = tokenizer
        self._device = next(model.parameters()).device
        self._cache = SlotCache(config, slots, next(model.parameters()).dtype, self._device)
        self._eos = end_of_sequence(getattr(model, "generation_config", None), model.config)
        self._queue: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._sampler: Sampler | None = None
        self._routing = Routing(model)

    @property
    def busy(self) -> bool:
        return bool(self._queue or self._running)

    @property
    def running(self) -> int:
        """Requests that hold a slot and want another token."""
        return sum(s.finish is None for s in self._running)

    def lend(self, shapes: dict[str, list[int]]) -> list[dict[str, str]]:
        """Handles of the tensors that serve parameters of these shapes, of the one process that has them."""
        return [lend({name: p for name, p in self.model.named_parameters() if name in shapes})]

    @property
    def settled(self) -> bool:
        """Whether it is known which version drew which token: always, between two steps."""
        return True

    def drawn(self) -> int:
        """Tokens that the furthest running sequence has drawn."""
        return max((len(s.tokens) for s in self._running), default=0)

    @property
    def load(self) -> int:
        """Requests accepted and not finished."""
        return len(self._queue) + len(self._running)

    def submit(self, key: Hashable, prompt_ids: Sequence[int], sampling: Sampling) -> None:
        """Queue a request; `step` returns its completion under `key`. Raises `GenerationError`."""
        if self.asleep:
            raise RuntimeError("this engine sleeps: nothing may be asked of it before it is woken")
        prompt = tuple(prompt_ids)
        refuse_prompt(prompt, self.context, self.model.config.vocab_size)
        if sampling.stop_strings and self._tokenizer is None:
            raise GenerationError("stop strings need a tokenizer")
        if sampling.record_experts and not self._routing.experts:
            raise GenerationError("record_experts: this model has no experts")
        stop_tokens = frozenset(sampling.stop_tokens) | (frozenset() if sampling.ignore_eos else self._eos)
        limit = min(sampling.max_tokens, self.context - len(prompt))
        stop_bytes = max((len(stop.encode(errors="surrogatepass")) for stop in sampling.stop_strings), default=0)
        self._queue.append(_Sequence(key, prompt, sampling, stop_tokens, limit, stop_bytes))

    def abort(self, key: Hashable) -> None:
        """Forget a request; unknown keys are ignored, since it may just have finished."""
        self._queue = deque(s for s in self._queue if s.key != key)
        for sequence in self._running:
            if sequence.key == key:
                sequence.finish = "abort"

    def swap(self, version: int, apply: Callable[[], None], how: Interruption = "continue") -> float:
        """Replace the weights under the running sequences by calling `apply`. Returns the seconds it took.

        Called between two steps, so no pass sees two versions. To drain, set `draining` and `step` while `running`
        first. Either way requests may join again afterwards; if `apply` raises, that is all that changes.
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
                self.tokens_wasted += len(sequence.tokens)
                sequence.forget()
        return time.perf_counter() - began

    def sleep(self, level: int) -> None:
        """Free the memory of all keys and values; weights stay at every `level`. Called between two steps.

        Sequences in flight join again when the engine is awake, with every token, unless a `swap` says otherwise.
        """
        self._join_again()
        self._cache.clear()
        self.draining, self.asleep = False, True

    def wake(self, tags: Sequence[str]) -> None:
        """Go on, once there is room for the "kv_cache"."""
        self.asleep = self.asleep and "kv_cache" not in tags

    def _join_again(self) -> None:
        """Queue what runs, before all that waits: it is computed anew, prompt and what it has drawn."""
        self._queue.extendleft(s for s in reversed(self._running) if s.finish is None)
        self._running = []

    @torch.inference_mode()
    def step(self) -> list[tuple[Hashable, Completion | GenerationError]]:
        """One forward pass, none while asleep: a token for all that run and join. Returns what finished or failed."""
        if self.asleep:
            return []
        began = time.perf_counter()
        joining = self._admit()
        if not self._running:
            return []
        row, layout = self._lay_out(joining)
        newest = torch.arange(len(self._running), device=self._device)
        logits = self.model(
            input_ids=row[None],
            position_ids=self._positions[None],
            use_cache=False,
            logits_to_keep=newest,
            slots=layout,
        ).logits[0]
        if any(s.sampling.record_experts for s in self._running):
            self._record_experts(joining)
        self._draw(logits)
        finished = [(s.key, self._outcome(s)) for s in self._running if s.finish not in (None, "abort")]
        self.tokens_generated += len(self._running)
        self.busy_seconds += time.perf_counter() - began
        return finished

    def _admit(self) -> dict[tuple[int, ...], list[int]]:
        """Give free slots to queued requests. Returns the slots of joining sequences by what they have to compute.

        Running sequences always fill slots `0:len(running)`, so that attention reads one view of the cache. A joining
        sequence takes the slot of a finished one; where none joins, the last sequence moves into the hole.
        """
        joining: dict[tuple[int, ...], list[int]] = {}
        holes = deque(i for i, s in enumerate(self._running) if s.finish)
        longest = 0
        while self._queue and not self.draining and (holes or len(self._running) < self.slots):
            ids = self._queue[0].ids
            if ids not in joining:
                longest = max(longest, len(ids))
                if joining and longest * (len(joining) + 1) > PROMPT_TOKENS:
                    break
            slot = holes.popleft() if holes else len(self._running)
            self._running[slot : slot + 1] = [self._queue.popleft()]
            joining.setdefault(ids, []).append(slot)
            self._sampler = None
        while holes:
            hole = holes.pop()
            last = self._running.pop()
            if hole < len(self._running):
                self._cache.copy(len(self._running), hole, len(last.prompt) + len(last.tokens))
                self._running[hole] = last
            self._sampler = None
        return joining

    def _lay_out(self, joining: dict[tuple[int, ...], list[int]]) -> tuple[Tensor, StepLayout]:
        """The packed row of token ids for this pass, and where its tokens belong."""
        n = len(self._running)
        row = [s.tokens[-1] if s.tokens else s.prompt[-1] for s in self._running]
        lengths = [len(s.prompt) + len(s.tokens) for s in self._running]
        positions = [length - 1 for length in lengths]
        source, slot, place = list(range(n)), list(range(n)), list(positions)
        longest = max(map(len, joining), default=1) - 1
        gather: list[list[int]] = []
        scatter: list[int] = []
        for index, (tokens, slots) in enumerate(joining.items()):
            earlier = range(len(row), len(row) + len(tokens) - 1)
            row += tokens[:-1]
            positions += range(len(earlier))
            for taken in slots:
                source += earlier
                slot += [taken] * len(earlier)
                place += range(len(earlier))
            padding = earlier[0] if earlier else 0  # its own: a masked NaN of another sequence would still reach it
            gather.append([*earlier, *[padding] * (longest - len(earlier))])
            scatter += range(index * longest, index * longest + len(earlier))
        self._cache.reserve(max(lengths))
        self._positions = self._ids(positions)
        layout = StepLayout(
            self._cache, n, max(lengths), self._ids(lengths), self._ids(slot), self._ids(place),
            *([self._ids(source), self._ids(gather), self._ids(scatter)] if scatter else ()),
        )  # fmt: skip
        return self._ids(row), layout

    def _ids(self, values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._device)

    def _draw(self, logits: Tensor) -> None:
        """Sample every running sequence's next token and see which of them end with it."""
        if self._sampler is None:
            self._sampler = Sampler([s.sampling for s in self._running], self._device)
        drawn = self._sampler.draw(logits, np.array([len(s.tokens) for s in self._running], dtype=np.uint64))
        for i, sequence in enumerate(self._running):
            token = drawn.tokens[i]
            if not math.isfinite(drawn.logprobs[i]):
                sequence.finish = sequence.finish or "failed"
                self._cache.clear_slot(i)  # a masked NaN would still reach the slot's next sequence
            sequence.tokens.append(token)
            sequence.logprobs.append(drawn.logprobs[i])
            sequence.versions.append(self.version)
            if sequence.sampling.record_kept:
                sequence.kept.append(drawn.kept[i])
            if sequence.finish is None:
                if token in sequence.stop_tokens or (sequence.sampling.stop_strings and self._stops(sequence)):
                    sequence.finish = "stop"
                elif len(sequence.tokens) >= sequence.limit:
                    sequence.finish = "length"

    def _stops(self, sequence: _Sequence) -> bool:
        """Whether the newest token completes a stop string.

        A token is at least one byte, so that many tokens spell the longest string. The tail must start where a
        character starts, and a character has at most 4 bytes: tokenizers that spell characters in byte tokens decode a
        run of them to nothing but replacement characters if its first one is incomplete.
        """
        first = len(sequence.tokens) - sequence.stop_bytes - len(REPLACEMENT.encode())
        for start in range(first, first - 4, -1):
            text = self._tokenizer.decode(sequence.tokens[max(0, start) :])
            if any(stop in text for stop in sequence.sampling.stop_strings):
                return True
            if start <= 0 or REPLACEMENT not in text:
                return False
        return False

    def _record_experts(self, joining: dict[tuple[int, ...], list[int]]) -> None:
        """Keep which experts each layer chose for every token of this pass, for the sequences that ask.

        A sequence that joins again keeps those that it was drawn with.
        """
        narrow = torch.uint8 if self._routing.experts <= 256 else torch.int16
        routes = self._routing.chosen().to("cpu", narrow).numpy()
        at = len(self._running)
        for tokens, slots in joining.items():
            for sequence in (self._running[slot] for slot in slots):
                if sequence.sampling.record_experts and not sequence.tokens:
                    sequence.experts.append(routes[at : at + len(tokens) - 1])
            at += len(tokens) - 1
        for slot, sequence in enumerate(self._running):
            if sequence.sampling.record_experts:
                sequence.experts.append(routes[slot : slot + 1])

    def _outcome(self, sequence: _Sequence) -> Completion | GenerationError:
        sampling = sequence.sampling
        if sequence.finish == "failed":
            return refused_logits(len(sequence.tokens))
        return Completion(
            prompt_ids=ids(sequence.prompt),
            token_ids=ids(sequence.tokens),
            logprobs=numbers(sequence.logprobs),
            spans=spans_of(sequence.versions),
            finish_reason=sequence.finish or "",
            temperature=sampling.temperature,
            kept=tuple(sequence.kept) if sampling.record_kept else None,
            experts=np.concatenate(sequence.experts) if sampling.record_experts else None,
        )


class TorchGenerator:
    """An engine in this process as a `Generator`: steps are taken between turns of the event loop."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._slots = Slots(engine.slots)
        self._waiting: dict[Hashable, asyncio.Future[Completion]] = {}
        self._stepping: asyncio.Task[None] | None = None
        self._keys = 0

    @property
    def version(self) -> int:
        return self.engine.version

    def session(self) -> TorchSession:
        """For the requests of one episode."""
        return TorchSession(self)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, clock: Clock | None = None) -> Completion:
        """As `Generator.generate`. The episode's `clock` is stopped while the request waits for a slot."""
        self._keys += 1
        key = self._keys
        self.engine.submit(key, prompt_ids, sampling)
        future = self._waiting[key] = asyncio.get_running_loop().create_future()
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step())
        try:
            with self._slots.request(clock or Clock()):
                completion: Completion = await future
            return completion
        finally:
            self._waiting.pop(key, None)
            self.engine.abort(key)

    async def close(self) -> None:
        if self._stepping is not None:
            self._stepping.cancel()

    async def _step(self) -> None:
        await asyncio.sleep(0)  # let every caller of this turn of the loop submit first
        while self.engine.busy:
            try:
                finished = self.engine.step()
            except Exception as error:  # or who waits would wait for ever
                for future in self._waiting.values():
                    if not future.done():
                        future.set_exception(EngineFailed(f"the engine failed: {error}"))
                return
            for key, outcome in finished:
                if key in self._waiting and not self._waiting[key].done():
                    if isinstance(outcome, GenerationError):
                        self._waiting[key].set_exception(outcome)
                    else:
                        self._waiting[key].set_result(outcome)
            await asyncio.sleep(0)


class TorchSession:
    """A `TorchGenerator` as one episode sees it, with the episode's clock."""

    def __init__(self, generator: TorchGenerator) -> None:
        self.clock = Clock()
        self._generator = generator

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """As `Generator.generate`."""
        return await self._generator.generate(prompt_ids, sampling, self.clock)


def _speed_up_head(model: Any) -> None:
    """Let oneDNN multiply by a large float32 head on a CPU.

    For 4 to 32 rows oneDNN takes 0.5 to 0.8 of the time of MKL, which first packs all of the weights.
    """
    head: Any = model.get_output_embeddings()
    offered = torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")  # private: a release may drop it
    large = head.weight.numel() >= LARGE_HEAD and head.weight.dtype == torch.float32
    if offered and large and head.weight.device.type == "cpu" and type(head) is nn.Linear:
        vars(head)["forward"] = MethodType(_onednn_linear, head)  # a method is copied with its module


def _onednn_linear(linear: Any, hidden: Tensor) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(hidden, linear.weight, linear.bias, "none", [], "")
    return product


def refuse_unserved(config: Any) -> None:
    """Raise `GenerationError`, naming the reason, for a model that the engine has not been shown to serve exactly."""
    if config.model_type not in SERVED:
        raise GenerationError(
            f"the embedded generator can't serve model type {config.model_type!r}; {INSTEAD} (it serves "
            f"{', '.join(SERVED)})"
        )
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES)
    if unknown:
        raise GenerationError(f"the embedded generator can't serve layers of type {', '.join(unknown)}; {INSTEAD}")
    for option in ("attn_logit_softcapping", "use_bidirectional_attention"):
        if getattr(config, option, None):
            raise GenerationError(f"the embedded generator can't serve a {config.model_type} with {option}; {INSTEAD}")
