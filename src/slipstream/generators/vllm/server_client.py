"""HTTP requests to a vLLM server, with errors that name the server; and whether a run can use the server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from slipstream.config.schema import Config, ConfigError
from slipstream.generators.vllm.launch import EXTENSION
from slipstream.generators.vllm.requests import TokenCounts, VllmRequest
from slipstream.generators.vllm.worker_methods import UPDATE_ADAPTERS, WorkerMethods
from slipstream.model.device import dtype_name
from slipstream.model.inspection import has_experts, model_sizes
from slipstream.rollout import Completion
from slipstream.runtime.worker import succeeded

P = ParamSpec("P")
R = TypeVar("R")
REQUEST_TIMEOUT_S = 45.0  # of any request but a completion, a transfer, or `slipstream_connect`
SILENT_TIMEOUT_S = 3.0  # of each further request to a server that did not answer one
RPC = "/collective_rpc"
UNLOAD_ADAPTER = "/v1/unload_lora_adapter"
REMOVED_LOGPROB = -9999.0  # vLLM's log-probability of a token that top-k or top-p removed
WORKER_ERROR = -1  # `RequestFailed.status` if the workers raised


class RequestFailed(RuntimeError):
    """A request without a valid response. `status` is 0 without a response, `WORKER_ERROR` if the workers raised."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class ServerClient:
    """Requests to one server. A server is `silent` once a request that its caller counts on went unanswered."""

    def __init__(self, url: str) -> None:
        self.name = url.rstrip("/")
        self.silent = False
        self._session: Any = None

    def open(self) -> None:
        """Create the HTTP session. Raises `ConfigError` if aiohttp is missing."""
        try:
            import aiohttp
        except ImportError:
            raise ConfigError("generator.servers needs aiohttp: pip install 'slipstream-rl[servers]'") from None
        # vLLM closes idle connections after 5 seconds; a request at that moment would fail.
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2))

    async def close(self) -> None:
        if self._session:
            await self._session.close()

    async def request(
        self, method: str, path: str, body: Any = None, limit: float | None = None, headers: Any = None,
        parse: Callable[[str], Any] = json.loads,
    ) -> Any:  # fmt: skip
        """Content of a response with status 200, JSON by default, within `limit` seconds. Raises `RequestFailed`."""
        import aiohttp

        limit = limit or REQUEST_TIMEOUT_S
        limit = min(limit, SILENT_TIMEOUT_S) if self.silent else limit
        timeout = aiohttp.ClientTimeout(total=None if limit == math.inf else limit, sock_connect=REQUEST_TIMEOUT_S / 3)
        try:
            async with self._session.request(
                method, self.name + path, json=body, timeout=timeout, headers=headers
            ) as response:
                text, status = await response.text(), response.status
                answer = parse(text or "{}") if status == 200 else None
        except TimeoutError:
            raise RequestFailed(f"{self.name}{path} did not answer within {limit:g} s") from None
        except (aiohttp.ClientError, ValueError, OSError, RuntimeError) as error:  # the last one: `close` was called
            raise RequestFailed(f"{self.name}{path} did not answer: {error}") from None
        if status != 200:
            raise RequestFailed(f"{self.name}{path} answered {status}: {_first_line(text)}", status)
        return answer

    async def call_workers(
        self, purpose: str, limit: float | None, method: Callable[Concatenate[WorkerMethods, P], R], *args: P.args,
        **_: P.kwargs,
    ) -> list[R]:  # fmt: skip
        """Result of a `WorkerMethods` method from each worker. Raises `RequestFailed`, which names the `purpose`."""
        body = {"method": WorkerMethods.slipstream_call.__name__, "args": [method.__name__, *args]}
        answer = await self.request("POST", RPC, body, limit)
        try:
            results = answer["results"]
            error = next((result for result in results if isinstance(result, str)), None)
            if error is None:
                return [result for (result,) in results]
        except (KeyError, TypeError, ValueError):
            found = f"answered with {answer!r:.100}, which is no list of results"
            raise RequestFailed(f"{self.name}{RPC} {found}") from None
        raise RequestFailed(f"{self.name} could not {purpose}: {_first_line(error)}", WORKER_ERROR)


def _first_line(text: str) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError):  # text that is not vLLM's JSON is shown as it is
        text = json.loads(text)["error"]["message"]
    return (text.strip().splitlines() or ["nothing"])[0][:300]


async def inspect_server(client: ServerClient, config: Config) -> tuple[str, list[dict[str, Any]]]:
    """The server's name of the model, and facts of each of its workers. Raises `ConfigError` if no run can use it."""
    try:
        await _validate_is_vllm(client)
        models = await client.request("GET", "/v1/models", limit=REQUEST_TIMEOUT_S / 3)
        model = served_model_name(models["data"], config.model.path, client.name)
        facts = await client.call_workers("describe", None, WorkerMethods.slipstream_describe)
    except RequestFailed as failure:
        remedy = {
            0: "start it as docs/vllm-servers.md shows, or correct generator.servers",
            404: "start it with VLLM_SERVER_DEV_MODE=1 in its environment",
            500: f"start it with --worker-extension-cls {EXTENSION}, and install this release of slipstream-rl",
        }
        raise ConfigError(f"{failure}; {remedy.get(failure.status, 'see its log')}") from None
    validate_server(client.name, facts[0], config)
    return model, facts


