"""A scheduler for vLLM with less work for each token: on a fast GPU vLLM's processor time limits the rate of tokens.

For each token, vLLM's core sends a message with the log-probability as three arrays, which both processes spend time
on. A generator needs only whole sequences, so the core buffers the tokens, and reports a sequence once at its end.
Requests that ask for tokens before the end get them from vLLM as usual. The KV-cache manager is called only for tokens
that begin or complete a block.

vLLM's bookkeeping of a sampled token is deferred: `Request` gets the tokens of up to `DEFERRED` steps at once. vLLM's
asynchronous scheduler already schedules the next token of a sequence before it knows the last one. It counts unknown
tokens as placeholders, so that more of them change nothing that it schedules. vLLM's first model runner reads known
tokens of sequences that were paused, so nothing is deferred with it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Container
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Steps after which the routing of a sequence is joined: each part is a view that keeps the array of a whole step in
# memory. Each step joins that of one sequence in `CHUNK`: hundreds of joins in one step would delay the next one.
CHUNK = 64
DEFERRED = 16  # steps of which vLLM gets a sequence's tokens at once
# Attributes of vLLM's scheduler, in one version or another, for features that read each token in its step.
TOKEN_READERS = (
    "num_spec_tokens",
    "connector",
    "aux_output_connector",
    "enable_return_routed_experts",
    "return_sampling_mask",
)


class StepLogprobs:
    """The log-probabilities of a step, a vLLM `LogprobsLists` in `lists`, of which sequences copy rows as bytes.

    vLLM would make three views for each row, which take several times as long and keep the arrays in memory.
    """

    def __init__(self, lists: Any) -> None:
        self.lists = lists
        self.arrays = [np.ascontiguousarray(array) for array in lists[:3]]  # tokens, log-probabilities, ranks
        self.bytes = [array.data.cast("B") for array in self.arrays]
        self.itemsizes = [array.itemsize for array in self.arrays]
        self.width: int = self.arrays[0].shape[1]

    def slice_request(self, index: int, positions: int) -> tuple[int, int]:
        """What vLLM calls for the rows of a request: here a note of them, see `rows`."""
        return index, positions

    def rows(self, index: int, positions: int) -> range:
        starts = self.lists.cu_num_generated_tokens
        first = starts[index] if starts else index
        return range(first, first + positions)


class SequenceLogprobs:
    """The log-probabilities of a sequence, of `width` tokens (None: of all that the step has), as bytes."""

    def __init__(self, step: StepLogprobs, width: int | None) -> None:
        self._kind, self._width = type(step.lists), step.width if width is None else width
        self._dtypes = [array.dtype for array in step.arrays]
        self._tokens, self._logprobs, self._ranks = bytearray(), bytearray(), bytearray()

    def append(self, step: StepLogprobs, row: int) -> None:
        """Append a row of a step: the rank, and the first `width` of the row's token ids and log-probabilities."""
        if self._width > step.width:
            raise ValueError(f"vLLM returned {step.width} log-probabilities for a token instead of {self._width}")
        first = row * step.width
        last, (tokens, logprobs, ranks), (token, logprob, rank) = first + self._width, step.bytes, step.itemsizes
        self._tokens += tokens[first * token : last * token]
        self._logprobs += logprobs[first * logprob : last * logprob]
        self._ranks += ranks[row * rank : row * rank + rank]

    def collect(self) -> Any:
        """All rows as vLLM's `LogprobsLists`, with the sampled token in the first column."""
        parts = zip((self._tokens, self._logprobs, self._ranks), self._dtypes, strict=True)
        tokens, logprobs, ranks = (np.frombuffer(part, dtype) for part, dtype in parts)
        return self._kind(tokens.reshape(-1, self._width), logprobs.reshape(-1, self._width), ranks)


