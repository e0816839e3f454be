"""vLLM as an engine: token ids in; token ids, log-probabilities and exact versions out.

Drives vLLM's synchronous `LLMEngine`. Weights are received and swapped by `worker_methods`. A swap is one call to the
workers, run between two forward passes. Its reply has the number of tokens that each sequence had sampled before it,
where a version span ends; outputs that finish before the reply are withheld.

Prefix caches are keyed by a salt, new for each version. A sequence without a token at a swap is submitted again, so
that no new sequence reads keys that old weights have written.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.config.schema import Config
from slipstream.errors import UserError
from slipstream.generators.base import AWAKE, GenerationError, Interruption
from slipstream.generators.generator_worker import Engine, GeneratorWorker, OpenWeights
from slipstream.generators.vllm.compat import (
    call_workers,
    core_has_own_process,
    exit_if_core_died,
    exit_when_core_dies,
    refusals,
    routed_experts,
)
from slipstream.generators.vllm.launch import new_engine, start_vllm
from slipstream.generators.vllm.requests import VllmRequest, resolve_in_flight, vllm_prompt
from slipstream.generators.vllm.weights import AdapterWeights, CountsBeforeSwap, VllmWeights
from slipstream.generators.vllm.worker_methods import WorkerMethods
from slipstream.model.images import image_processor
from slipstream.model.inspection import end_of_sequence, generation_config
from slipstream.rollout import Completion, Sampling
from slipstream.runtime.memory import raise_gc_thresholds
from slipstream.sync.link import ConnectionInfo
from slipstream.sync.update import RolledBack

SLEEP_LEVEL_KEEP_WEIGHTS = 1  # vLLM's sleep level that keeps weights in host memory


@dataclass(eq=False)
class _Request(VllmRequest):
    """A request of this engine. `worker_name` is its request id in the workers."""

    worker_name: str = ""
    adapter: int = 0
    vllm_sampling: Any = None


@dataclass(frozen=True)
class _PendingSwap:
    """A swap whose token counts have not arrived, the version before it, and the requests that were in flight."""

    before: int
    counts_before: CountsBeforeSwap
    how: Interruption
    requests: list[_Request]


class VllmEngine:
    """One vLLM engine with the methods of `generators.torch.engine.Engine`.

    Methods are documented there unless they differ. Raises `ConfigError` for a configuration that it can't run.
    """

    def __init__(self, config: Config, version: int = 0, sharers: int = 1, log: Path | None = None) -> None:
        self._llm: Any = start_vllm("generator", lambda: new_engine(config, sharers), log, config.generator.engine_args)
        self._eos = end_of_sequence(generation_config(config.model.path), self._llm.model_config.hf_config)
        self._seeded = config.loop.max_lag == 0
        self._images = image_processor(config.model.path)
        self._vocabulary: int = self._llm.model_config.get_vocab_size()
        self.context: int = self._llm.model_config.max_model_len
        self.version = version
        self._draining = self.asleep = self._cache_dropped = False
        self.tokens_generated = self.tokens_discarded = 0
        self.busy_seconds = 0.0  # with sequences in flight
        self._parallel_core = core_has_own_process(self._llm)
        self._decoding_since: float | None = None  # the core has been decoding since then, outside of `step`
        most = (config.loop.max_lag + 2) * max(1, len(config.policies))  # adapters that may be in use
        self._adapters = AdapterWeights(self._llm, most) if config.sync.link == "lora" else None
        self._policies = frozenset({"", *(policy.name for policy in config.policies)})
        if trained := {policy.name: policy.adapter for policy in config.policies if policy.adapter}:
            self.load_adapters(trained)
        self._requests: dict[str, _Request] = {}
        self._pending_swap: _PendingSwap | None = None
        self._withheld: list[tuple[_Request, Any]] = []  # outputs that finished during the pending swap
        self._aborted: set[_Request] = set()  # during the pending swap
        self._waiting: deque[_Request] = deque()  # to start at the next step that is not draining
        self._started = 0
        self._cache_salt = 0
        call_workers(self._llm, WorkerMethods.slipstream_track_tokens)
        if self._parallel_core:
            call_workers(self._llm, WorkerMethods.slipstream_tune_gc)

    @property
    def busy(self) -> bool:
        return bool(self._requests or self._waiting or not self.versions_known)

    @property
    def draining(self) -> bool:
        """Whether sequences in flight finish and no other starts."""
        return self._draining

    @draining.setter
    def draining(self, value: bool) -> None:
        if value and not self._draining:  # requests without a token wait here instead of in vLLM's queue
            self._requeue([request for request, tokens in self._count_tokens().items() if not tokens])
        self._draining = value

    @property
    def running(self) -> int:
        """Number of requests that vLLM has received and whose results are not returned yet."""
        return len(self._requests)

    @property
    def versions_known(self) -> bool:
        """Whether the version that sampled each token is known: always, unless a swap is pending."""
        return self._pending_swap is None

    def submit(self, key: Hashable, prompt_ids: Sequence[int], sampling: Sampling) -> None:
        if self.asleep:
            raise RuntimeError("this engine sleeps: nothing may be asked of it before it is woken")
        if sampling.policy not in self._policies:
            raise GenerationError(f"this engine serves no policy {sampling.policy!r}")
        request = _Request(key, tuple(prompt_ids), sampling)
        request.validate(self.context, self._vocabulary, self._llm.model_config.max_logprobs)
        request.vllm_sampling = self._vllm_sampling(request)
        if self.draining:
            self._waiting.append(request)
        else:
            self._start(request)

    def abort(self, key: Hashable) -> None:
        self._waiting = deque(r for r in self._waiting if r.key != key)
        for request in [*self._requests.values(), *(r for r, _ in self._withheld)]:
            if request.key == key:
                self._stop([request])
                if self._pending_swap:
                    self._aborted.add(request)

    def step(self) -> list[tuple[Hashable, Completion | GenerationError]]:
        """Run one step of vLLM, if it is awake. Returns finished and refused requests."""
        results: list[tuple[Hashable, Completion | GenerationError]] = self._start_waiting()
        finished = self._step_vllm() if self._requests and not self.asleep else []
        if self._pending_swap:  # polled after the step: its tokens are not delayed by the call
            self._withheld += finished
            finished = self._resolve_swap(self._pending_swap)
        self.tokens_generated += sum(len(output.outputs[0].token_ids) for _, output in finished)
        return [*results, *((request.key, _outcome(request, output.outputs[0])) for request, output in finished)]

    def _start_waiting(self) -> list[tuple[Hashable, Any]]:
        """Start waiting requests. Returns those that vLLM refuses, with the error."""
        refused = []
        while self._waiting and not (self.draining or self.asleep):
            request = self._waiting.popleft()
            try:
                self._start(request)
            except GenerationError as error:
                refused.append((request.key, error))
        return refused

    def _step_vllm(self) -> list[tuple[_Request, Any]]:
        """Finished requests of one step, with their outputs."""
        started, self._decoding_since = self._decoding_since or time.perf_counter(), None
        outputs = [output for output in self._llm.step() if output.finished]
        ended = time.perf_counter()
        self.busy_seconds += ended - started
        finished = [(request, output) for output in outputs if (request := self._pop(output.request_id))]
        self._decoding_since = ended if self._requests and self._parallel_core else None
        return finished

    def longest_in_flight(self) -> int:
        """Tokens of the longest sequence in flight. Calls the workers in any case: the call also probes them."""
        if not self._requests:
            call_workers(self._llm, WorkerMethods.slipstream_count_tokens)
        return max(self._count_tokens().values(), default=0)

    def _count_tokens(self) -> dict[_Request, int]:
        requests = [request for request in self._requests.values() if not request.finished]
        if not requests:
            return {}
        by_name = call_workers(self._llm, WorkerMethods.slipstream_count_tokens)[-1]  # the last stage samples
        counts = {request: by_name.get(request.worker_name, 0) for request in requests}
        for request, tokens in counts.items():
            request.finished = tokens is None
        return {request: tokens for request, tokens in counts.items() if tokens is not None}

    def swap(self, version: int, apply: Callable[[], CountsBeforeSwap], how: Interruption = "continue") -> float:
        """Replace the weights between two forward passes by calling `apply`. Returns the seconds of a reset of the KV
        cache, else 0.0; `VllmWeights.pause_s` has the pause of the weights.

        `apply` returns a function that later returns the tokens which each sequence had sampled before. Until then
        (`versions_known` is False) the engine keeps stepping and withholds outputs. If `apply` raises, the version
        stays.
        """
        if how == "drain" and self._requests:
            raise RuntimeError(f"drain: {self.running} sequences still run; set `draining` and step until none does")
        started, before = time.perf_counter(), self.version
        recompute = how == "recompute" and not self._cache_dropped
        counts_before = self._swap_weights(version, apply, recompute)
        pause_s = time.perf_counter() - started if recompute else 0.0
        if self._adapters:
            self._requeue_for_adapters(self._adapters, how)
        else:
            requests = [r for r in self._requests.values() if not r.finished]
            self._pending_swap = _PendingSwap(before, counts_before, how, requests)
        return pause_s

    def _swap_weights(self, version: int, apply: Callable[[], CountsBeforeSwap], recompute: bool) -> CountsBeforeSwap:
        """Call `apply`, then serve `version`; with `recompute`, reset the KV cache. Returns what `apply` returns."""
        core = self._llm.engine_core
        # A core in this process is paused between two steps.
        pause = recompute and self._parallel_core and not self.asleep
        if pause:
            self._decoding_since = None
            core.call_utility("pause_scheduler", "keep", False)
        try:
            counts_before = apply()
            self.version, self.draining = version, False
            self._cache_salt += 1
            if recompute and not self._llm.reset_prefix_cache(reset_running_requests=True):
                raise UserError("vLLM did not drop its keys and values")
        finally:
            if pause:
                core.call_utility("resume_scheduler")
        return counts_before

    def _requeue_for_adapters(self, adapters: AdapterWeights, how: Interruption) -> None:
        """Restart sequences on the new adapter: with "retry" all, else those of adapters beyond the limit, and those
        without a token.

        vLLM would sample the latter with the adapter that was the newest when they arrived. Others keep their adapter.
        """
        counts = self._count_tokens()
        self._stop([request for request, tokens in counts.items() if not tokens])
        excess = adapters.excess_adapters()
        restart = [r for r, tokens in counts.items() if not tokens or how == "retry" or r.adapter in excess]
        self.tokens_discarded += sum(counts[request] for request in restart)
        self._requeue(restart)

    def _resolve_swap(self, swap: _PendingSwap) -> list[tuple[_Request, Any]]:
        """Apply the swap to the requests in flight, if the counts have arrived. Returns the withheld outputs."""
        try:
            before = swap.counts_before()
        except RolledBack:
            return self._undo_swap(swap)
        if before is None:
            return []
        self._pending_swap = None
        output_tokens = {request: len(output.outputs[0].token_ids) for request, output in self._withheld}
        counts = [(r, before.get(r.worker_name, 0), output_tokens.get(r, 0)) for r in swap.requests]
        restart, discarded = resolve_in_flight(counts, self.version, swap.how)
        self.tokens_discarded += discarded
        self._requeue([request for request in restart if request not in self._aborted])
        return self._release_withheld(restart)

    def _undo_swap(self, swap: _PendingSwap) -> list[tuple[_Request, Any]]:
        """Serve the version before a swap that was rolled back. Returns the withheld outputs."""
        self._pending_swap, self.version = None, swap.before
        for request in (*self._requests.values(), *(request for request, _ in self._withheld)):
            if request not in swap.requests:  # it started after the swap
                request.starts = [(0, swap.before)]
        return self._release_withheld()

    def _release_withheld(self, restarted: Sequence[_Request] = ()) -> list[tuple[_Request, Any]]:
        """The withheld outputs, without those of restarted and aborted requests. Forgets them."""
        finished = [(r, output) for r, output in self._withheld if r not in (*restarted, *self._aborted)]
        self._withheld, self._aborted = [], set()
        return finished

    def sleep(self, level: int) -> None:
        """Stop sampling until `wake`. Above level 0, free the memory of keys, values and weights: at level 1 `wake`
        restores weights, at 2 only a swap does.

        Sequences that lost keys and values are recomputed after `wake`, unless a `swap` says otherwise. On a CPU vLLM
        drops keys and values, but frees no memory.
        """
        if level and (self._adapters or self._images):  # a swap restores neither base weights nor a vision tower
            level = SLEEP_LEVEL_KEEP_WEIGHTS
        self._llm.sleep(level, mode="keep")
        self.draining, self.asleep, self._cache_dropped = False, True, level > 0

    def wake(self, tags: Sequence[str]) -> None:
        self._llm.wake_up(list(tags))
        self.asleep = self.asleep and AWAKE.isdisjoint(tags)
        self._cache_dropped = self._cache_dropped and self.asleep

    def load_adapters(self, paths: Mapping[str, str]) -> None:
        """Start new sequences on adapters in PEFT directories, by policy ("": a single one), not on those of a link."""
        assert self._adapters
        self._adapters.load(paths)

    def export_ipc_handles(self, shapes: dict[str, list[int]]) -> list[dict[str, str]]:
        """IPC handles of each worker's tensors for parameters of these shapes."""
        return call_workers(self._llm, WorkerMethods.slipstream_export_ipc_handles, shapes)

    def open_weights(self, link: str, connection_info: ConnectionInfo, rank: int) -> VllmWeights:
        """The weights of all workers as the engine's end of a link; the first worker has this rank."""
        return self._adapters or VllmWeights(self._llm, link, connection_info, rank)

    def _vllm_sampling(self, request: _Request) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        try:
            parameters = request.parameters(self.context, self._eos, self._seeded)
            if schema := parameters["structured_outputs"]:
                parameters["structured_outputs"] = StructuredOutputsParams(**schema)
            return SamplingParams(
                **parameters,
                detokenize=bool(request.sampling.stop_strings),
                flat_logprobs=True,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
        except Exception as error:  # the class differs between releases
            raise GenerationError(f"vLLM refuses the request: {error}") from None

    def _start(self, request: _Request) -> None:
        self._started += 1
        request.start(str(self._started), self.version)
        prompt = vllm_prompt(request, self._images) | {"cache_salt": str(self._cache_salt)}
        policy = request.sampling.policy
        adapter = self._adapters.current.get(policy) if self._adapters else None
        sampling = request.vllm_sampling.clone()
        try:
            request.worker_name = self._llm.add_request(request.name, prompt, sampling, lora_request=adapter)
        except refusals() as error:  # vLLM validates more than the sampling parameters
            raise GenerationError(f"vLLM refuses the request: {error}") from None
        except Exception:
            exit_if_core_died(self._llm)
            raise
        self._requests[request.name] = request
        if self._adapters:
            request.adapter = self._adapters.acquire(policy)

    def _requeue(self, requests: Sequence[_Request]) -> None:
        """Stop requests, and start them again at the next step, in this order."""
        self._stop(requests)
        self._waiting.extend(requests)

    def _stop(self, requests: Sequence[_Request]) -> None:
        if names := [request.name for request in requests if request.name in self._requests]:
            self._llm.abort_request(names)  # before their adapters are unloaded, which a pass would look up
            for name in names:
                self._pop(name)

    def _pop(self, name: str) -> _Request | None:
        request = self._requests.pop(name, None)
        if not self._requests:
            self._decoding_since = None
        if request and self._adapters:
            self._adapters.release(request.adapter)
        return request


class VllmWorker(GeneratorWorker):
    """A `GeneratorWorker` with vLLM instead of the embedded engine."""

    def _load(self) -> tuple[Engine, OpenWeights]:
        engine = VllmEngine(self._config, sharers=self._sharers, log=self._log)
        raise_gc_thresholds()
        self._closing = exit_when_core_dies(engine._llm)
        return engine, engine.open_weights

    def close(self) -> None:
        self._closing.set()
        super().close()


def _logprobs_and_kept(output: Any) -> tuple[Sequence[float], Iterable[Sequence[int]]]:
    """The log-probability of each token, and the tokens that sampling kept at its position."""
    flat = output.logprobs
    firsts = flat.start_indices[: len(output.token_ids)]
    kept = (
        [t for t, p in zip(flat.token_ids[a:b], flat.logprobs[a:b], strict=True) if p > -math.inf]
        for a, b in zip(firsts, flat.end_indices, strict=False)
    )
    return [flat.logprobs[i] for i in firsts], kept


def _outcome(request: _Request, output: Any) -> Completion | GenerationError:
    logprobs, kept = _logprobs_and_kept(output) if request.records_logprobs else ((), ())
    try:
        return request.completion(output.token_ids, logprobs, output.finish_reason, kept, routed_experts(output))
    except GenerationError as error:
        return error
