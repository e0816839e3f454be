"""The policy behind an OpenAI-compatible URL, so that any agent with an HTTP client can be trained as it is.

Every episode has a path of its own that nobody can guess. Whatever is sampled there is drawn by the episode's `Policy`
and so becomes its rollout: the tokens, log-probabilities and versions that the generator reported, never text that was
tokenized again. A field that would change the answer and can't be served is refused, not ignored.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import itertools
import json
import logging
import secrets
import time
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from slipstream.config import ConfigError
from slipstream.environments.base import Codec, Policy
from slipstream.environments.text_limits import off_loop
from slipstream.environments.tools import beside_hermes, hermes
from slipstream.generators.base import GenerationError
from slipstream.rollout import Completion

if TYPE_CHECKING:
    from aiohttp import web

# Fields that say nothing about the answer. Any other that is not declared below has to be null, zero or empty.
IGNORED = {"metadata", "model", "parallel_tool_calls", "prompt_cache_key", "safety_identifier", "store", "user"}
MAX_BODY, MIN_BODY_LIMIT = 64 * 2**20, 2**20  # bytes of a request
BYTES_PER_TOKEN = 32  # of JSON that escapes every character
BODY_TIMEOUT_S = 60.0
BACKLOG = 1024  # connections that wait to be accepted
DESCRIBED = 16  # times the work of a token, if the answer describes it
MAX_ERRORS = 5  # that one answer names
JSON = "application/json"
ENDED = "there is no such episode, or it has ended"


T = TypeVar("T")
Items = Annotated[list[T], Field(fail_fast=True)]  # of which the first error is enough


class _Part(BaseModel):
    type: Literal["text"]
    text: str


class _Message(BaseModel):
    model_config = ConfigDict(extra="allow")
    role: str
    content: str | Items[_Part] | None = None

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
    stop: str | Items[str] | None = None
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
    messages: Items[_Message] = Field(min_length=1)
    tools: Items[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] = "auto"
    response_format: dict[Literal["type"], Literal["text"]] | None = None

    def encode(self, codec: Codec) -> array[int]:
        tools = self.tools if self.tool_choice == "auto" else None
        return codec.encode([message.plain() for message in self.messages], tools)


class _Text(_Request):
    prompt: str | Items[int]

    def encode(self, codec: Codec) -> array[int]:
        return codec.encode_raw(self.prompt)


ROUTES: dict[str, type[_Chat] | type[_Text]] = {"chat/completions": _Chat, "completions": _Text}


class _Refused(Exception):
    """A request that is answered with this status; the connection `ends` where its body was not read."""

    def __init__(self, status: int, message: str, ends: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.ends = ends


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
        context = codec.limits.context
        self._max_body = max(MIN_BODY_LIMIT, BYTES_PER_TOKEN * context) if context else MAX_BODY

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
        app = web.Application(client_max_size=self._max_body)
        app.router.add_route("*", "/{path:.*}", self._answer)
        silent = logging.Logger("endpoint", logging.CRITICAL + 1)  # a client that sends no HTTP is told 400, by aiohttp
        runner = web.AppRunner(app, access_log=None, logger=silent, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=BACKLOG).start()
        return runner

    async def _answer(self, request: web.Request) -> web.Response:
        from aiohttp import web

        secret, ends = "", False
        try:
            secret, _, route = request.path.lstrip("/").partition("/v1/")
            body = await self._read(request) if secret in self._episodes else b""
            text, kind = await self._serve(request.method, secret, route, body)
            return web.Response(text=text, content_type=kind)
        except _Refused as error:
            status, kind, message, ends = error.status, "invalid_request_error", str(error), error.ends
        except Exception as error:  # the agent's client raises it: what it means for the episode is the agent's to say
            status, kind, message = 500, "server_error", f"{type(error).__name__}: {error}"
        if episode := self._episodes.get(secret):
            episode.policy.refused = message  # which the agent's client may not show
        described = {"message": message, "type": kind, "param": None, "code": None}
        answer = web.json_response({"error": described}, status=status)
        if ends:
            answer.force_close()
        return answer

    async def _read(self, request: web.Request) -> bytes:
        """The body of a request, decompressed. Raises `_Refused`."""
        from aiohttp import web

        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                return await request.read()
        except TimeoutError:
            raise _Refused(408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s", ends=True) from None
        except web.HTTPRequestEntityTooLarge:
            limit = f"{self._max_body} bytes, as follows from generator.context"
            raise _Refused(413, f"the body has more than {limit}; shorten the prompt", ends=True) from None
        except Exception as error:  # of aiohttp, or of what decompresses
            raise _Refused(400, f"the body can't be read: {' '.join(str(error).split())}", ends=True) from None

    async def _serve(self, method: str, secret: str, route: str, body: bytes) -> tuple[str, str]:
        """The answer to a request of the episode with this secret, and its content type."""
        episode = self._episodes.get(secret)
        if episode is None:
            raise _Refused(404, ENDED)
        if (method, route) == ("GET", "models"):
            model = {"id": "policy", "object": "model", "created": int(time.time()), "owned_by": "slipstream"}
            return json.dumps({"object": "list", "data": [model]}), JSON
        if method != "POST" or route not in ROUTES:
            raise _Refused(404, f"{method} {route} is not served; POST {' or '.join(ROUTES)}, or GET models")
        asked, prompt = await off_loop(len(body), _parse, ROUTES[route], body, self._codec)
        try:
            dataclasses.replace(episode.policy.sampling, **asked.changes())
        except ValueError as error:
            raise _Refused(400, str(error).replace("stop_strings", "stop")) from None
        seeds = [{} if asked.seed is None else {"seed": asked.seed + i} for i in range(asked.n)]
        draws = [asyncio.ensure_future(episode.policy.sample(prompt, **asked.changes(), **seed)) for seed in seeds]
        drawing = asyncio.gather(*draws)
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
            for draw in draws:  # the others of one that failed
                draw.cancel()
        size = sum(len(c.token_ids) for c in drawn) * (DESCRIBED if asked.logprobs is not False else 1)
        return await off_loop(size, _answer_text, asked, drawn, self._codec)


def _answer_text(asked: _Request, drawn: Sequence[Completion], codec: Codec) -> tuple[str, str]:
    """The answer and its content type."""
    answer = _body(asked, drawn, codec)
    return (_events(asked, answer), "text/event-stream") if asked.stream else (json.dumps(answer), JSON)


def _parse(kind: type[_Chat] | type[_Text], body: bytes, codec: Codec) -> tuple[_Chat | _Text, array[int]]:
    """The request and the token ids of its prompt. Raises `_Refused`."""
    asked = _request(kind, body, codec)
    try:
        return asked, asked.encode(codec)
    except GenerationError as error:
        raise _Refused(400, str(error)) from None
    except Exception as error:  # a chat template is a program: it may raise anything
        raise _Refused(400, f"the prompt can't be encoded: {error}") from None


def _request(kind: type[_Chat] | type[_Text], body: bytes, codec: Codec) -> _Chat | _Text:
    try:
        fields = from_json(body)
        if isinstance(fields, dict):
            for name in ("messages", "prompt"):  # a model of each is made next
                if isinstance(items := fields.get(name), list):
                    codec.limits.refuse(f"{len(items)} tokens or messages", len(items))
        if isinstance(fields, dict):
            fields = {name: value for name, value in fields.items() if value is not None}
        asked = kind.model_validate(fields)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)[:MAX_ERRORS]
        found = [f"{'.'.join(map(str, e['loc'])) or 'the body'}: {e['msg']}" for e in errors]
        raise _Refused(400, "; ".join(found)) from None
    except GenerationError as error:
        raise _Refused(400, str(error)) from None
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
        choices.append(choice | ({"token_ids": list(c.token_ids)} if asked.return_token_ids else {}))
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
        lists = {"tokens": tokens, "token_logprobs": list(completion.logprobs), "text_offset": offsets}
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