class OutputBuffer:
    """Outputs of one sequence in flight: tokens, log-probabilities and, of a mixture of experts, the routing.

    vLLM returns as many log-probabilities a token as any sequence of the step has asked for. `width` is the number that
    this sequence has asked for (None: all). vLLM does not know the last `deferred` tokens yet. It has to know at once a
    token in `stops`, all tokens from number `defer_until` on, and one token in `DEFERRED`, which `phase` chooses. After
    a sequence was `preempted`, tokens that were in flight then may still arrive.
    """

    def __init__(self, width: int | None, defer_until: int = 0, stops: Container[int] = (), phase: int = 0) -> None:
        self.tokens: list[int] = []
        self.deferred = 0
        self.preempted = False
        self._width = width
        self._defer_until, self._stops, self._phase = defer_until, stops, phase
        self._logprobs: SequenceLogprobs | None = None
        self._experts: list[NDArray[Any]] = []
        self._prefill_stats: Any = None
        self._events: list[Any] = []  # for vLLM's statistics, which `generator.engine_args` can enable

    def append(self, output: Any, step: StepLogprobs | None) -> None:
        """Append the tokens of a step's `EngineCoreOutput`, except the first ones, which `defer` has appended."""
        tokens, self.deferred = output.new_token_ids[self.deferred :], 0
        self.tokens += tokens
        self._prefill_stats = self._prefill_stats or output.prefill_stats
        self._events += output.events or ()
        if step and output.new_logprobs:
            self._logprobs = self._logprobs or SequenceLogprobs(step, self._width)
            for row in step.rows(output.new_logprobs[0], len(tokens)):
                self._logprobs.append(step, row)
        if output.routed_experts is not None:
            self._experts.append(output.routed_experts)

    def complete(self, output: Any, step: StepLogprobs | None) -> None:
        """Put the whole sequence into its last `EngineCoreOutput`."""
        self.append(output, step)
        output.new_token_ids = self.tokens
        output.new_logprobs = self._logprobs.collect() if self._logprobs else None
        output.routed_experts = np.concatenate(self._experts) if self._experts else None
        output.prefill_stats = self._prefill_stats
        output.events = self._events or None

    def defer(self, sampled: list[int], step: StepLogprobs | None, row: int) -> bool:
        """Append the sampled token, and return True, if vLLM can get it later. Else return False."""
        number = len(self.tokens)
        if number >= self._defer_until or not (number + self._phase) % DEFERRED:
            return False
        if len(sampled) != 1 or sampled[0] in self._stops:
            return False
        self.tokens += sampled
        self.deferred += 1
        if step and self._logprobs:
            self._logprobs.append(step, row)
        return True

    def join(self) -> None:
        """Copy the routing so far out of the arrays of whole steps."""
        if len(self._experts) > 1:
            self._experts = [np.concatenate(self._experts)]


class BuffersOutputs:
    """Mixin for vLLM's schedulers: buffers the outputs of sequences in flight."""

    requests: dict[str, Any]  # vLLM's, by name
    kv_cache_manager: Any
    max_model_len: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.buffers: dict[str, OutputBuffer] = {}  # by name of the request; those to join next come first
        self.defers = can_defer(self)
        self._phases = itertools.cycle(range(DEFERRED))  # so that few sequences end their deferral in the same step
        skip_needless_allocations(self.kv_cache_manager)

    def update_from_output(self, scheduled: Any, results: Any) -> dict[int, Any]:
        """vLLM's messages without the outputs that are buffered. A message without outputs is sent, too: the generator
        waits for one in each step."""
        from vllm.v1.engine import EngineCoreOutputs

        step = StepLogprobs(results.logprobs) if results.logprobs and len(results.logprobs.logprobs) else None
        if step:
            results.logprobs = step
        if self.defers:
            scheduled = self._defer(scheduled, results, step)
        messages: dict[int, Any] = super().update_from_output(scheduled, results)  # type: ignore[misc]
        if self.defers and not messages:
            messages[0] = EngineCoreOutputs()
        for message in messages.values():
            message.outputs = [output for output in message.outputs if not self._buffer(output, step)]
        for name in list(itertools.islice(self.buffers, math.ceil(len(self.buffers) / CHUNK))):
            self.buffers[name] = buffer = self.buffers.pop(name)  # to the end
            buffer.join()
        return messages

    def _defer(self, scheduled: Any, results: Any, step: StepLogprobs | None) -> Any:
        """What was scheduled, without sequences whose token is deferred. Others get their earlier deferred tokens."""
        numbers: dict[str, int] = {}
        rows, tokens = results.req_id_to_index, results.sampled_token_ids
        for name, number in scheduled.num_scheduled_tokens.items():
            if buffer := self.buffers.get(name):
                row = rows[name]
                if buffer.preempted:
                    buffer.preempted = not _runs_again(self.requests[name])
                elif number == 1 and buffer.defer(tokens[row], step, row):
                    continue
                elif buffer.deferred:
                    tokens[row] = [*buffer.tokens[-buffer.deferred :], *tokens[row]]
            numbers[name] = number + (buffer.deferred if buffer else 0)
        return dataclasses.replace(scheduled, num_scheduled_tokens=numbers)

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        """Give vLLM the deferred tokens of a request, then preempt it: vLLM computes all its tokens again."""
        if buffer := self.buffers.get(request.request_id):
            self._report_deferred(request, buffer)
            buffer.preempted = True
        super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]

    def _report_deferred(self, request: Any, buffer: OutputBuffer) -> None:
        """Give vLLM the deferred tokens of a request."""
        if not buffer.deferred:
            return
        if hasattr(request, "num_in_flight_tokens"):  # not in vLLM 0.25
            request.num_in_flight_tokens -= buffer.deferred
        self._update_request_with_output(request, buffer.tokens[-buffer.deferred :])  # type: ignore[attr-defined]
        buffer.deferred = 0

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        """Abort requests, and discard their buffers."""
        finished = super().finish_requests(*args, **kwargs)  # type: ignore[misc]
        self.buffers = {name: buffer for name, buffer in self.buffers.items() if name in self.requests}
        return finished

    def _new_buffer(self, request: Any) -> OutputBuffer:
        """A buffer for a request. The last tokens are not deferred: vLLM schedules none beyond the limit."""
        sampling = request.sampling_params
        width = None if sampling.num_logprobs in (None, -1) else sampling.num_logprobs + 1
        if not self.defers or request.use_structured_output or sampling.repetition_detection:
            return OutputBuffer(width)
        limit = min(request.max_tokens, self.max_model_len - request.num_prompt_tokens)
        stops = {sampling.eos_token_id, *(sampling.stop_token_ids or ())}
        return OutputBuffer(width, limit - 2 * DEFERRED, stops, next(self._phases))

    def _buffer(self, output: Any, step: StepLogprobs | None) -> bool:
        """Buffer an output of a sequence in flight, and complete the last one. Returns whether it is buffered."""
        name, ended = output.request_id, output.finish_reason is not None
        if name not in self.buffers:
            request = None if ended else self.requests[name]
            if not request or not request.sampling_params or not _wants_only_the_end(request.sampling_params):
                if step and output.new_logprobs:
                    output.new_logprobs = step.lists.slice_request(*output.new_logprobs)
                return False
            self.buffers[name] = self._new_buffer(request)
        if ended:
            self.buffers.pop(name).complete(output, step)
        else:
            self.buffers[name].append(output, step)
        return not ended


