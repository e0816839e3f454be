"""vLLM's scheduler, which reports a sequence once it has ended instead of after each token.

vLLM's core sends each token to the process that asked, with its log-probability as three arrays, which costs both
processes time. A generator needs only sequences that have ended, so the core keeps their tokens until then. Requests
that want tokens earlier get them from vLLM as before.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

PARTS = 64  # arrays of one sequence that are joined into one: they are views of the arrays of all sequences in a step


class Kept:
    """Tokens of a sequence in flight, with their log-probabilities and, of a mixture, the experts that they used.

    A step has as many log-probabilities a token as any of its sequences asked for, of which `width` are for this one
    (None: all).
    """

    def __init__(self, width: int | None) -> None:
        self.tokens: list[int] = []
        self._width = width
        self._logprobs: list[Any] = []
        self._experts: list[NDArray[Any]] = []
        self._prefill_stats: Any = None
        self._events: list[Any] = []  # for vLLM's statistics, which `generator.engine_args` can enable

    def add(self, output: Any) -> None:
        """Keep the tokens of an `EngineCoreOutput`."""
        self.tokens += output.new_token_ids
        self._prefill_stats = self._prefill_stats or output.prefill_stats
        if output.events:
            self._events += output.events
        if output.new_logprobs is not None:
            self._logprobs.append(output.new_logprobs)
            if len(self._logprobs) >= PARTS:
                self._logprobs = [self._join_logprobs()]
        if output.routed_experts is not None:
            self._experts.append(output.routed_experts)
            if len(self._experts) >= PARTS:
                self._experts = [np.concatenate(self._experts)]

    def write(self, output: Any) -> None:
        """Replace the last tokens, in an `EngineCoreOutput`, by all of them."""
        self.add(output)
        output.new_token_ids, output.prefill_stats, output.events = (
            self.tokens,
            self._prefill_stats,
            self._events or None,
        )
        output.new_logprobs = self._join_logprobs() if self._logprobs else None
        output.routed_experts = np.concatenate(self._experts) if self._experts else None

    def _join_logprobs(self) -> Any:
        """The log-probabilities so far as one `LogprobsLists`, the sampled token's first."""
        tokens, logprobs, ranks = zip(*(part[:3] for part in self._logprobs), strict=True)
        width = self._width
        return type(self._logprobs[0])(
            np.concatenate([each[:, :width] for each in tokens]),
            np.concatenate([each[:, :width] for each in logprobs]),
            np.concatenate(ranks),
        )


class ReportsAtEnd:
    """A mixin for vLLM's schedulers."""

    requests: dict[str, Any]  # of vLLM's

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kept: dict[str, Kept] = {}  # by request

    def update_from_output(self, *args: Any, **kwargs: Any) -> dict[int, Any]:
        """As vLLM's, without sequences in flight. The step's message remains, since the generator waits for it."""
        reported: dict[int, Any] = super().update_from_output(*args, **kwargs)  # type: ignore[misc]
        for message in reported.values():
            message.outputs = [output for output in message.outputs if self._reports(output)]
        return reported

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        finished = super().finish_requests(*args, **kwargs)  # type: ignore[misc]
        self.kept = {name: kept for name, kept in self.kept.items() if name in self.requests}
        return finished

    def _reports(self, output: Any) -> bool:
        """Whether this is the end of a sequence, which then has all tokens, or a request that is not kept."""
        kept = self.kept.get(output.request_id)
        if output.finish_reason is not None:
            if kept:
                kept.write(output)
                del self.kept[output.request_id]
            return True
        if kept is None:
            sampling = self.requests[output.request_id].sampling_params
            if not _wanted_at_end(sampling):
                return True
            wanted = sampling.num_logprobs
            kept = self.kept[output.request_id] = Kept(None if wanted in (None, -1) else wanted + 1)
        kept.add(output)
        return False


def create_scheduler(*, vllm_config: Any, **arguments: Any) -> Any:
    """The scheduler of vLLM's core, as vLLM chooses it. For vLLM's argument `scheduler_cls`."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    base = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    scheduler = type(f"{base.__name__}AtEnd", (ReportsAtEnd, base), {})
    return scheduler(vllm_config=vllm_config, **arguments)


def _wanted_at_end(sampling: Any) -> bool:
    """Whether a request gets all its tokens at the end, and vLLM looks for no strings in them before."""
    from vllm.sampling_params import RequestOutputKind

    return bool(
        sampling
        and sampling.output_kind == RequestOutputKind.FINAL_ONLY
        and not sampling.detokenize
        and sampling.prompt_logprobs is None
    )
