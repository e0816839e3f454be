"""vLLM as it is released, as an engine: token ids in, token ids with log-probabilities and exact versions out.

vLLM is driven through its synchronous `LLMEngine`; what has to happen beside the model happens in a worker extension
(`generators.vllm_worker`), vLLM's own way to add methods to its workers. New weights are swapped by one call to the
workers, which they run between two forward passes, in order with them: no pause, no race. The call returns how many
tokens each sequence had drawn before it, counted by the worker that draws them, and that is where versions change.

Prefix caches are keyed by a salt of the version. A sequence that had not drawn a token before a swap is submitted anew,
so that no new sequence reads keys that old weights have written.
"""

from __future__ import annotations

import importlib.util
import os
import re
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from slipstream.config import Config, ConfigError
from slipstream.generators.base import GenerationError, Interruption
from slipstream.models import end_of_sequence, generation_config
from slipstream.rollout import Completion, Sampling, VersionSpan
from slipstream.sync.link import Ticket

EXTENSION = "slipstream.generators.vllm_worker.WorkerExtension"
FAILURE = re.compile(r"\b((?:\w+\.)*\w*Error: .+)")
POLL = 0.005  # seconds between two questions whether weights have arrived
CPU_CACHE = 2**28  # bytes of keys and values on a CPU, where vLLM would take a share of all memory
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a forked process could not use the GPU
}


@dataclass(eq=False)
class _Request:
    """A request in flight. `starts` has (first token, version) for every version that drew of it, the first at 0."""

    key: Hashable
    prompt: tuple[int, ...]
    sampling: Sampling
    name: str = ""
    internal: str = ""
    starts: list[tuple[int, int]] = field(default_factory=list)


