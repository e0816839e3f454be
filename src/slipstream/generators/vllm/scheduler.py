"""A scheduler for vLLM that reports a sequence once at its end, instead of after each token.

For each token, vLLM's core sends a message with the log-probability as three arrays, which both processes spend time
on. A generator needs only whole sequences, so the core buffers the tokens. Requests that ask for tokens before the end
get them from vLLM as usual.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Steps after which the arrays of a sequence are joined: each is a view that keeps the arrays of a whole step in memory.
# Each step joins those of one sequence in `CHUNK`: hundreds of joins in one step would delay the next one.
CHUNK = 64


class OutputBuffer:
    """Outputs of one sequence in flight: tokens, log-probabilities and, of a mixture of experts, the routing.

    vLLM returns as many log-probabilities a token as any sequence of the step has asked for. `width` is the number that
    this sequence has asked for (None: all).
    """

    def __init__(self, width: int | None) -> None:
        self.tokens: list[int] = []
        self._width = width
        self._logprobs: list[Any] = []
        self._experts: list[NDArray[Any]] = []
        self._prefill_stats: Any = None
        self._events: list[Any] = []  # for vLLM's statistics, which `generator.engine_args` can enable

    def append(self, output: Any) -> None:
        """Append the tokens of an `EngineCoreOutput`."""
        self.tokens += output.new_token_ids
        self._prefill_stats = self._prefill_stats or output.prefill_stats
        self._events += output.events or ()
        if output.new_logprobs is not None:
            self._logprobs.append(output.new_logprobs)
        if output.routed_experts is not None:
            self._experts.append(output.routed_experts)

    def complete(self, output: Any) -> None:
        """Put the whole sequence into its last `EngineCoreOutput`."""
        self.append(output)
        output.new_token_ids = self.tokens
        output.new_logprobs = self._join_logprobs() if self._logprobs else None
        output.routed_experts = np.concatenate(self._experts) if self._experts else None
        output.prefill_stats = self._prefill_stats
        output.events = self._events or None

    def join(self) -> None:
        """Copy the outputs so far out of the arrays of whole steps."""
        if len(self._logprobs) > 1:
            self._logprobs = [self._join_logprobs()]
        if len(self._experts) > 1:
            self._experts = [np.concatenate(self._experts)]

    def _join_logprobs(self) -> Any:
        """The log-probabilities so far as one `LogprobsLists`, with the sampled token in the first column."""
        tokens, logprobs, ranks = zip(*(part[:3] for part in self._logprobs), strict=True)
        width = self._width
        return type(self._logprobs[0])(
            np.concatenate([each[:, :width] for each in tokens]),
            np.concatenate([each[:, :width] for each in logprobs]),
            np.concatenate(ranks),
        )


class BuffersOutputs:
    """Mixin for vLLM's schedulers: buffers the outputs of sequences in flight."""

    requests: dict[str, Any]  # vLLM's, by name

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.buffers: dict[str, OutputBuffer] = {}  # by name of the request; those to join next come first

    def update_from_output(self, *args: Any, **kwargs: Any) -> dict[int, Any]:
        """vLLM's messages without the outputs that are buffered. A message without outputs is sent, too: the generator
        waits for one in each step."""
        messages: dict[int, Any] = super().update_from_output(*args, **kwargs)  # type: ignore[misc]
        for message in messages.values():
            message.outputs = [output for output in message.outputs if not self._buffer(output)]
        for name in list(itertools.islice(self.buffers, math.ceil(len(self.buffers) / CHUNK))):
            self.buffers[name] = buffer = self.buffers.pop(name)  # to the end
            buffer.join()
        return messages

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        """Abort requests, and discard their buffers."""
        finished = super().finish_requests(*args, **kwargs)  # type: ignore[misc]
        self.buffers = {name: buffer for name, buffer in self.buffers.items() if name in self.requests}
        return finished

    def _buffer(self, output: Any) -> bool:
        """Buffer an output of a sequence in flight, and complete the last one. Returns whether it is buffered."""
        name = output.request_id
        if output.finish_reason is not None:
            if name in self.buffers:
                self.buffers.pop(name).complete(output)
            return False
        if name not in self.buffers:
            sampling = self.requests[name].sampling_params
            if not _wants_only_the_end(sampling):
                return False
            wanted = sampling.num_logprobs
            self.buffers[name] = OutputBuffer(None if wanted in (None, -1) else wanted + 1)
        self.buffers[name].append(output)
        return True


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
        sampling
        and sampling.output_kind == RequestOutputKind.FINAL_ONLY
        and not sampling.detokenize
        and sampling.prompt_logprobs is None
    )
