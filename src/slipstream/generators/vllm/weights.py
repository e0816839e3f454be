"""The engine's end of links: the weights of vLLM's workers, or (`lora`) vLLM's adapters, one for each version."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from slipstream.errors import UserError
from slipstream.generators.vllm.compat import call_workers, call_workers_nowait, core_died
from slipstream.generators.vllm.requests import TokenCounts, same_checksums, sum_checksums
from slipstream.generators.vllm.weight_mapping import unserved_error
from slipstream.generators.vllm.worker_methods import WorkerMethods
from slipstream.sync.frames import Superseded
from slipstream.sync.link import ConnectionInfo, PublishHandle
from slipstream.sync.update import RolledBack

R = TypeVar("R")
POLL_INTERVAL_S = 0.002
CountsBeforeSwap = Callable[[], TokenCounts | None]  # returns None until the workers have swapped


class PolledCall(Generic[R]):
    """Polls a worker method, after the call `before` has returned, until every worker returns something but None."""

    def __init__(self, llm: Any, method: Callable[[WorkerMethods], R | None], before: Future[Any]) -> None:
        self._llm, self._method, self._before = llm, method, before
        self._pending: Future[list[R | None]] | None = None
        self._sent_at = 0.0

    def poll(self) -> list[R] | None:
        """Call the workers again if one had no result yet. Returns the results once all have one, None before.

        Raises the error of a failed call.
        """
        if not _done(self._before, self._llm):
            return None
        if self._pending is None:
            if time.perf_counter() - self._sent_at < POLL_INTERVAL_S:
                return None
            self._pending, self._sent_at = call_workers_nowait(self._llm, self._method), time.perf_counter()
        if not _done(self._pending, self._llm):
            return None
        results = [result for result in self._pending.result() if result is not None]
        complete = len(results) == len(self._pending.result())
        self._pending = None
        return results if complete else None


class VllmWeights:
    """`generators.served_weights.ServedWeights` of all workers; the first worker has rank `rank` of the link."""

    def __init__(self, llm: Any, link: str, connection_info: ConnectionInfo, rank: int) -> None:
        self._llm, self._blocking, self._pause_s = llm, link == "nccl_direct", 0.0
        missing = call_workers(llm, WorkerMethods.slipstream_connect, link, connection_info, rank)
        if unserved := set(missing[0]).intersection(*missing[1:]):
            raise unserved_error(min(unserved))

    def prepare(self, handle: PublishHandle) -> None:
        started = call_workers_nowait(self._llm, WorkerMethods.slipstream_prepare, handle)
        self._prepared = PolledCall(self._llm, WorkerMethods.slipstream_prepared, started)

    def prepared(self) -> bool:
        results = self._prepared.poll()
        if why := next(filter(None, results or ()), ""):
            raise Superseded(why)
        return results is not None

    def apply(self) -> CountsBeforeSwap:
        """Swap. Calling the result returns the tokens that each request had sampled before, or None for now.

        It raises `RolledBack` if every worker serves the version before. It raises another error if a worker's swap
        failed, or some workers serve the version before; then the engine's weights are a mixture.
        """
        applied = call_workers_nowait(self._llm, WorkerMethods.slipstream_apply)
        swapped = PolledCall(self._llm, WorkerMethods.slipstream_swapped, applied)
        if self._blocking:  # the transfer itself happens now, and may fail
            applied.result()

        def counts_before() -> TokenCounts | None:
            results = swapped.poll()
            if results is None:
                return None
            rolled_back = [worker[2] for worker in results]
            if all(rolled_back):
                raise RolledBack("every worker has the old values again")
            if any(rolled_back):
                raise UserError("vLLM's workers serve two versions, since some could not write the new one")
            self._pause_s = max(worker[0] for worker in results)
            counts: TokenCounts = results[-1][1]  # of the last pipeline stage, which samples
            return counts

        return counts_before

    def pause_s(self) -> float:
        return self._pause_s

    def start_checksums(self, names: Sequence[str]) -> None:
        self._names = list(names)
        started = call_workers_nowait(self._llm, WorkerMethods.slipstream_start_checksums, self._names)
        self._sums = PolledCall(self._llm, WorkerMethods.slipstream_checksums, started)

    def checksums(self) -> dict[str, int] | None:
        if (sums := self._sums.poll()) is None:
            return None
        return sum_checksums(sums, self._names, self._llm.vllm_config.parallel_config.pipeline_parallel_size)

    def close(self) -> None:
        call_workers(self._llm, WorkerMethods.slipstream_close)


class AdapterWeights(VllmWeights):
    """New sequences sample from the newest adapter; an older adapter stays loaded until its last sequence finishes."""

    def __init__(self, llm: Any, max_adapters: int) -> None:
        self._llm, self._max_adapters, self._pause_s = llm, max_adapters, 0.0
        self._sequences: Counter[int] = Counter()  # in flight, by adapter id
        self._next: dict[str, Any] = {}  # a `LoRARequest` for each policy, as `current`
        self.current: dict[str, Any] = {}  # no adapter samples for a policy that it lacks

    def prepare(self, handle: PublishHandle) -> None:
        """Start to load a version into a free slot while the workers decode."""
        from slipstream.generators.vllm.lora_worker import requests_of

        started = call_workers_nowait(self._llm, WorkerMethods.slipstream_prepare_adapter, handle)
        self._loaded = PolledCall(self._llm, WorkerMethods.slipstream_adapter_prepared, started)
        self._next = requests_of(handle)

    def prepared(self) -> bool:
        """Whether each worker has the adapter in its slot. Raises the error of a failed load, as `Superseded` if the
        version did not arrive."""
        if (results := self._loaded.poll()) is None:
            return False
        if reasons := [result for result in results if isinstance(result, str)]:
            for request in self._next.values():  # other workers may have it
                self._llm.remove_lora(request.lora_int_id)
            raise Superseded(reasons[0])
        self._pause_s = max(result for result in results if isinstance(result, float))
        return True

    def apply(self) -> CountsBeforeSwap:
        """Start new sequences on the new adapter. Sequences in flight keep theirs, so there are no tokens to divide."""
        self._serve(self._next)
        return dict

    def load(self, paths: Mapping[str, str]) -> None:
        """Load adapters from files by vLLM's `add_lora`, and start new sequences of each policy on its own."""
        from vllm.lora.request import LoRARequest

        each = enumerate(paths.items(), 1)
        requests = {policy: LoRARequest(f"from files {policy}", i, path) for i, (policy, path) in each}
        for request in requests.values():
            self._llm.add_lora(request)
        self._serve(requests)

    def checksums(self) -> dict[str, int] | None:
        """The checksums, or None until they are computed. Raises if workers differ."""
        sums = self._sums.poll()
        return None if sums is None else same_checksums(sums)

    def close(self) -> None: ...

    def excess_adapters(self) -> set[int]:
        """Ids of the oldest adapters in use, as many as are in use beyond `max_adapters`."""
        used = sorted({number for number, count in self._sequences.items() if count} | self._current_ids)
        return set(used[: max(0, len(used) - self._max_adapters)])

    def acquire(self, policy: str) -> int:
        """Id of the current adapter of a policy, for a sequence that starts; 0 for the base weights."""
        if not (request := self.current.get(policy)):
            return 0
        number: int = request.lora_int_id
        self._sequences[number] += 1
        return number

    def release(self, number: int) -> None:
        """Count one sequence of this adapter as finished; unload the adapter if it was the last. 0 is no adapter."""
        if number:
            self._sequences[number] -= 1
            self._unload_unused(number)

    @property
    def _current_ids(self) -> set[int]:
        return {request.lora_int_id for request in self.current.values()}

    def _serve(self, requests: dict[str, Any]) -> None:
        old, self.current = self.current, requests
        for request in old.values():
            self._unload_unused(request.lora_int_id)

    def _unload_unused(self, number: int) -> None:
        if not self._sequences[number] and number not in self._current_ids:
            self._llm.remove_lora(number)


def _done(call: Future[list[Any]], llm: Any) -> bool:
    """Whether a call has returned. Raises its error, or `UserError` if vLLM's core has died."""
    if not call.done() and core_died(llm):
        raise UserError("vLLM's engine core died")
    return call.done() and call.result() is not None
