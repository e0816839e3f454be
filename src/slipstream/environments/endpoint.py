"""The policy behind an OpenAI-compatible URL, so that any agent with an HTTP client can be trained as it is.

Every episode has a path of its own that nobody can guess. Whatever is sampled there is drawn by the episode's `Policy`
and so becomes its rollout: the tokens, log-probabilities and versions that the generator reported, never text that was
tokenized again. A field that would change the answer and can't be served is refused, not ignored.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import json
import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from slipstream.config import ConfigError
from slipstream.environments.base import Codec, Policy
from slipstream.environments.tools import beside_hermes, hermes
from slipstream.generators.base import GenerationError
from slipstream.rollout import Completion

if TYPE_CHECKING:
    from aiohttp import web

# Fields that say nothing about the answer. Any other that is not declared below has to be null, zero or empty.
IGNORED = {"metadata", "model", "parallel_tool_calls", "prompt_cache_key", "safety_identifier", "store", "user"}
LARGEST_BODY = 64 * 2**20
ENDED = "there is no such episode, or it has ended"


class _Part(BaseModel):
    type: Literal["text"]
    text: str


class _Message(BaseModel):
    model_config = ConfigDict(extra="allow")
    role: str
    content: str | list[_Part] | None = None

    def plain(self) -> dict[str, Any]:
        """What a chat template takes: the content as one string."""
        parts = self.content if isinstance(self.content, list) else [_Part(type="text", text=self.content or "")]
        return self.model_dump() | {"content": "\n".join(part.text for part in parts)}


class _Request(BaseModel):
    """What both routes take."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, lt=2**31)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stop: str | list[str] | None = None
    seed: int | None = None
    n: int = Field(1, ge=1, le=128)
    logprobs: bool | Literal[0, 1] = False
    return_token_ids: bool = False
    stream: bool = False
    stream_options: dict[str, bool] = {}

    def changes(self) -> dict[str, Any]:
        """The fields of `Sampling` that were given; what is left out is as the run samples."""
        changes = self.model_dump(include={"temperature", "top_p", "top_k"}, exclude_none=True)
        if limit := self.max_completion_tokens or self.max_tokens:
            changes["max_tokens"] = limit
        if self.stop is not None:
            stops = [self.stop] if isinstance(self.stop, str) else self.stop
            changes["stop_strings"] = tuple(stop for stop in stops if stop)
        return changes


class _Chat(_Request):
    messages: list[_Message] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] = "auto"
    response_format: dict[Literal["type"], Literal["text"]] | None = None

    def encode(self, codec: Codec) -> tuple[int, ...]:
        tools = self.tools if self.tool_choice == "auto" else None
        return codec.encode([message.plain() for message in self.messages], tools)


class _Text(_Request):
    prompt: str | list[int]

    def encode(self, codec: Codec) -> tuple[int, ...]:
        return codec.encode_raw(self.prompt)


ROUTES: dict[str, type[_Chat] | type[_Text]] = {"chat/completions": _Chat, "completions": _Text}


class _Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Episode(NamedTuple):
    policy: Policy
    requests: set[asyncio.Future[list[Completion]]]


