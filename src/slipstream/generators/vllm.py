"""vLLM as it is released, as an engine: token ids in, token ids with log-probabilities and exact versions out.

vLLM is driven through its synchronous `LLMEngine`; what has to happen beside the model happens in a worker extension
(`generators.vllm_worker`), vLLM's own way to add methods to its workers. New weights are swapped by one call to the
workers, which they run between two forward passes, in order with them: no pause, no race. The call returns how many
tokens each sequence had drawn before it, counted by the worker that draws them, and that is where versions change.

Prefix caches are keyed by a salt of the version. A sequence that had not drawn a token before a swap is submitted anew,
so that no new sequence reads keys that old weights have written.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slipstream.config import Config
from slipstream.generators.base import GenerationError, Interruption
from slipstream.generators.vllm_adapters import AdapterWeights
from slipstream.generators.vllm_adapters import arguments as adapter_arguments
from slipstream.generators.vllm_calls import Answer, end_with_core
from slipstream.generators.vllm_requests import Drawn, VllmRequest, added, interrupted
from slipstream.generators.vllm_start import cpu_arguments, refuse_head_size, start_vllm
from slipstream.models import dtype_name, dtype_of, end_of_sequence, generation_config, has_experts
from slipstream.rollout import Completion, Sampling
from slipstream.sync.link import Ticket
from slipstream.vllm_releases import core_is_apart, cpu_head_sizes, experts_of, post, refuse_unrecorded_experts

PROCESSED = "processed_logprobs"  # of the distribution that tokens are really drawn from
KEEP = 1  # vLLM's level of sleep in which weights are kept in the host's memory
EXTENSION = "slipstream.generators.vllm_worker.WorkerExtension"


@dataclass(eq=False)
class _Request(VllmRequest):
    """A request of this engine, with the name that the workers know it by."""

    internal: str = ""
    adapter: int = 0
    parameters_for_vllm: Any = None


Counts = Callable[[], Drawn | None]  # before a swap; None as long as that is not known


class VllmEngine:
    """One vLLM engine with the methods of `generators.torch.Engine`. Raises `ConfigError` for what it can't run."""

    def __init__(self, config: Config, version: int = 0, sharers: int = 1, log: Path | None = None) -> None:
        self._llm: Any = start_vllm("generator", lambda: _new_engine(engine_arguments(config, sharers)), log)
        self._eos = end_of_sequence(generation_config(config.model.path), self._llm.model_config.hf_config)
        self._seeded = config.loop.max_lag == 0
        self._vocabulary: int = self._llm.model_config.get_vocab_size()
        self.context: int = self._llm.model_config.max_model_len
        self.version = version
        self._draining = self.asleep = False
        self.tokens_generated = 0
        self.tokens_wasted = 0
        self.busy_seconds = 0.0  # in which there were sequences to go on with
        self._beside = core_is_apart(self._llm)
        self._went_on: float | None = None  # since when that has drawn on, while nobody was in `step`
        self._adapters = AdapterWeights(self._llm, config.loop.max_lag + 2) if config.sync.link == "lora" else None
        self._requests: dict[str, _Request] = {}
        self._unsettled: tuple[Counts, Interruption, list[_Request]] | None = None
        self._late: list[tuple[_Request, Any]] = []  # what finished since a swap that is not settled
        self._aborted: set[_Request] = set()  # since then
        self._waiting: deque[_Request] = deque()  # for the next step that is not one of draining
        self._started = 0
        self._salt = 0
        self._llm.collective_rpc("slipstream_watch")
        if self._beside:
            self._llm.collective_rpc("slipstream_collect_seldom")

    @property
    def busy(self) -> bool:
        return bool(self._requests or self._waiting or not self.settled)

    @property
    def draining(self) -> bool:
        """Whether sequences in flight are finished and no other is begun."""
        return self._draining

    @draining.setter
    def draining(self, value: bool) -> None:
        if value and not self._draining:  # what has drawn nothing waits here, not in vLLM's queue
            for request in [request for request, drawn in self._drawn().items() if not drawn]:
                self._put_back(request)
        self._draining = value

    @property
    def running(self) -> int:
        return len(self._requests)

    def submit(self, key: Hashable, prompt_ids: Sequence[int], sampling: Sampling) -> None:
        """Queue a request; `step` returns its completion under `key`. Raises `GenerationError`."""
        if self.asleep:
            raise RuntimeError("this engine sleeps: nothing may be asked of it before it is woken")
        request = _Request(key, tuple(prompt_ids), sampling)
        request.refuse_impossible(self.context, self._vocabulary, self._llm.model_config.max_logprobs)
        request.parameters_for_vllm = self._parameters(request)
        if self.draining:
            self._waiting.append(request)
        else:
            self._start(request)

    def abort(self, key: Hashable) -> None:
        """Forget a request; unknown keys are ignored, since it may just have finished."""
        self._waiting = deque(r for r in self._waiting if r.key != key)
        for request in [*self._requests.values(), *(r for r, _ in self._late)]:
            if request.key == key:
                self._stop(request)
                if self._unsettled:
                    self._aborted.add(request)

    def drawn(self) -> int:
        """Tokens that the furthest sequence in flight has drawn. The workers are asked even if there is none, so that
        who asks sees that they answer."""
        if not self._requests:
            self._llm.collective_rpc("slipstream_drawn")
        return max(self._drawn().values(), default=0)

    def _drawn(self) -> dict[_Request, int]:
        """Tokens that each sequence in flight has drawn."""
        going_on = [request for request in self._requests.values() if not request.ended]
        if not going_on:
            return {}
        drawn: Drawn = self._llm.collective_rpc("slipstream_drawn")[0]
        counts = {request: drawn.get(request.internal, 0) for request in going_on}
        for request, tokens in counts.items():
            request.ended = tokens is None
        return {request: tokens for request, tokens in counts.items() if tokens is not None}

    def step(self) -> list[tuple[Hashable, Completion | GenerationError]]:
        """Let vLLM go on for one step, if it is awake. Returns what finished, and why what waited can't be begun."""
        refused = []
        while self._waiting and not (self.draining or self.asleep):
            next_one = self._waiting.popleft()
            try:
                self._start(next_one)
            except GenerationError as error:
                refused.append((next_one.key, error))
        finished, began, self._went_on = [], self._went_on, None
        if self._requests and not self.asleep:
            began = began or time.perf_counter()
            outputs = [output for output in self._llm.step() if output.finished]
            ended = time.perf_counter()
            self.busy_seconds += ended - began
            finished = [(request, output) for output in outputs if (request := self._pop(output.request_id))]
            self._went_on = ended if self._requests and self._beside else None
        if self._unsettled:  # asked after the step, whose tokens would have to wait for the answer
            self._late += finished
            finished = self._settle()
        self.tokens_generated += sum(len(output.outputs[0].token_ids) for _, output in finished)
        return [*refused, *((request.key, _outcome(request, output.outputs[0])) for request, output in finished)]

    def swap(self, version: int, apply: Callable[[], Counts], how: Interruption = "continue") -> float:
        """Replace the weights under the running sequences by calling `apply`; what it returns tells later how many
        tokens each had drawn before. Returns the seconds for which the engine was paused. If `apply` raises, the
        version stays.

        Steps go on while the answer is awaited; until then (`settled`) what finishes is kept back.
        """
        if how == "drain" and self._requests:
            raise RuntimeError(f"drain: {self.running} sequences still run; set `draining` and step until none does")
        began = time.perf_counter()
        core = self._llm.engine_core
        recompute = how == "recompute" and not self.asleep  # else all keys and values are gone already
        paused = recompute and self._beside  # in one process nothing runs between two steps
        if paused:
            self._went_on = None
            core.call_utility("pause_scheduler", "keep", False)
        try:
            counts = apply()
            self.version, self.draining = version, False
            self._salt += 1
            if recompute and not self._llm.reset_prefix_cache(reset_running_requests=True):
                raise RuntimeError("vLLM did not drop its keys and values")
        finally:
            if paused:
                core.call_utility("resume_scheduler")
        paused_for = time.perf_counter() - began if recompute else 0.0
        if self._adapters:  # each sequence keeps the one that it began with
            oldest = self._adapters.overflow()
            if how == "retry" or oldest:
                for request, drawn in self._drawn().items():
                    if how == "retry" or request.adapter == oldest:
                        self.tokens_wasted += drawn
                        self._put_back(request)
        else:
            self._unsettled = (counts, how, [r for r in self._requests.values() if not r.ended])
        return paused_for

    def sleep(self, level: int) -> None:
        """Free the memory of keys, values and weights. At level 1 weights come back with `wake`, at 2 by a swap alone.

        Sequences in flight are computed anew when the engine is awake, unless a `swap` says otherwise. On a CPU vLLM
        forgets keys and values, but frees nothing.
        """
        if self._adapters:  # they come back by a swap, but not what they are added to
            level = KEEP
        self._llm.sleep(level, mode="keep")
        self.draining, self.asleep = False, True

    def wake(self, tags: Sequence[str]) -> None:
        """Take memory for "weights" or the "kv_cache" again, and go on once there is both."""
        self._llm.wake_up(list(tags))
        self.asleep = self.asleep and "kv_cache" not in tags

    @property
    def settled(self) -> bool:
        """Whether it is known which version drew which token."""
        return self._unsettled is None

    def _settle(self) -> list[tuple[_Request, Any]]:
        """See whether the workers know by now what had been drawn before the swap. Returns what was kept back."""
        assert self._unsettled is not None
        counts, how, requests = self._unsettled
        drawn = counts()
        if drawn is None:
            return []
        self._unsettled = None
        answered = {request: len(output.outputs[0].token_ids) for request, output in self._late}
        counts_of = [(r, drawn.get(r.internal, 0), answered.get(r, 0)) for r in requests]
        again, wasted = interrupted(counts_of, self.version, how)
        self.tokens_wasted += wasted
        for request in again:
            if request not in self._aborted:
                self._put_back(request)
        kept_back = [(r, output) for r, output in self._late if r not in (*again, *self._aborted)]
        self._late, self._aborted = [], set()
        return kept_back

    def end_with_core(self) -> threading.Event:
        """See `vllm_calls.end_with_core`."""
        return end_with_core(self._llm)

    def load_adapter(self, path: str) -> None:
        """Draw new sequences by the adapter in a PEFT directory, in the place of one that a link brought."""
        assert self._adapters
        self._adapters.load(path)

    def lend(self, shapes: dict[str, list[int]]) -> list[dict[str, str]]:
        """Handles of the tensors that serve parameters of these shapes, of each worker."""
        handles: list[dict[str, str]] = self._llm.collective_rpc("slipstream_lend", args=(shapes,))
        return handles

    def open_weights(self, link: str, offer: Ticket, rank: int) -> WorkerWeights | AdapterWeights:
        """The weights of all workers, as the other end of a link; the first worker has this rank."""
        if self._adapters:
            return self._adapters
        return WorkerWeights(self._llm, link, offer, rank)

    def _parameters(self, request: _Request) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        try:
            return SamplingParams(
                **request.parameters(self.context, self._eos, self._seeded),
                detokenize=bool(request.sampling.stop_strings),
                flat_logprobs=True,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
        except Exception as error:  # of which class depends on the release
            raise GenerationError(f"vLLM refuses the request: {error}") from None

    def _start(self, request: _Request) -> None:
        self._started += 1
        request.begin(str(self._started), self.version)
        prompt = {"prompt_token_ids": list(request.prompt), "cache_salt": str(self._salt)}
        adapter = self._adapters.current if self._adapters else None
        parameters = request.parameters_for_vllm.clone()
        try:
            request.internal = self._llm.add_request(request.name, prompt, parameters, lora_request=adapter)
        except ValueError as error:  # it checks more than its parameters do
            raise GenerationError(f"vLLM refuses the request: {error}") from None
        self._requests[request.name] = request
        if self._adapters:
            request.adapter = self._adapters.began()

    def _put_back(self, request: _Request) -> None:
        """Let it begin anew, from its prompt."""
        self._stop(request)
        self._waiting.append(request)

    def _stop(self, request: _Request) -> None:
        if request.name in self._requests:
            self._llm.abort_request([request.name])  # before its adapter may be unloaded: no pass must look for that
            self._pop(request.name)

    def _pop(self, name: str) -> _Request | None:
        request = self._requests.pop(name, None)
        if not self._requests:
            self._went_on = None
        if request and self._adapters:
            self._adapters.ended(request.adapter)
        return request


class WorkerWeights:
    """`generators.weights.ServedWeights` in vLLM's workers."""

    def __init__(self, llm: Any, link: str, offer: Ticket, rank: int) -> None:
        self._llm, self._at_once = llm, link == "nccl_direct"
        self._held = 0.0
        self._names: list[str] = []
        llm.collective_rpc("slipstream_connect", args=(link, offer, rank))

    def prepare(self, ticket: Ticket) -> None:
        asked = post(self._llm, "slipstream_prepare", ticket)
        self._prepared = Answer(self._llm, "slipstream_prepared", asked)

    def prepared(self) -> bool:
        return bool(self._prepared.get())

    def apply(self) -> Counts:
        """Swap. The result tells how many tokens each request had drawn before, by vLLM's own names, or None as long
        as the workers' devices are not that far; it raises if a worker could not swap, whose weights are undefined."""
        applied = post(self._llm, "slipstream_apply")
        swapped = Answer(self._llm, "slipstream_swapped", applied)
        if self._at_once:  # the weights arrive now, and may fail to
            applied.result()

        def drawn_before() -> Drawn | None:
            answers = swapped.get()
            if answers is None:
                return None
            self._held = max(held for held, _ in answers)
            drawn: Drawn = answers[0][1]
            return drawn

        return drawn_before

    def held(self) -> float:
        """Seconds that the last swap kept the workers from the next forward pass."""
        return self._held

    def check(self, names: Sequence[str]) -> None:
        self._names = list(names)
        asked = post(self._llm, "slipstream_check", self._names)
        self._sums = Answer(self._llm, "slipstream_checked", asked)

    def checked(self) -> dict[str, int] | None:
        sums = self._sums.get()
        return None if sums is None else added(sums, self._names)

    def close(self) -> None:
        self._llm.collective_rpc("slipstream_close")


def _new_engine(arguments: dict[str, Any]) -> Any:
    from vllm import EngineArgs, LLMEngine

    if not torch.cuda.is_available():
        refuse_head_size(arguments["model"], cpu_head_sizes())
    return LLMEngine.from_engine_args(EngineArgs(**arguments))


def engine_arguments(config: Config, sharers: int) -> dict[str, Any]:
    """vLLM's engine arguments for an engine whose GPU has so many processes, itself included; `generator.options` has
    the last word."""
    generator, on_cpu = config.generator, not torch.cuda.is_available()
    colocated = config.sync.placement == "colocated"
    arguments: dict[str, Any] = {
        "model": config.model.path,
        "dtype": dtype_name(config),
        "tensor_parallel_size": generator.tensor_parallel,
        "max_num_seqs": generator.slots,
        "max_model_len": generator.context or None,
        "gpu_memory_utilization": generator.memory or (0.85 if sharers == 1 or colocated else round(0.8 / sharers, 3)),
        "enable_sleep_mode": colocated and not on_cpu,
        "logprobs_mode": PROCESSED,
        "max_logprobs": max(20, config.sampling.top_k),
        "worker_extension_cls": EXTENSION,
        "disable_log_stats": True,
        "seed": config.loop.seed,
    }
    if config.sync.link == "lora":
        arguments |= adapter_arguments(config)
    if config.sync.link == "nccl_direct":
        from vllm.config import WeightTransferConfig

        arguments["weight_transfer_config"] = WeightTransferConfig(backend="nccl")
    if config.algorithm.keep_routing and has_experts(config.model.path):
        refuse_unrecorded_experts(on_cpu)
        arguments["enable_return_routed_experts"] = True
    if on_cpu:
        arguments |= cpu_arguments(config.model.path, dtype_of(config), generator.context, generator.memory)
        arguments |= {"async_scheduling": False}
    return arguments | generator.options


def _outcome(request: _Request, output: Any) -> Completion | GenerationError:
    try:
        return _completion(request, output)
    except GenerationError as error:
        return error


def _completion(request: _Request, output: Any) -> Completion:
    flat = output.logprobs
    firsts = flat.start_indices[: len(output.token_ids)]
    kept = (
        [t for t, p in zip(flat.token_ids[a:b], flat.logprobs[a:b], strict=True) if p > -torch.inf]
        for a, b in zip(firsts, flat.end_indices, strict=False)
    )
    logprobs, experts = [flat.logprobs[i] for i in firsts], experts_of(output)
    return request.completion(output.token_ids, logprobs, output.finish_reason, kept, experts)
