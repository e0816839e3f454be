"""vLLM servers that the user has started, on this host or another, as engines.

A `Server` is an `EngineWorker` over HTTP: completions by vLLM's own route, weights by `/collective_rpc` and
`worker_methods`. The workers count tokens as they sample them, so version boundaries are exact whatever the order of
responses. During a swap no response is processed and no request is sent.

A server that fails is removed from the run: a restarted one serves other weights. Its requests fail within a minute.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar
from uuid import uuid4

from slipstream.config.schema import Config, ConfigError
from slipstream.generators.base import GenerationError
from slipstream.generators.vllm import requests, server_client
from slipstream.generators.vllm.compat import caches_were_reset
from slipstream.generators.vllm.requests import LEASE_S, TokenCounts, VllmRequest
from slipstream.generators.vllm.server_adapters import ServerAdapters
from slipstream.generators.vllm.server_client import RequestFailed, ServerClient, inspect_server
from slipstream.generators.vllm.worker_methods import WorkerMethods
from slipstream.rollout import Completion, Sampling
from slipstream.runtime.closing import wait_first
from slipstream.runtime.worker import WorkerDied, succeeded
from slipstream.runtime.worker_process import supervise
from slipstream.sync.link import ConnectionInfo, PublishHandle
from slipstream.sync.update import RolledBack

P = ParamSpec("P")
R = TypeVar("R")
PREPARE_TIMEOUT_S = 600.0  # of the transfer of a version
CONNECT_TIMEOUT_S = 900.0  # of the comparison of all weights with the model's files
RENEW_INTERVAL_S = 10.0  # between two renewals of the claim, which also probe the workers
MAX_ATTEMPTS = 3  # of a completion; too few for a server to be restarted meanwhile
BACKOFF_S = 0.5  # doubled with each attempt
POLL_INTERVAL_S = 0.02
# Overrides the defaults that a server takes from the model's generation_config.json.
NO_PENALTIES = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


class Server:
    """A vLLM server as an `EngineWorker`, claimed by `run`. `ranks`: number of its workers that hold weights."""

    def __init__(self, url: str, config: Config, run: str = "") -> None:
        self._client = ServerClient(url)
        self.name = self._client.name
        self.ranks = self.max_num_seqs = 0
        self.dead: WorkerDied | None = None
        self.dying = False  # it has no connection that ends first
        self.heartbeats = None  # requests have their own time limits
        self.ended = asyncio.Event()
        self._config = config
        self._run = run or uuid4().hex
        self._renewing: asyncio.Task[None] | None = None
        self._connecting = self._connected = False
        self._accepting = asyncio.Event()  # clear while a swap holds back new requests
        self._not_swapping = asyncio.Event()  # clear while a swap holds back responses
        self._accepting.set()
        self._not_swapping.set()
        self._maybe_paused = False  # since `/pause` was sent, until `/resume` is answered
        self._keys = itertools.count()
        self._requests: dict[VllmRequest, asyncio.Future[Any]] = {}
        self._cache_salt = uuid4().hex  # new for each version and run
        self._version = 0
        self._adapters: ServerAdapters | None = None
        if config.sync.link == "lora":
            most = config.loop.max_lag + 2
            self._adapters = ServerAdapters(most, self._call_workers, self._poll_workers, self._post)
        self._totals = {"tokens": 0.0, "tokens_discarded": 0.0, "busy_s": 0.0}
        self._busy_since = 0.0

    async def start(self) -> None:
        """Check that the server fits the run, and claim it. Raises `ConfigError`."""
        self._client.open()
        self._model, facts = await inspect_server(self._client, self._config)
        try:
            await self._claim()
            self.ranks = len(facts)  # set once claimed: `stop` then releases the claim
            await self._client.request("POST", "/resume")  # a run that was killed in a swap leaves the server paused
            if self._adapters:
                await server_client.unload_all_adapters(self._client)  # of earlier runs and of the user
        except RequestFailed as failure:
            raise ConfigError(f"{failure}; see its log") from None
        self._facts, self.max_num_seqs = facts[0], facts[0]["max_num_seqs"]
        self._context: int = self._config.generator.max_model_len or facts[0]["context"]
        self._renewing = supervise(self._renew(), self.name, self.terminate)

    async def _claim(self) -> None:
        """Claim the server for this run alone, waiting for the claim of a killed run to expire.

        Raises `ConfigError` if another run has it, or if the run has it under another address.
        """
        deadline = time.perf_counter() + LEASE_S + POLL_INTERVAL_S
        claim = WorkerMethods.slipstream_claim
        while None in (addresses := await self._client.call_workers("claim", None, claim, self._run, self.name, True)):
            if time.perf_counter() > deadline:
                raise ConfigError(f"{self.name} is in use by another run; wait for its end, or start a server for each")
            await asyncio.sleep(LEASE_S / 30)
        if addresses[0] != self.name:
            raise ConfigError(f"{addresses[0]} and {self.name} in generator.servers are one server; leave one out")

    async def _renew(self) -> None:
        """Renew the claim, more often than a server could restart. Terminate if it was lost: the weights are others."""
        while not self.dead:
            await asyncio.sleep(RENEW_INTERVAL_S)
            if self._connecting:  # the call would wait for it
                continue
            with contextlib.suppress(WorkerDied):  # callers of the server learn it themselves
                claim = WorkerMethods.slipstream_claim
                if None in await self._call_workers("claim", None, claim, self._run, self.name, False):
                    self.terminate(f"{self.name} was restarted, or claimed by another run: it serves other weights")

    async def stop(self, grace: float = 10.0) -> None:
        """Leave the server running: it serves the weights or the adapter of its last swap and is not paused."""
        if self._renewing:
            self._renewing.cancel()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._not_swapping.wait(), grace)
        healthy = self._connected and not self.dead
        self.terminate(f"{self.name} was left")  # prevents further swaps
        with contextlib.suppress(RequestFailed):  # the first failure ends it
            if self._maybe_paused:
                await self._client.request("POST", "/resume", limit=grace)
            if healthy and self._adapters:
                await server_client.drop_adapter_names(self._client, self._adapters.older, grace)
            if healthy:
                await self._client.call_workers("close", grace, WorkerMethods.slipstream_close)
            if self.ranks:
                await self._client.call_workers("release", grace, WorkerMethods.slipstream_release, self._run)
        await self._client.close()

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """As `EngineWorker.generate`. Cancelling closes the connection, and vLLM aborts the request."""
        request = VllmRequest(next(self._keys), tuple(prompt_ids), sampling)
        request.validate(self._context, self._facts["vocabulary"], self._facts["max_logprobs"])
        for attempt in itertools.count(1):
            try:
                while (choice := await self._complete(request)) is None:
                    continue
                break
            except RequestFailed as failure:
                if 400 <= failure.status < 500:
                    raise GenerationError(str(failure)) from None
                if attempt == MAX_ATTEMPTS:
                    if failure.status >= 500 and await self._completes_others():
                        raise GenerationError(f"{failure}, and others are sampled") from None
                    raise self.terminate(str(failure)) from None
                await asyncio.sleep(BACKOFF_S * 2**attempt)
        completion = server_client.completion_of(request, choice)
        self._totals["tokens"] += len(completion.token_ids)
        return completion

    async def _complete(self, request: VllmRequest) -> Any:
        """vLLM's choice for a request; None if a swap during the request requires a restart."""
        await self._accepting.wait()
        self._raise_if_dead()
        request.start(uuid4().hex, self._version)
        body = request.parameters(self._context, self._facts["eos"], self._config.loop.max_lag == 0) | {
            "model": self._adapters.acquire(request) if self._adapters else self._model,
            "prompt": request.prompt,
            "cache_salt": self._cache_salt,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        headers = {"X-Request-Id": request.name}
        # Without a time limit: the request may queue, and its episode's clock is stopped meanwhile.
        call = self._client.request("POST", "/v1/completions", body | NO_PENALTIES, math.inf, headers)
        response = asyncio.ensure_future(call)
        response.add_done_callback(succeeded)  # retrieves the error; it is raised below if still relevant
        self._busy_since = self._busy_since if self._requests else time.perf_counter()
        self._requests[request] = response
        try:
            await wait_first(response, self.ended.wait())
            await self._not_swapping.wait()
            self._raise_if_dead()
            if not request.starts:
                return None
            choice = (await response)["choices"][0]
            if choice["finish_reason"] not in ("stop", "length"):
                raise RequestFailed(f"{self.name} ended a completion with {choice['finish_reason']!r}")
            return choice
        finally:
            del self._requests[request]
            response.cancel()
            if self._adapters:
                self._adapters.release(request)
            if not self._requests:
                self._totals["busy_s"] += time.perf_counter() - self._busy_since

    async def _completes_others(self) -> bool:
        """Whether the server completes a minimal request: then a failure is the fault of the failed request."""
        body = {"model": self._model, "prompt": [0], "max_tokens": 1, "cache_salt": uuid4().hex}
        call = self._client.request("POST", "/v1/completions", body, self._config.longest_timeout)  # it may queue
        response = asyncio.ensure_future(call)
        response.add_done_callback(succeeded)  # retrieves the error
        await wait_first(response, self.ended.wait())
        self._raise_if_dead()
        return succeeded(response)

    async def connect(self, connection_info: ConnectionInfo, rank: int) -> None:
        """Open the workers' ends of the link; the first worker has this rank. Adapters need no connection."""
        if self._adapters:  # their handles have all that workers need
            return
        self._connecting = True
        try:
            connect, link = WorkerMethods.slipstream_connect, self._config.sync.link
            await self._call_workers("connect", CONNECT_TIMEOUT_S, connect, link, connection_info, rank)
        finally:
            self._connecting = False
        self._connected = True

    async def prepare(self, handle: PublishHandle) -> str:
        if self._adapters:
            self._connected = True
            return await self._adapters.prepare(handle, PREPARE_TIMEOUT_S)
        purpose = "get a version of the weights"
        await self._call_workers(purpose, None, WorkerMethods.slipstream_prepare, handle)
        results = await self._poll_workers(purpose, PREPARE_TIMEOUT_S, WorkerMethods.slipstream_prepared)
        return next(filter(None, results), "")

    async def swap(self, version: int) -> tuple[float, dict[str, float]] | None:
        """As `EngineWorker.swap`. A failure terminates the server: it is unknown which weights it serves."""
        how = self._config.sync.in_flight
        self._raise_if_dead()
        self._accepting.clear()
        try:
            while how == "drain" and self._requests:
                await asyncio.sleep(POLL_INTERVAL_S)
            self._not_swapping.clear()
            started = time.perf_counter()
            if self._adapters:
                await self._adapters.serve()
                await self._restart_requests(self._adapters, version)
            else:
                before = await (self._recompute() if how == "recompute" else self._swap_weights())
                self._resolve_swap(version, before)
            pause_s = time.perf_counter() - started
        except RolledBack:
            return None
        except BaseException:  # a cancelled swap, too, leaves unknown which weights are served
            self.terminate(f"{self.name} was left in the middle of a swap")
            raise
        finally:
            self._accepting.set()
            self._not_swapping.set()
        return pause_s, await self.stats()

    def _resolve_swap(self, version: int, before: TokenCounts) -> None:
        """Continue the requests in flight as `version` after the tokens `before`, or start them again ("retry")."""
        counts = [
            (request, before.get(request.name, 0), server_client.output_tokens(response))
            for request, response in self._requests.items()
            if not request.finished
        ]
        self._version, self._cache_salt = version, uuid4().hex
        restart, discarded = requests.resolve_in_flight(counts, version, self._config.sync.in_flight)
        self._totals["tokens_discarded"] += discarded
        for request in restart:
            self._restart(request)

    async def _restart_requests(self, adapters: ServerAdapters, version: int) -> None:
        """Restart outdated requests on the new adapter; others finish on the adapter that they started with."""
        self._version, self._cache_salt = version, uuid4().hex
        counts = await self._call_workers("count tokens", None, WorkerMethods.slipstream_count_tokens)
        before = server_client.by_request_name(counts[0])
        for request in adapters.outdated(every=self._config.sync.in_flight == "retry"):
            if (tokens := before.get(request.name, 0)) is not None:  # else it has finished
                self._totals["tokens_discarded"] += tokens
                self._restart(request)

    def _restart(self, request: VllmRequest) -> None:
        """Cancel the response of a request, whose completion then starts again."""
        request.starts = []
        self._requests[request].cancel()

    async def _swap_weights(self) -> TokenCounts:
        """Let the workers swap in the prepared weights. Returns the tokens of each request before the swap, by name.

        Raises `RolledBack` if every worker serves the version before, and `WorkerDied`.
        """
        limit = server_client.REQUEST_TIMEOUT_S
        await self._call_workers("apply", None, WorkerMethods.slipstream_apply)
        swapped = await self._poll_workers("finish a swap", limit, WorkerMethods.slipstream_swapped)
        rolled_back = [worker[2] for worker in swapped]
        if all(rolled_back):
            raise RolledBack(f"{self.name} has the old values again")
        if any(rolled_back):
            raise self.terminate(f"workers of {self.name} serve two versions: some could not write the new one")
        return server_client.by_request_name(swapped[0][1])

    async def _recompute(self) -> TokenCounts:
        """As `_swap_weights`, with all keys and values dropped while the server is paused."""
        self._maybe_paused = True
        try:
            await self._post("/pause?mode=keep&clear_cache=false")
            before = await self._swap_weights()
            response = await self._post("/reset_prefix_cache?reset_running_requests=true")
            if not caches_were_reset(response):
                raise self.terminate(f"{self.name} did not drop its keys and values")
        finally:
            await self._post("/resume")  # also after a request without a response
            self._maybe_paused = False
        return before

    async def checksums(self, names: Sequence[str]) -> dict[str, int]:
        purpose, limit = "add up its weights", server_client.REQUEST_TIMEOUT_S
        await self._call_workers(purpose, None, WorkerMethods.slipstream_start_checksums, list(names))
        sums = await self._poll_workers(purpose, limit, WorkerMethods.slipstream_checksums)
        return requests.same_checksums(sums) if self._adapters else requests.sum_checksums(sums, names)

    async def longest_in_flight(self) -> int:
        counts = await self._call_workers("count tokens", None, WorkerMethods.slipstream_count_tokens)
        by_name = server_client.by_request_name(counts[0])
        return max((by_name.get(request.name) or 0 for request in self._requests), default=0)

    async def stats(self) -> dict[str, float]:
        running = time.perf_counter() - self._busy_since if self._requests else 0.0
        return self._totals | {"busy_s": self._totals["busy_s"] + running}

    async def _unsupported(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("the schema refuses servers where engines sleep, restart or share their weights")

    sleep = wake = export_ipc_handles = set_version = _unsupported

    async def _call_workers(
        self, purpose: str, limit: float | None, method: Callable[Concatenate[WorkerMethods, P], R], *args: P.args,
        **_: P.kwargs,
    ) -> list[R]:  # fmt: skip
        """As `ServerClient.call_workers`; a failure terminates the server, since its state is unknown then."""
        self._raise_if_dead()
        with self._terminated_on_failure():
            return await self._client.call_workers(purpose, limit, method, *args)  # type: ignore[call-arg]

    async def _poll_workers(self, purpose: str, limit: float, method: Callable[[WorkerMethods], R | None]) -> list[R]:
        """Call the workers until each returns something but None, for `limit` seconds."""
        started = time.perf_counter()
        while True:
            polled = await self._call_workers(purpose, None, method)
            results = [result for result in polled if result is not None]
            if len(results) == len(polled):
                return results
            if time.perf_counter() - started > limit:
                raise self.terminate(f"{self.name} did not {purpose} within {limit:g} s")
            await asyncio.sleep(POLL_INTERVAL_S)

    async def _post(self, path: str, body: Any = None, parse: Callable[[str], Any] = json.loads) -> Any:
        with self._terminated_on_failure():
            return await self._client.request("POST", path, body, parse=parse)

    @contextlib.contextmanager
    def _terminated_on_failure(self) -> Iterator[None]:
        try:
            yield
        except RequestFailed as failure:
            self._client.silent = self._client.silent or not failure.status
            raise self.terminate(str(failure)) from None

    def _raise_if_dead(self) -> None:
        if self.dead:
            raise WorkerDied(str(self.dead))

    def terminate(self, why: str) -> WorkerDied:
        """Remove the server from the run. Returns the error for its callers; the first reason wins."""
        self.dead = self.dead or WorkerDied(why)
        self.ended.set()
        return self.dead