class VllmEngine:
    """One vLLM engine with the methods of `generators.torch.Engine`. Raises `ConfigError` for what it can't run."""

    def __init__(self, config: Config, version: int = 0, shared_gpu: bool = False, log: Path | None = None) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise ConfigError('generator.kind = "vllm" needs vLLM: pip install vllm')
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        arguments = engine_arguments(config, shared_gpu)
        from vllm import EngineArgs, LLMEngine

        try:
            self._llm: Any = LLMEngine.from_engine_args(EngineArgs(**arguments))
        except (RuntimeError, ValueError, OSError) as error:
            raise ConfigError(f"vLLM does not start: {cause(error, log)}") from error
        self._eos = end_of_sequence(generation_config(config.model.path), self._llm.model_config.hf_config)
        self._seeded = config.loop.max_lag == 0
        self._vocabulary: int = self._llm.model_config.get_vocab_size()
        self.context: int = self._llm.model_config.max_model_len
        self.version = version
        self.draining = False
        self.tokens_generated = 0
        self.tokens_wasted = 0
        self.busy_seconds = 0.0
        self._requests: dict[str, _Request] = {}
        self._waiting: deque[_Request] = deque()  # while draining
        self._started = 0
        self._salt = 0

    @property
    def busy(self) -> bool:
        return bool(self._requests or self._waiting)

    @property
    def running(self) -> int:
        return len(self._requests)

    def submit(self, key: Hashable, prompt_ids: Sequence[int], sampling: Sampling) -> None:
        """Queue a request; `step` returns its completion under `key`. Raises `GenerationError`."""
        prompt = tuple(prompt_ids)
        if not prompt:
            raise GenerationError("the prompt is empty; give at least one token")
        if len(prompt) >= self.context:
            raise GenerationError(
                f"the prompt has {len(prompt)} tokens, but prompt and completion share a context of {self.context}; "
                "shorten the prompt or raise generator.context"
            )
        if not all(0 <= token < self._vocabulary for token in prompt):
            raise GenerationError(f"the prompt has a token id outside of 0 to {self._vocabulary - 1}")
        if sampling.record_kept and not sampling.top_k:
            raise GenerationError("vLLM can't tell which tokens top_p kept; set sampling.top_k too, to 64 for example")
        if sampling.record_experts:
            raise GenerationError("record_experts: not with vLLM")
        request = _Request(key, prompt, sampling)
        if self.draining:
            self._waiting.append(request)
        else:
            self._start(request)

    def abort(self, key: Hashable) -> None:
        """Forget a request; unknown keys are ignored, since it may just have finished."""
        self._waiting = deque(r for r in self._waiting if r.key != key)
        for request in [r for r in self._requests.values() if r.key == key]:
            self._stop(request)

    def drawn(self) -> int:
        """Tokens that the furthest sequence in flight has drawn."""
        return max(self._llm.collective_rpc("slipstream_drawn")[0].values(), default=0) if self._requests else 0

    def step(self) -> list[tuple[Hashable, Completion]]:
        """Let vLLM go on for one step. Returns what finished."""
        while self._waiting and not self.draining:
            self._start(self._waiting.popleft())
        if not self._requests:
            return []
        began = time.perf_counter()
        outputs = [output for output in self._llm.step() if output.finished]
        self.busy_seconds += time.perf_counter() - began
        finished = []
        for output in outputs:
            request = self._requests.pop(output.request_id, None)
            if request:
                completion = _completion(request, output.outputs[0])
                self.tokens_generated += len(completion.token_ids)
                finished.append((request.key, completion))
        return finished

    def swap(self, version: int, apply: Callable[[], dict[str, int]], how: Interruption = "continue") -> float:
        """Replace the weights under the running sequences by calling `apply`, which returns the tokens that each had
        drawn before. Returns the seconds for which the engine was paused. If `apply` raises, the version stays."""
        if how == "drain" and self._requests:
            raise RuntimeError(f"drain: {self.running} sequences still run; set `draining` and step until none does")
        began = time.perf_counter()
        core = self._llm.engine_core
        paused = how == "recompute" and hasattr(core, "call_utility")  # in one process nothing runs between two steps
        if paused:
            core.call_utility("pause_scheduler", "keep", False)
        try:
            drawn = apply()
            if how == "recompute" and not self._llm.reset_prefix_cache(reset_running_requests=True):
                raise RuntimeError("vLLM did not drop its keys and values")
        finally:
            if paused:
                core.call_utility("resume_scheduler")
        paused_for = time.perf_counter() - began if how == "recompute" else 0.0
        self.version, self.draining = version, False
        self._salt += 1
        for request in list(self._requests.values()):
            tokens = drawn.get(request.internal, 0)
            if how == "retry" or not tokens:
                self.tokens_wasted += tokens
                self._stop(request)
                self._start(request)
            else:
                request.starts.append((tokens, version))
        return paused_for

    def open_weights(self, link: str, offer: Ticket, rank: int) -> WorkerWeights:
        """The weights of all workers, as the other end of a link; the first worker has this rank."""
        return WorkerWeights(self._llm, link, offer, rank)

    def close(self) -> None:
        self._llm.engine_core.shutdown()

    def _start(self, request: _Request) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = request.sampling
        parameters = SamplingParams(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            max_tokens=min(sampling.max_tokens, self.context - len(request.prompt)),
            stop_token_ids=[*self._eos, *sampling.stop_tokens],
            stop=list(sampling.stop_strings),
            detokenize=bool(sampling.stop_strings),
            # A generator of random numbers for each sequence costs time, and only a synchronous run can repeat itself.
            seed=sampling.seed if self._seeded else None,
            logprobs=sampling.top_k if sampling.record_kept else 0,
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._started += 1
        request.name, request.starts = str(self._started), [(0, self.version)]
        prompt = {"prompt_token_ids": list(request.prompt), "cache_salt": str(self._salt)}
        request.internal = self._llm.add_request(request.name, prompt, parameters)
        self._requests[request.name] = request

    def _stop(self, request: _Request) -> None:
        del self._requests[request.name]
        self._llm.abort_request([request.name])


class WorkerWeights:
    """`generators.weights.ServedWeights` in vLLM's workers."""

    def __init__(self, llm: Any, link: str, offer: Ticket, rank: int) -> None:
        self._llm = llm
        self._asked = self._held = 0.0
        self._call("connect", link, offer, rank)

    def prepare(self, ticket: Ticket) -> None:
        self._call("prepare", ticket)

    def prepared(self) -> bool:
        if time.perf_counter() - self._asked < POLL:
            return False
        done = all(self._call("prepared"))
        self._asked = time.perf_counter()
        return done

    def apply(self) -> dict[str, int]:
        """Swap. Returns how many tokens each request had drawn before, by vLLM's own names."""
        self._call("apply")
        swapped = self._call("swapped")
        while None in swapped:
            time.sleep(POLL / 10)
            swapped = self._call("swapped")
        self._held = max(held for held, _ in swapped)
        drawn: dict[str, int] = swapped[0][1]
        return drawn

    def held(self) -> float:
        """Seconds that the last swap kept the workers from the next forward pass."""
        return self._held

    def checksums(self, names: Sequence[str]) -> dict[str, int]:
        parts = self._call("checksums", list(names))
        return {name: sum(int(part[name]) for part in parts) for name in names}

    def close(self) -> None:
        self._call("close")

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        results: list[Any] = self._llm.collective_rpc(f"slipstream_{method}", args=arguments)
        return results


def engine_arguments(config: Config, shared_gpu: bool) -> dict[str, Any]:
    """vLLM's engine arguments for a configuration; `generator.options` has the last word."""
    generator, on_cpu = config.generator, not torch.cuda.is_available()
    arguments: dict[str, Any] = {
        "model": config.model.path,
        "dtype": config.model.dtype,
        "tensor_parallel_size": generator.tensor_parallel,
        "max_num_seqs": generator.slots,
        "max_model_len": generator.context or None,
        "gpu_memory_utilization": generator.memory or (0.4 if shared_gpu else 0.85),
        "logprobs_mode": "processed_logprobs",  # of the distribution that tokens are really drawn from
        "max_logprobs": max(20, config.sampling.top_k),
        "worker_extension_cls": EXTENSION,
        "disable_log_stats": True,
        "seed": config.loop.seed,
    }
    if config.sync.link == "nccl_direct":
        from vllm.config import WeightTransferConfig

        arguments["weight_transfer_config"] = WeightTransferConfig(backend="nccl")
    if on_cpu:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # starts in seconds
        arguments |= {"enforce_eager": True, "async_scheduling": False, "kv_cache_memory_bytes": CPU_CACHE}
    return arguments | generator.options


def cause(error: Exception, log: Path | None) -> str:
    """Why vLLM did not start. Its own process says so in the log only, in the first line that names an error."""
    lines = log.read_text(errors="replace").splitlines() if log else []
    named = [found[1] for line in lines if (found := FAILURE.search(line)) and "See root cause above" not in line]
    return f"{named[0] if named else error} (log: {log})" if log else str(error)


def _completion(request: _Request, output: Any) -> Completion:
    tokens, flat, sampling = tuple(output.token_ids), output.logprobs, request.sampling
    firsts = flat.start_indices[: len(tokens)]
    logprobs = tuple(0.0 if sampling.temperature == 0 else flat.logprobs[first] for first in firsts)
    starts = [(min(start, len(tokens)), version) for start, version in request.starts]
    ends = [*(start for start, _ in starts[1:]), len(tokens)]
    spans = [VersionSpan(v, start, end) for (start, v), end in zip(starts, ends, strict=True) if start < end]
    kept = None
    if sampling.record_kept:
        pairs = zip(firsts, flat.end_indices, strict=False)
        kept = tuple(
            sorted({t for t, p in zip(flat.token_ids[a:b], flat.logprobs[a:b], strict=True) if p > -torch.inf})
            for a, b in pairs
        )
    return Completion(
        prompt_ids=request.prompt,
        token_ids=tokens,
        logprobs=logprobs,
        spans=tuple(spans),
        finish_reason=output.finish_reason,
        temperature=sampling.temperature,
        kept=kept,
    )