async def _validate_is_vllm(client: ServerClient) -> None:
    try:
        await client.request("GET", "/health", limit=REQUEST_TIMEOUT_S / 3)
    except RequestFailed as failure:
        if failure.status != 404:
            raise
        raise ConfigError(f"{failure}: this is no vLLM server; correct generator.servers") from None


def validate_server(name: str, facts: Mapping[str, Any], config: Config) -> None:
    """Raise `ConfigError` with the first reason why the run can't use a server of these facts."""
    ours, theirs = model_sizes(config.model.path), facts["sizes"]
    comparable = [size for size in ours if None not in (ours[size], theirs.get(size))]  # sizes depend on the family
    other = next((size for size in comparable if ours[size] != theirs[size]), "")
    dtype, context = dtype_name(config), config.generator.max_model_len or config.longest_completion + 1
    for unfit, found, remedy in (
        (other, f"a model of {other} {theirs.get(other)}", f"{config.model.path} has {ours.get(other)}: serve that"),
        (facts["logprobs_mode"] != "processed_logprobs", f"--logprobs-mode {facts['logprobs_mode']}",
         "start it with --logprobs-mode processed_logprobs"),
        (not facts["counts"], "a model runner that is not known here", "start it with VLLM_USE_V2_MODEL_RUNNER=0"),
        (facts["replicas"] > 1, f"{facts['replicas']} data- or pipeline-parallel parts",
         "start one server for each, with tensor parallelism alone"),
        (facts["dtype"] != dtype, f"--dtype {facts['dtype']}", f"start it with --dtype {dtype} or set model.dtype"),
        (config.algorithm.replay_routing and has_experts(config.model.path), "an interface that returns no experts",
         "set algorithm.replay_routing = false"),
        (config.algorithm.replay_sampling_mask and config.largest_top_k > facts["max_logprobs"] >= 0,
         f"--max-logprobs {facts['max_logprobs']}", f"start it with --max-logprobs {config.largest_top_k}"),
        (facts["context"] < context, f"--max-model-len {facts['context']}",
         f"the run needs {context}: raise it, or lower generator.max_model_len and sampling.max_tokens"),
        (not config.lora.rank and facts["max_lora_rank"], "--enable-lora and can't take full weights",
         "start it without, or set lora.rank"),
        (config.lora.rank and facts["max_loras"] < config.loop.max_lag + 3,
         f"room for {facts['max_loras']} adapters that a run may load",
         f"start it with {UPDATE_ADAPTERS}=1 and --enable-lora --max-loras {config.loop.max_lag + 3} "
         f"--max-lora-rank {config.lora.rank}"),
        (config.lora.rank and config.lora.rank > facts["max_lora_rank"], f"--max-lora-rank {facts['max_lora_rank']}",
         f"start it with --max-lora-rank {config.lora.rank}"),
    ):  # fmt: skip
        if unfit:
            raise ConfigError(f"{name} runs with {found}; {remedy}")


async def drop_adapter_names(client: ServerClient, names: Iterable[str], limit: float | None = None) -> None:
    """Let the HTTP interface refuse requests for these adapters. Raises `RequestFailed`."""
    for name in names:
        await client.request("POST", UNLOAD_ADAPTER, {"lora_name": name}, limit, parse=str)


async def unload_all_adapters(client: ServerClient) -> None:
    """Drop the names of all adapters, and wait for the requests that use them. Raises `RequestFailed`.

    Workers can then unload these adapters. New requests wait meanwhile.
    """
    models = await client.request("GET", "/v1/models")
    if names := [model["id"] for model in models["data"] if model.get("parent")]:
        await drop_adapter_names(client, names)
        try:
            await client.request("POST", "/pause?mode=wait&clear_cache=false")
        finally:
            await client.request("POST", "/resume")


def served_model_name(models: Collection[Mapping[str, Any]], path: str, server: str) -> str:
    """The server's name of `model.path`, compared by the last part of each path. Raises `ConfigError`."""
    for model in models:
        if Path(path).name in (Path(str(model.get(key) or "")).name for key in ("id", "root")):
            return str(model["id"])
    known = ", ".join(str(model["id"]) for model in models)
    raise ConfigError(f'{server} serves {known}, but model.path = "{path}"; serve that, or name it --served-model-name')


def completion_of(request: VllmRequest, choice: Mapping[str, Any]) -> Completion:
    """The completion of a request from vLLM's choice in a response."""
    if not request.records_logprobs:
        return request.completion(choice["token_ids"], (), choice["finish_reason"], ())
    logprobs = choice["logprobs"]
    sampling_mask = (
        [int(token.removeprefix("token_id:")) for token, logprob in top.items() if logprob > REMOVED_LOGPROB]
        for top in logprobs["top_logprobs"]
    )
    return request.completion(choice["token_ids"], logprobs["token_logprobs"], choice["finish_reason"], sampling_mask)


def by_request_name(counts: TokenCounts) -> TokenCounts:
    """Counts by the names that requests were sent with, from counts by vLLM's request ids."""
    return {name.removeprefix("cmpl-").partition("-")[0]: tokens for name, tokens in counts.items()}


def output_tokens(response: asyncio.Future[Any]) -> int:
    """Tokens of a response that has arrived, else 0."""
    return len(response.result()["choices"][0]["token_ids"]) if response.done() and succeeded(response) else 0
