"""vLLM servers that the user has started, on this host or another, as generators.

A `Server` answers the calls that an `Actor` with an engine in its process answers, and does so over HTTP: completions
by vLLM's own route for them, weights by `/collective_rpc`, which runs `generators.vllm_worker` in the workers.
Where versions change is said by the workers, who count tokens as they draw them, and never by the order in which
answers arrive: while a swap is under way no answer is taken and no request is sent.

A server that fails for good is never used again in the run, since one that was restarted serves other weights. What
waits for it learns so within a minute.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import time
from collections.abc import Collection, Coroutine, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from slipstream.actor import ActorDied, keep_watch, went_well
from slipstream.config import Config, ConfigError
from slipstream.generators.base import GenerationError
from slipstream.generators.vllm import EXTENSION
from slipstream.generators.vllm_requests import CLAIM, Drawn, VllmRequest, added, interrupted
from slipstream.models import dtype_name, has_experts, model_sizes
from slipstream.rollout import Completion, Sampling
from slipstream.sync.link import Ticket
from slipstream.vllm_releases import caches_were_reset

LIMIT = 45.0  # seconds that any request but a completion or the way of a version to a server may take
PREPARE_LIMIT = 600.0  # of a version's way to a server
CONNECT_LIMIT = 900.0  # of an answer for which workers compare all that they serve with the model's files
LAST = 3.0  # of each request to a server that has fallen silent
WATCH = 10.0  # seconds between two questions whether the workers of a server still answer
ATTEMPTS = 3  # at a completion, each after twice the pause; too few for a server to be restarted meanwhile
PAUSE = 0.5
POLL = 0.02
RPC = "/collective_rpc"
UNABLE = -1
IMPOSSIBLE = -9999.0  # how vLLM writes the log-probability of a token that top-k or top-p removed
# What a server would otherwise take from the model's generation_config.json.
NO_PENALTIES = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


class Server:
    """A vLLM server with the interface of an `Actor`, for the run of this name. `ranks` of its workers hold weights."""

    def __init__(self, url: str, config: Config, run: str = "") -> None:
        self.name = url.rstrip("/")
        self.ranks = self.slots = 0
        self.dead: ActorDied | None = None
        self._config = config
        self._http: Any = None
        self._watching: asyncio.Task[None] | None = None
        self._connected = False
        self._lost = asyncio.Event()
        self._open, self._settled = asyncio.Event(), asyncio.Event()  # for new requests; no swap is under way
        self._open.set()
        self._settled.set()
        self._connecting = self._silent = False
        self._paused = False  # or may be: it was told to pause, and has not yet said that it goes on
        self._requests: dict[VllmRequest, asyncio.Future[Any]] = {}
        self._run = run or uuid4().hex  # who has the server
        self._salt = uuid4().hex  # of prefix caches: new with each version, and never one of an earlier run
        self._version = 0
        self._totals = {"tokens": 0.0, "wasted": 0.0, "busy": 0.0}
        self._since = 0.0  # when the first of the requests in flight was sent

    async def start(self) -> None:
        """See that the server is there and can do what a run asks of it. Raises `ConfigError`."""
        try:
            import aiohttp
        except ImportError:
            raise ConfigError("generator.servers needs aiohttp: pip install 'slipstream-rl[servers]'") from None
        # vLLM closes idle connections after 5 seconds; a request that meets that moment would fail.
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2))
        try:
            await self._here()
            models = (await self._ask("GET", "/v1/models", limit=LIMIT / 3))["data"]
            self._model = _served(models, self._config.model.path, self.name)
            facts = await self._ask_workers("describe")
        except _Failed as failure:
            remedy = {
                0: "start it as docs/vllm-servers.md shows, or correct generator.servers",
                404: "start it with VLLM_SERVER_DEV_MODE=1 in its environment",
                500: f"start it with --worker-extension-cls {EXTENSION}, and this release of slipstream-rl beside it",
            }
            raise ConfigError(f"{failure}; {remedy.get(failure.status, 'see its log')}") from None
        refuse_unfit(self.name, facts[0], self._config)
        try:
            await self._claim()
            self.ranks = len(facts)  # from here on it is let go when the run leaves it
            await self._ask("POST", "/resume")  # a run that was killed in the middle of a swap has left it paused
        except _Failed as failure:
            raise ConfigError(f"{failure}; see its log") from None
        self._facts, self.slots = facts[0], facts[0]["slots"]
        self._context: int = self._config.generator.context or facts[0]["context"]
        self._watching = keep_watch(self._watch(), self.name, self.give_up)

    async def _here(self) -> None:
        try:
            await self._ask("GET", "/health", limit=LIMIT / 3)
        except _Failed as failure:
            if failure.status != 404:
                raise
            raise ConfigError(f"{failure}: this is no vLLM server; correct generator.servers") from None

    async def _claim(self) -> None:
        """Have it for this run alone: two would draw by each other's weights. A run that was killed has it for a while.

        Raises `ConfigError`."""
        last = time.perf_counter() + CLAIM + POLL
        while None in (addresses := await self._ask_workers("claim", self._run, self.name, True)):
            if time.perf_counter() > last:
                raise ConfigError(f"{self.name} is in use by another run; wait for its end, or start a server for each")
            await asyncio.sleep(CLAIM / 30)
        if addresses[0] != self.name:
            raise ConfigError(f"{addresses[0]} and {self.name} in generator.servers are one server; leave one out")

    def call(self, method: str, *arguments: Any) -> asyncio.Future[Any]:
        """What an engine's process would answer to `method`. Raises `ActorDied` once the server is given up."""
        answer: Coroutine[Any, Any, Any] = getattr(self, f"_{method}")(*arguments)
        return asyncio.ensure_future(answer)

    def post(self, method: str, *arguments: Any) -> None:
        """Only "abort" is posted, and a call that was cancelled has dropped its connection: vLLM aborts by that."""

    async def stop(self, grace: float = 10.0) -> None:
        """Leave the server as it is, with the last weights that it got, and never paused."""
        if self._watching:
            self._watching.cancel()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._settled.wait(), grace)
        well = self._connected and not self.dead
        self.give_up(f"{self.name} was left")  # from here on no swap begins
        with contextlib.suppress(_Failed):  # nothing more is asked of it
            if self._paused:  # a swap took too long, or could not resume it
                await self._ask("POST", "/resume", limit=grace)
            if well:
                await self._ask_workers("close", limit=grace)
            if self.ranks:
                await self._ask_workers("release", self._run, limit=grace)
        if self._http:
            await self._http.close()

    async def _generate(self, key: Hashable, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        request = VllmRequest(key, tuple(prompt_ids), sampling)
        request.refuse_impossible(self._context, self._facts["vocabulary"], self._facts["max_logprobs"])
        for attempt in itertools.count(1):
            try:
                while (choice := await self._draw(request)) is None:
                    continue
                break
            except _Failed as failure:
                if 400 <= failure.status < 500:
                    raise GenerationError(str(failure)) from None
                if attempt == ATTEMPTS:
                    if failure.status >= 500 and await self._draws():
                        raise GenerationError(f"{failure}, and others are drawn") from None
                    raise self.give_up(str(failure)) from None
                await asyncio.sleep(PAUSE * 2**attempt)
        completion = _completion(request, choice)
        self._totals["tokens"] += len(completion.token_ids)
        return completion

    async def _draws(self) -> bool:
        """Whether it draws a token after another. If it does, it is the request that it fails at, and so would all.

        Apart from swaps, which have nothing to do with that, and for as long as it may take where many wait.
        """
        body = {"model": self._model, "prompt": [0], "max_tokens": 1, "cache_salt": uuid4().hex}
        asking = self._ask("POST", "/v1/completions", body, self._config.environment.time_limit)
        answer = asyncio.ensure_future(asking)
        answer.add_done_callback(went_well)  # it is no failure of the run's
        try:
            await self._answered_or_lost(answer)
            self._refuse_dead()
            return went_well(answer)
        finally:
            answer.cancel()

    async def _answered_or_lost(self, answer: asyncio.Future[Any]) -> None:
        """Wait until it is there, or the server given up."""
        lost = asyncio.ensure_future(self._lost.wait())
        try:
            await asyncio.wait((answer, lost), return_when=asyncio.FIRST_COMPLETED)
        finally:
            lost.cancel()

    async def _draw(self, request: VllmRequest) -> Any:
        """Send a request and wait for its answer, and for the end of a swap that is under way then. None if that swap
        has taken the request back."""
        await self._open.wait()
        self._refuse_dead()
        request.begin(uuid4().hex, self._version)
        body = request.parameters(self._context, self._facts["eos"], self._config.loop.max_lag == 0) | {
            "model": self._model,
            "prompt": request.prompt,
            "cache_salt": self._salt,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        # It may wait for a slot first, and its episode has a time limit that leaves this out.
        asking = self._ask("POST", "/v1/completions", body | NO_PENALTIES, math.inf, {"X-Request-Id": request.name})
        answer = asyncio.ensure_future(asking)
        answer.add_done_callback(went_well)  # raised below, if still wanted
        self._since = self._since if self._requests else time.perf_counter()
        self._requests[request] = answer
        try:
            await self._answered_or_lost(answer)
            await self._settled.wait()
            self._refuse_dead()
            if not request.starts:
                return None
            choice = (await answer)["choices"][0]
            if choice["finish_reason"] not in ("stop", "length"):
                raise _Failed(f"{self.name} ended a completion with {choice['finish_reason']!r}")
            return choice
        finally:
            del self._requests[request]
            answer.cancel()
            if not self._requests:
                self._totals["busy"] += time.perf_counter() - self._since

    async def _connect(self, offer: Ticket, rank: int) -> None:
        self._connecting = True
        try:
            await self._workers("connect", self._config.sync.link, offer, rank, limit=CONNECT_LIMIT)
        finally:
            self._connecting = False
        self._connected = True

    async def _prepare(self, ticket: Ticket) -> None:
        await self._workers("prepare", ticket)
        await self._known("prepared", "get a version of the weights", PREPARE_LIMIT)

    async def _swap(self, version: int) -> tuple[float, dict[str, float]]:
        how = self._config.sync.interruption
        self._refuse_dead()
        self._open.clear()
        try:
            while how == "drain" and self._requests:
                await asyncio.sleep(POLL)
            self._settled.clear()
            began = time.perf_counter()
            counts = await (self._recompute() if how == "recompute" else self._apply())
            held = time.perf_counter() - began
            drawn = [
                (request, counts.get(request.name, 0), _answered(answer))
                for request, answer in self._requests.items()
                if not request.ended
            ]
            self._version, self._salt = version, uuid4().hex
            again, wasted = interrupted(drawn, version, how)
            self._totals["wasted"] += wasted
            for request in again:
                request.starts = []
                self._requests[request].cancel()
        except BaseException:  # a run that stops at this point, too, leaves it unknown what is served
            self.give_up(f"{self.name} was left in the middle of a swap")
            raise
        finally:
            self._open.set()
            self._settled.set()
        return held, await self._stats()

    async def _apply(self) -> Drawn:
        """Swap the weights. Returns the tokens that each request had drawn before, by the name we gave it."""
        await self._workers("apply")
        return _by_our_names((await self._known("swapped", "finish a swap", LIMIT))[0][1])

    async def _recompute(self) -> Drawn:
        self._paused = True
        try:
            await self._order("/pause?mode=keep&clear_cache=false")
            counts = await self._apply()
            answer = await self._order("/reset_prefix_cache?reset_running_requests=true")
            if not caches_were_reset(answer):
                raise self.give_up(f"{self.name} did not drop its keys and values")
        finally:
            await self._order("/resume")  # of one that has said nothing to what came before, too
            self._paused = False
        return counts

    async def _checksums(self, names: Sequence[str]) -> dict[str, int]:
        await self._workers("check", list(names))
        return added(await self._known("checked", "add up its weights", LIMIT), names)

    async def _drawn(self) -> int:
        """Tokens that the furthest sequence in flight has drawn."""
        drawn = _by_our_names((await self._workers("drawn"))[0])
        return max((drawn.get(request.name) or 0 for request in self._requests), default=0)

    async def _stats(self) -> dict[str, float]:
        running = time.perf_counter() - self._since if self._requests else 0.0
        return self._totals | {"busy": self._totals["busy"] + running}

    async def _watch(self) -> None:
        """Ask the workers whether they are there, and still this run's: more often than a server could start anew."""
        while not self.dead:
            await asyncio.sleep(WATCH)
            if self._connecting:  # the question would wait for the end of that
                continue
            with contextlib.suppress(ActorDied):  # who waits is told
                if None in await self._workers("claim", self._run, self.name, False):
                    self.give_up(f"{self.name} was started anew, or taken by another run: it serves other weights")

    async def _workers(self, method: str, *arguments: Any, limit: float | None = None, purpose: str = "") -> list[Any]:
        """What each worker answers. A failure leaves the server in a state that nobody knows."""
        self._refuse_dead()
        with self._given_up_on_failure():
            return await self._ask_workers(method, *arguments, limit=limit, purpose=purpose)

    async def _known(self, method: str, purpose: str, limit: float) -> list[Any]:
        """Ask the workers until each of them knows, for `limit` seconds."""
        began = time.perf_counter()
        while None in (answers := await self._workers(method, purpose=purpose)):
            if time.perf_counter() - began > limit:
                raise self.give_up(f"{self.name} did not {purpose} within {limit:g} s")
            await asyncio.sleep(POLL)
        return answers

    async def _order(self, path: str) -> Any:
        with self._given_up_on_failure():
            return await self._ask("POST", path)

    @contextlib.contextmanager
    def _given_up_on_failure(self) -> Iterator[None]:
        try:
            yield
        except _Failed as failure:
            self._silent = self._silent or not failure.status
            raise self.give_up(str(failure)) from None

    def _refuse_dead(self) -> None:
        if self.dead:
            raise ActorDied(str(self.dead))

    def give_up(self, why: str) -> ActorDied:
        self.dead = self.dead or ActorDied(why)
        self._lost.set()
        return self.dead

    async def _ask_workers(
        self, method: str, *arguments: Any, limit: float | None = None, purpose: str = ""
    ) -> list[Any]:
        """What each worker's `slipstream_{method}` answers, in `generators.vllm_worker`. Raises `_Failed`."""
        asked = {"method": "slipstream_ask", "args": [method, *arguments]}
        said = await self._ask("POST", RPC, asked, limit)
        try:
            answers = said["results"]
            failed = next((answer for answer in answers if isinstance(answer, str)), None)
            if failed is None:
                return [answer for (answer,) in answers]
        except (KeyError, TypeError, ValueError):
            raise _Failed(f"{self.name}{RPC} answered with {said!r:.100}, which is no list of results") from None
        raise _Failed(f"{self.name} could not {purpose or method}: {_message(failed)}", UNABLE)

    async def _ask(
        self, method: str, path: str, body: Any = None, limit: float | None = None, headers: Any = None
    ) -> Any:
        """One request, answered with 200 and JSON within `limit` seconds. Raises `_Failed`."""
        import aiohttp

        limit = min(limit or LIMIT, LAST) if self._silent else limit or LIMIT
        timeout = aiohttp.ClientTimeout(total=None if limit == math.inf else limit, sock_connect=LIMIT / 3)
        try:
            async with self._http.request(
                method, self.name + path, json=body, timeout=timeout, headers=headers
            ) as response:
                text, status = await response.text(), response.status
                answer = json.loads(text or "{}") if status == 200 else None
        except TimeoutError:
            raise _Failed(f"{self.name}{path} did not answer within {limit:g} s") from None
        except (aiohttp.ClientError, ValueError, OSError, RuntimeError) as error:  # the last: `stop` has closed it
            raise _Failed(f"{self.name}{path} did not answer: {error}") from None
        if status != 200:
            raise _Failed(f"{self.name}{path} answered {status}: {_message(text)}", status)
        return answer


class _Failed(RuntimeError):
    """A request that a server did not answer as it should; `status` is 0 where it said nothing, and `UNABLE` where its
    workers did."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


def refuse_unfit(name: str, facts: Mapping[str, Any], config: Config) -> None:
    """Raise `ConfigError` for a server whose workers describe themselves so, if the run can't use it."""
    here, there = model_sizes(config.model.path), facts["sizes"]
    told = [size for size in here if None not in (here[size], there.get(size))]  # not every family has all of them
    other = next((size for size in told if here[size] != there[size]), "")
    dtype, context = dtype_name(config), config.generator.context or config.sampling.max_tokens + 1
    for unfit, found, remedy in (
        (other, f"a model of {other} {there.get(other)}", f"{config.model.path} has {here.get(other)}: serve that"),
        (facts["logprobs_mode"] != "processed_logprobs", f"--logprobs-mode {facts['logprobs_mode']}",
         "start it with --logprobs-mode processed_logprobs"),
        (not facts["counts"], "a model runner that is not known here", "start it with VLLM_USE_V2_MODEL_RUNNER=0"),
        (facts["replicas"] > 1, f"{facts['replicas']} data- or pipeline-parallel parts",
         "start one server for each, with tensor parallelism alone"),
        (facts["dtype"] != dtype, f"--dtype {facts['dtype']}", f"start it with --dtype {dtype} or set model.dtype"),
        (config.algorithm.keep_routing and has_experts(config.model.path), "an interface that does not tell experts",
         "set algorithm.keep_routing = false"),
        (config.algorithm.keep_sampling_mask and config.sampling.top_k > facts["max_logprobs"] >= 0,
         f"--max-logprobs {facts['max_logprobs']}", f"start it with --max-logprobs {config.sampling.top_k}"),
        (facts["context"] < context, f"--max-model-len {facts['context']}",
         f"the run needs {context}: raise it, or lower generator.context and sampling.max_tokens"),
    ):  # fmt: skip
        if unfit:
            raise ConfigError(f"{name} runs with {found}; {remedy}")


def _served(models: Collection[Mapping[str, Any]], path: str, name: str) -> str:
    """The server's name of our model, whose directory may lie elsewhere on its host."""
    for model in models:
        if Path(path).name in (Path(str(model.get(key) or "")).name for key in ("id", "root")):
            return str(model["id"])
    known = ", ".join(str(model["id"]) for model in models)
    raise ConfigError(f'{name} serves {known}, but model.path = "{path}"; serve that, or name it --served-model-name')


def _completion(request: VllmRequest, choice: Mapping[str, Any]) -> Completion:
    drawn = choice["logprobs"]
    kept = (
        [int(token.removeprefix("token_id:")) for token, logprob in top.items() if logprob > IMPOSSIBLE]
        for top in drawn["top_logprobs"]
    )
    return request.completion(choice["token_ids"], drawn["token_logprobs"], choice["finish_reason"], kept)


def _by_our_names(counts: Drawn) -> Drawn:
    """What workers have counted, by the names that requests were sent with."""
    return {name.removeprefix("cmpl-").partition("-")[0]: tokens for name, tokens in counts.items()}


def _answered(answer: asyncio.Future[Any]) -> int:
    """Tokens of a completion, 0 as long as there is none."""
    return len(answer.result()["choices"][0]["token_ids"]) if answer.done() and went_well(answer) else 0


def _message(text: str) -> str:
    """The first line of what a server says of an error."""
    with contextlib.suppress(ValueError, KeyError, TypeError):  # else it is no JSON of vLLM's
        text = json.loads(text)["error"]["message"]
    return (text.strip().splitlines() or ["nothing"])[0][:300]