def can_defer(scheduler: Any) -> bool:
    """Whether nothing that vLLM does in this engine needs each token at once."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    reads = any(getattr(scheduler, name, None) for name in TOKEN_READERS)
    return isinstance(scheduler, AsyncScheduler) and bool(scheduler.use_v2_model_runner) and not reads


def _runs_again(request: Any) -> bool:
    """Whether a request that was preempted runs, and no token that was in flight then is to come."""
    from vllm.v1.request import RequestStatus

    stale = getattr(request, "num_stale_output_tokens", 0) or getattr(request, "async_tokens_to_discard", 0)
    return request.status == RequestStatus.RUNNING and not stale


def skip_needless_allocations(manager: Any) -> None:
    """Let vLLM's KV-cache manager return at once for a token that neither begins nor completes a block.

    In each step it looks for a block for each sequence, which takes most of the time of scheduling a step.
    """
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    groups, allocate = manager.coordinator.single_type_managers, manager.allocate_slots
    if len(groups) != 1 or type(groups[0]) is not FullAttentionManager:
        return
    size: int = groups[0].block_size

    def allocate_slots(request: Any, num_new_tokens: int, num_lookahead_tokens: int = 0, **more: Any) -> Any:
        decodes = num_new_tokens == 1 and not num_lookahead_tokens and not more  # only running requests have no more
        if decodes and 0 < request.num_computed_tokens % size < size - 1:  # the token before is in the same block
            return manager.empty_kv_cache_blocks
        return allocate(request, num_new_tokens, num_lookahead_tokens=num_lookahead_tokens, **more)

    manager.allocate_slots = allocate_slots


def create_scheduler(*, vllm_config: Any, **arguments: Any) -> Any:
    """Create the scheduler that vLLM would choose, with the mixin. vLLM calls it by its argument `scheduler_cls`."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    base = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    scheduler = type(f"Buffering{base.__name__}", (BuffersOutputs, base), {})
    return scheduler(vllm_config=vllm_config, **arguments)


def _wants_only_the_end(sampling: Any) -> bool:
    """Whether a request asks for its tokens at the end, and vLLM has to search no text for stop strings before."""
    from vllm.sampling_params import RequestOutputKind

    return bool(
        sampling.output_kind == RequestOutputKind.FINAL_ONLY
        and not sampling.detokenize
        and sampling.prompt_logprobs is None
    )
