"""An OpenAI-compatible HTTP endpoint that serves the policy to agents of any framework.

Every episode has a secret URL path. Its requests are sampled by the episode's `Policy` and recorded with the
generator's tokens, log-probabilities and versions; completions are never tokenized again. An unsupported field that
would change the answer gets status 400.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import json
import logging
import time
from typing import TYPE_CHECKING, NamedTuple

from slipstream.config.schema import ConfigError
from slipstream.environments.base import SHARED, Policy
from slipstream.environments.chat_tokenizer import ChatTokenizer
from slipstream.environments.openai_api import (
    JSON,
    ROUTES,
    EncodedPrompt,
    RequestError,
    SamplingRequest,
    answer_text,
    parse_request,
)
from slipstream.environments.text_limits import run_in_thread
from slipstream.generators.base import GenerationError
from slipstream.rollout import Completion
from slipstream.runtime.closing import gather_all

if TYPE_CHECKING:
    from aiohttp import web

MAX_BODY = 64 * 2**20  # bytes of a request
MIN_BODY_LIMIT = 2**20
IMAGE_BODY_LIMIT = 32 * 2**20  # for a model that reads images, of which one takes up to 26 MiB in base64
BYTES_PER_TOKEN = 32  # JSON may escape every character
BODY_TIMEOUT_S = 60.0
BACKLOG = 1024  # TCP connections that wait for `accept`
LOGPROB_COST = 16  # work per token with log-probabilities, relative to plain text
ENDED = "there is no such episode, or it has ended"
SESSION = "X-Session-ID"  # header of requests to `Policy.shared_url`


class _Episode(NamedTuple):
    policy: Policy
    requests: set[asyncio.Future[list[Completion]]]


class Endpoint:
    """One HTTP server on a free loopback port for all episodes of a run. The first `open` starts it."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._episodes: dict[str, _Episode] = {}
        self._sessions: dict[str, str] = {}  # the secret of each session's episode
        self._server: asyncio.Task[web.AppRunner] | None = None
        context = tokenizer.limits.context
        least = IMAGE_BODY_LIMIT if tokenizer.image_token_spec else MIN_BODY_LIMIT
        self._max_body = max(least, BYTES_PER_TOKEN * context) if context else MAX_BODY

    async def open(self, policy: Policy) -> str:
        """The base URL that serves `policy` until `end`. Raises `ConfigError` if aiohttp is missing."""
        self._episodes.setdefault(policy.secret, _Episode(policy, set()))
        if self._server is None:  # in a new context: the server outlives the episode that starts it
            self._server = asyncio.get_running_loop().create_task(self._start(), context=contextvars.Context())
        host, port = (await asyncio.shield(self._server)).addresses[0][:2]
        return f"http://{host}:{port}/{policy.secret}/v1"

    def open_session(self, policy: Policy, session: str) -> None:
        """Serve `policy` to requests that name this session, until `end`."""
        self._episodes.setdefault(policy.secret, _Episode(policy, set()))
        self._sessions[session] = policy.secret

    def end(self, policy: Policy) -> None:
        """Stop serving `policy`: abort its requests and answer 404 from now on."""
        for session in policy.sessions:
            self._sessions.pop(session, None)
        if episode := self._episodes.pop(policy.secret, None):
            for request in episode.requests:
                request.cancel()

    async def close(self) -> None:
        """Stop the server, if started."""
        if self._server:
            self._server.cancel()  # no effect on a start that is complete
            [server] = await asyncio.gather(self._server, return_exceptions=True)
            if not isinstance(server, BaseException):
                await server.cleanup()

    async def _start(self) -> web.AppRunner:
        try:
            from aiohttp import web
        except ImportError:
            raise ConfigError("policy.base_url() needs aiohttp: pip install 'slipstream-rl[endpoint]'") from None
        app = web.Application(client_max_size=self._max_body)
        app.router.add_route("*", "/{path:.*}", self._answer)
        silent = logging.Logger("endpoint", logging.CRITICAL + 1)  # aiohttp itself answers malformed HTTP with 400
        runner = web.AppRunner(app, access_log=None, logger=silent, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=BACKLOG).start()
        return runner

    async def _answer(self, request: web.Request) -> web.Response:
        from aiohttp import web

        secret, close = "", False
        try:
            secret, _, route = request.path.lstrip("/").partition("/v1/")
            session = request.headers.get(SESSION, "")
            secret = self._sessions.get(session, "") if secret == SHARED else secret
            body = await self._read(request) if secret in self._episodes else b""
            text, kind = await self._serve(request.method, secret, route, body, session)
            return web.Response(text=text, content_type=kind)
        except RequestError as error:
            status, kind, message, close = error.status, "invalid_request_error", str(error), error.close
        except Exception as error:  # the agent's client raises it, and the agent decides what follows
            status, kind, message = 500, "server_error", f"{type(error).__name__}: {error}"
        if episode := self._episodes.get(secret):
            episode.policy.last_refusal = message  # for the failure's message: the agent's client may hide it
        described = {"message": message, "type": kind, "param": None, "code": None}
        answer = web.json_response({"error": described}, status=status)
        if close:
            answer.force_close()
        return answer

    async def _read(self, request: web.Request) -> bytes:
        """The body of a request, decompressed. Raises `RequestError`."""
        from aiohttp import web

        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                return await request.read()
        except TimeoutError:
            raise RequestError(408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s", close=True) from None
        except web.HTTPRequestEntityTooLarge:
            found = f"the body has more than {self._max_body} bytes"
            raise RequestError(413, f"{found}; shorten the prompt or send smaller images", close=True) from None
        except Exception as error:  # of aiohttp or of a decompressor
            raise RequestError(400, f"the body can't be read: {' '.join(str(error).split())}", close=True) from None

    async def _serve(self, method: str, secret: str, route: str, body: bytes, session: str) -> tuple[str, str]:
        """The answer to a request, and its content type. Raises `RequestError`."""
        episode = self._episodes.get(secret)
        if episode is None:
            raise RequestError(404, ENDED)
        if (method, route) == ("GET", "models"):
            model = {"id": "policy", "object": "model", "created": int(time.time()), "owned_by": "slipstream"}
            return json.dumps({"object": "list", "data": [model]}), JSON
        if method != "POST" or route not in ROUTES:
            raise RequestError(404, f"{method} {route} is not served; POST {' or '.join(ROUTES)}, or GET models")
        fields, prompt = await run_in_thread(len(body), parse_request, ROUTES[route], body, self._tokenizer)
        try:
            dataclasses.replace(episode.policy.sampling, **fields.changes())
        except ValueError as error:
            raise RequestError(400, str(error).replace("stop_strings", "stop")) from None
        completions = await self._sample(episode, fields, prompt)
        episode.policy.sessions.get(session, []).extend(completions)
        cost = LOGPROB_COST if fields.logprobs is not False else 1
        size = cost * sum(len(c.token_ids) for c in completions)
        return await run_in_thread(size, answer_text, fields, completions, self._tokenizer)

    async def _sample(self, episode: _Episode, fields: SamplingRequest, prompt: EncodedPrompt) -> list[Completion]:
        """`fields.n` completions. Raises `RequestError` if the episode ends meanwhile."""
        seeds = [{} if fields.seed is None else {"seed": fields.seed + i} for i in range(fields.n)]
        token_ids, images = prompt
        draws = (episode.policy.sample(token_ids, images=images, **fields.changes(), **seed) for seed in seeds)
        drawing = asyncio.ensure_future(gather_all(draws))
        episode.requests.add(drawing)
        try:
            return await drawing
        except GenerationError as error:
            raise RequestError(400, str(error)) from None
        except asyncio.CancelledError:
            if episode.policy.secret in self._episodes:  # the client has disconnected
                raise
            raise RequestError(404, ENDED) from None
        finally:
            episode.requests.discard(drawing)