class Endpoint:
    """One server on the loopback interface, at a free port, for all episodes of a run; starts when the first asks for
    its URL."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._episodes: dict[str, _Episode] = {}
        self._server: asyncio.Task[web.AppRunner] | None = None

    async def open(self, policy: Policy) -> str:
        """The base URL at which `policy` is sampled until `end`. Raises `ConfigError` where aiohttp is missing."""
        self._episodes.setdefault(policy.secret, _Episode(policy, set()))
        if self._server is None:  # in a context of its own: it outlives the episode that happens to start it
            self._server = asyncio.get_running_loop().create_task(self._start(), context=contextvars.Context())
        host, port = (await asyncio.shield(self._server)).addresses[0][:2]
        return f"http://{host}:{port}/{policy.secret}/v1"

    def end(self, policy: Policy) -> None:
        """Forget the episode of `policy`: abort what it is drawing, and answer 404 from now on."""
        if episode := self._episodes.pop(policy.secret, None):
            for request in episode.requests:
                request.cancel()

    async def close(self) -> None:
        """Stop the server, if it was ever started."""
        if self._server:
            self._server.cancel()  # changes nothing once it has started
            [server] = await asyncio.gather(self._server, return_exceptions=True)
            if not isinstance(server, BaseException):
                await server.cleanup()

    async def _start(self) -> web.AppRunner:
        try:
            from aiohttp import web
        except ImportError:
            raise ConfigError("policy.base_url() needs aiohttp: pip install 'slipstream-rl[endpoint]'") from None
        app = web.Application(client_max_size=LARGEST_BODY)
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    async def _answer(self, request: web.Request) -> web.Response:
        from aiohttp import web

        secret, _, route = request.path.lstrip("/").partition("/v1/")
        try:
            answer = await self._serve(request.method, secret, route, await request.read())
            if isinstance(answer, str):
                return web.Response(text=answer, content_type="text/event-stream")
            return web.json_response(answer)
        except (_Refused, web.HTTPException) as error:
            status, kind, message = error.status, "invalid_request_error", str(error)
        except Exception as error:  # the agent's client raises it: what it means for the episode is the agent's to say
            status, kind, message = 500, "server_error", f"{type(error).__name__}: {error}"
        if episode := self._episodes.get(secret):
            episode.policy.refused = message  # which the agent's client may not show
        described = {"message": message, "type": kind, "param": None, "code": None}
        return web.json_response({"error": described}, status=status)

    async def _serve(self, method: str, secret: str, route: str, body: bytes) -> dict[str, Any] | str:
        """The answer to a request of the episode with this secret: JSON, or the events of a stream as text."""
        episode = self._episodes.get(secret)
        if episode is None:
            raise _Refused(404, ENDED)
        if (method, route) == ("GET", "models"):
            model = {"id": "policy", "object": "model", "created": int(time.time()), "owned_by": "slipstream"}
            return {"object": "list", "data": [model]}
        if method != "POST" or route not in ROUTES:
            raise _Refused(404, f"{method} {route} is not served; POST {' or '.join(ROUTES)}, or GET models")
        asked = _parse(ROUTES[route], body)
        try:
            prompt = asked.encode(self._codec)
        except Exception as error:  # a chat template is a program: it may raise anything
            raise _Refused(400, f"the prompt can't be encoded: {error}") from None
        seeds = [{} if asked.seed is None else {"seed": asked.seed + i} for i in range(asked.n)]
        drawing = asyncio.gather(*(episode.policy.sample(prompt, **asked.changes(), **seed) for seed in seeds))
        episode.requests.add(drawing)
        try:
            drawn = await drawing
        except GenerationError as error:
            raise _Refused(400, str(error)) from None
        except asyncio.CancelledError:
            if secret in self._episodes:  # the client is gone
                raise
            raise _Refused(404, ENDED) from None
        finally:
            episode.requests.discard(drawing)
        answer = _body(asked, drawn, self._codec)
        return _events(asked, answer) if asked.stream else answer


def _parse(kind: type[_Chat] | type[_Text], body: bytes) -> _Chat | _Text:
    try:
        fields = from_json(body)
        if isinstance(fields, dict):
            fields = {name: value for name, value in fields.items() if value is not None}
        asked = kind.model_validate(fields)
    except ValidationError as error:
        found = [f"{'.'.join(map(str, e['loc'])) or 'the body'}: {e['msg']}" for e in error.errors()]
        raise _Refused(400, "; ".join(found)) from None
    except ValueError as error:
        raise _Refused(400, f"the body is not JSON: {error}") from None
    for name, value in (asked.model_extra or {}).items():
        if value and name not in IGNORED:
            raise _Refused(400, f"{name} is not supported here; leave it out")
    return asked


def _body(asked: _Request, drawn: Sequence[Completion], codec: Codec) -> dict[str, Any]:
    """The completions as OpenAI's API answers, with the newest version that drew a token as the fingerprint."""
    chat = isinstance(asked, _Chat)
    choices = []
    for index, c in enumerate(drawn):
        calls = _calls(c.text) if isinstance(asked, _Chat) and asked.tools and asked.tool_choice == "auto" else []
        message = {"role": "assistant", "content": c.text} | ({"content": None, "tool_calls": calls} if calls else {})
        said: dict[str, Any] = {"message": message} if chat else {"text": c.text}
        logprobs = None if asked.logprobs is False else _logprobs(c, chat, codec)
        choice = {
            "index": index,
            **said,
            "logprobs": logprobs,
            "finish_reason": "tool_calls" if calls else c.finish_reason,
        }
        choices.append(choice | ({"token_ids": c.token_ids} if asked.return_token_ids else {}))
    read, written = len(drawn[0].prompt_ids), sum(len(c.token_ids) for c in drawn)
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": "policy",
        "system_fingerprint": f"version {max(c.versions[1] for c in drawn)}",
        "choices": choices,
        "usage": {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written},
    }


def _calls(text: str) -> list[dict[str, Any]]:
    """Calls of tools, if the text is nothing else; what stands beside them would be lost, so then it stays text."""
    calls = [] if beside_hermes(text) else hermes(text)
    if any(call.problem for call in calls):
        return []
    functions = [{"name": call.name, "arguments": json.dumps(call.arguments)} for call in calls]
    return [{"index": i, "id": f"call_{secrets.token_hex(12)}", "type": "function", "function": f}
            for i, f in enumerate(functions)]  # fmt: skip


def _logprobs(completion: Completion, chat: bool, codec: Codec) -> dict[str, Any]:
    tokens = [codec.token(i) for i in completion.token_ids]
    if not chat:
        offsets = [0, *itertools.accumulate(map(len, tokens[:-1]))]
        lists = {"tokens": tokens, "token_logprobs": completion.logprobs, "text_offset": offsets}
        return lists | {"top_logprobs": None}
    pairs = zip(tokens, completion.logprobs, strict=True)
    content = [{"token": t, "logprob": p, "bytes": list(t.encode()), "top_logprobs": []} for t, p in pairs]
    return {"content": content, "refusal": None}


def _events(asked: _Request, answer: dict[str, Any]) -> str:
    """The same answer as server-sent events: each choice's text at once, then its end; then usage, if asked for."""
    chat = isinstance(asked, _Chat)
    object_ = "chat.completion.chunk" if chat else "text_completion"
    changes: list[dict[str, Any]] = []
    for choice in answer["choices"]:
        end = {"index": choice["index"], "logprobs": None, "finish_reason": choice.pop("finish_reason")}
        end["delta" if chat else "text"] = {} if chat else ""
        if chat:
            choice["delta"] = choice.pop("message")
        changes += [{"choices": [said], "usage": None} for said in (choice | {"finish_reason": None}, end)]
    if asked.stream_options.get("include_usage"):
        changes.append({"choices": []})
    events = [json.dumps({**answer, "object": object_, **change}) for change in changes]
    return "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"])
