"""OpenAI's HTTP API, for `endpoint`: validate requests, encode their prompts, and format completions as answers.

Consumes request bodies and completions, produces `ChatRequest`, `TextRequest` and answer texts. Raises `RequestError`.
"""

from __future__ import annotations

import itertools
import json
import secrets
import time
from array import array
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError, from_json

from slipstream.config.schema import TemplateArguments
from slipstream.environments.chat_tokenizer import ChatTokenizer
from slipstream.environments.images import image_part
from slipstream.environments.tools import Call, json_call
from slipstream.generators.base import GenerationError
from slipstream.rollout import Completion, Image

# Fields without effect on the answer. Other fields that are not declared below must be null, zero or empty.
IGNORED = {"metadata", "model", "parallel_tool_calls", "prompt_cache_key", "safety_identifier", "store", "user"}
MAX_ERRORS = 5  # validation errors in one answer
JSON = "application/json"

T = TypeVar("T")
EncodedPrompt = tuple["array[int]", tuple[Image, ...]]
Items = Annotated[list[T], Field(fail_fast=True)]  # validation stops at the first invalid item


class _TextPart(BaseModel):
    type: Literal["text"]
    text: str

    def normal(self) -> dict[str, Any]:
        return {"type": "text", "text": self.text}


def _encoded_image(url: str) -> str:
    """The data URI of an image. Raises `ValueError` for any other URL: a client must not read files of this host."""
    return str(image_part(url, None)["image"])


class _ImageUrl(BaseModel):
    url: Annotated[str, AfterValidator(_encoded_image)]


class _ImagePart(BaseModel):
    type: Literal["image_url"]
    image_url: _ImageUrl

    def normal(self) -> dict[str, Any]:
        return {"type": "image", "image": self.image_url.url}


_Part = Annotated[_TextPart | _ImagePart, Field(discriminator="type")]


class _Message(BaseModel):
    model_config = ConfigDict(extra="allow")
    role: str
    content: str | Items[_Part] | None = None

    def plain(self) -> dict[str, Any]:
        """The message in chat-template format: the content is one string, or with images the parts of `images`."""
        content: Any = self.content or ""
        if isinstance(content, list):
            texts = [part.text for part in content if isinstance(part, _TextPart)]
            content = "\n".join(texts) if len(texts) == len(content) else [part.normal() for part in content]
        return self.model_dump() | {"content": content}


class SamplingRequest(BaseModel):
    """Fields of both routes."""

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
        """The fields of `Sampling` that the request sets; the others keep the run's values."""
        changes = self.model_dump(include={"temperature", "top_p", "top_k"}, exclude_none=True)
        if limit := self.max_completion_tokens or self.max_tokens:
            changes["max_tokens"] = limit
        if self.stop is not None:
            stops = [self.stop] if isinstance(self.stop, str) else self.stop
            changes["stop_strings"] = tuple(stop for stop in stops if stop)
        if self.logprobs is not False:
            changes["record_logprobs"] = True
        return changes


class _Function(BaseModel):
    model_config = ConfigDict(extra="allow")
    name: str


class _Tool(BaseModel):
    type: Literal["function"]
    function: _Function


def _validate_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A pydantic validator: the tool unchanged. Raises `PydanticCustomError` if it is no function with a name."""
    function = tool.get("function")
    fields = function if isinstance(function, dict) else {}
    kinds = {"name": str, "description": str | None, "parameters": dict | None}
    valid = all(isinstance(fields.get(name), kind) for name, kind in kinds.items())
    if not valid or tool.get("type", "function") != "function":
        expected = '{"type": "function", "function": {"name": "...", "description": "...", "parameters": {...}}}'
        raise PydanticCustomError("tool", "Input should be {expected}", {"expected": expected})
    return tool


class _JsonSchema(BaseModel):
    schema_: dict[str, Any] = Field(alias="schema")


class _ResponseFormat(BaseModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None


class ChatRequest(SamplingRequest):
    messages: Items[_Message] = Field(min_length=1)
    tools: Items[Annotated[dict[str, Any], AfterValidator(_validate_tool)]] | None = None
    tool_choice: Literal["auto", "none", "required"] | _Tool = "auto"
    chat_template_kwargs: TemplateArguments = {}
    response_format: _ResponseFormat | None = None

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        return self.tools if self.tool_choice != "none" else None

    @property
    def forces_call(self) -> bool:
        """Whether the answer is the JSON of a tool call."""
        return self.tool_choice not in ("auto", "none")

    def changes(self) -> dict[str, Any]:
        changes = super().changes()
        if self.forces_call:
            named = self.tool_choice.function.name if isinstance(self.tool_choice, _Tool) else None
            functions = [tool.get("function") or {} for tool in self.tools or ()]
            calls = [_call_schema(f) for f in functions if named is None or f.get("name") == named]
            if not calls:
                raise ValueError(f"tool_choice: tools has no function{f' {named}' if named else ''}")
            changes["json_schema"] = json.dumps(calls[0] if len(calls) == 1 else {"anyOf": calls})
        elif (form := self.response_format) and form.type != "text":
            if form.type == "json_schema" and not form.json_schema:
                raise ValueError("response_format.json_schema is missing")
            changes["json_schema"] = json.dumps(form.json_schema.schema_ if form.json_schema else {"type": "object"})
        return changes

    def encode(self, tokenizer: ChatTokenizer) -> EncodedPrompt:
        tokenizer = tokenizer.with_template(self.chat_template_kwargs)
        messages = [message.plain() for message in self.messages]
        return tokenizer.encode(messages, self.offered_tools), tokenizer.images(messages)


class TextRequest(SamplingRequest):
    prompt: str | Items[int]

    def encode(self, tokenizer: ChatTokenizer) -> EncodedPrompt:
        return tokenizer.encode_raw(self.prompt), ()


RequestType = type[ChatRequest] | type[TextRequest]
ROUTES: dict[str, RequestType] = {"chat/completions": ChatRequest, "completions": TextRequest}


class RequestError(Exception):
    """A request to answer with this HTTP status. `close`: close the connection, whose body is unread."""

    def __init__(self, status: int, message: str, close: bool = False) -> None:
        super().__init__(message)
        self.status, self.close = status, close


def answer_text(
    fields: SamplingRequest, completions: Sequence[Completion], tokenizer: ChatTokenizer
) -> tuple[str, str]:
    """The answer and its content type."""
    answer = _answer_object(fields, completions, tokenizer)
    return (_events(fields, answer), "text/event-stream") if fields.stream else (json.dumps(answer), JSON)


def parse_request(
    kind: RequestType, body: bytes, tokenizer: ChatTokenizer
) -> tuple[ChatRequest | TextRequest, EncodedPrompt]:
    """The request, and the token ids and images of its prompt. Raises `RequestError`."""
    fields = _validate(kind, body, tokenizer)
    try:
        return fields, fields.encode(tokenizer)
    except GenerationError as error:
        raise RequestError(400, str(error)) from None
    except Exception as error:  # a chat template may raise anything
        raise RequestError(400, f"the prompt can't be encoded: {error}") from None


def _validate(kind: RequestType, body: bytes, tokenizer: ChatTokenizer) -> ChatRequest | TextRequest:
    """The request in a body. Raises `RequestError`."""
    try:
        found = from_json(body)
        if isinstance(found, dict):
            found = {name: value for name, value in found.items() if value is not None}
            for name in ("messages", "prompt"):  # before pydantic validates each item
                if isinstance(items := found.get(name), list):
                    contents = (item.get("content") for item in items if isinstance(item, dict))
                    count = len(items) + sum(len(content) for content in contents if isinstance(content, list))
                    tokenizer.limits.validate_tokens(f"{count} tokens, messages or parts", count)
        fields = kind.model_validate(found)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)[:MAX_ERRORS]
        messages = [f"{'.'.join(map(str, e['loc'])) or 'the body'}: {e['msg']}" for e in errors]
        raise RequestError(400, "; ".join(messages)) from None
    except GenerationError as error:
        raise RequestError(400, str(error)) from None
    except ValueError as error:
        raise RequestError(400, f"the body is not JSON: {error}") from None
    for name, value in (fields.model_extra or {}).items():
        if value and name not in IGNORED:
            raise RequestError(400, f"{name} is not supported here; leave it out")
    return fields


def _answer_object(
    fields: SamplingRequest, completions: Sequence[Completion], tokenizer: ChatTokenizer
) -> dict[str, Any]:
    """The completions as OpenAI's API answers; the fingerprint is the newest version that sampled a token."""
    chat = isinstance(fields, ChatRequest)
    choices = []
    for index, c in enumerate(completions):
        text, calls = c.text, []
        if isinstance(fields, ChatRequest) and fields.offered_tools:
            if fields.forces_call and not (call := json_call(c.text)).problem:
                text, found = "", [call]
            else:
                text, found = tokenizer.split_calls(c, fields.offered_tools)
            calls = [_tool_call(i, call) for i, call in enumerate(found)]
        message: dict[str, Any] = {"role": "assistant", "content": text}
        message |= {"content": text or None, "tool_calls": calls} if calls else {}
        content: dict[str, Any] = {"message": message} if chat else {"text": c.text}
        logprobs = None if fields.logprobs is False else _logprobs(c, chat, tokenizer)
        ids = {"token_ids": list(c.token_ids)} if fields.return_token_ids else {}
        reason = "tool_calls" if calls else c.finish_reason
        choices.append({"index": index, **content, "logprobs": logprobs, "finish_reason": reason, **ids})
    prompt, sampled = len(completions[0].prompt_ids), sum(len(c.token_ids) for c in completions)
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": "policy",
        "system_fingerprint": f"version {max(c.versions[1] for c in completions)}",
        "choices": choices,
        "usage": {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled},
    }


def _call_schema(function: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema of a call of an OpenAI function."""
    arguments = function.get("parameters") or {"type": "object"}
    properties = {"name": {"const": function.get("name")}, "arguments": arguments}
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def _tool_call(index: int, call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.dumps(call.arguments)}
    return {"index": index, "id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def _logprobs(completion: Completion, chat: bool, tokenizer: ChatTokenizer) -> dict[str, Any]:
    tokens = [tokenizer.decode_token(i) for i in completion.token_ids]
    if not chat:
        offsets = [0, *itertools.accumulate(map(len, tokens[:-1]))]
        lists = {"tokens": tokens, "token_logprobs": list(completion.logprobs), "text_offset": offsets}
        return lists | {"top_logprobs": None}
    pairs = zip(tokens, completion.logprobs, strict=True)
    content = [{"token": t, "logprob": p, "bytes": list(t.encode()), "top_logprobs": []} for t, p in pairs]
    return {"content": content, "refusal": None}


def _events(fields: SamplingRequest, answer: dict[str, Any]) -> str:
    """The same answer as server-sent events: each choice's text at once, then its end; then usage, if asked for."""
    chat = isinstance(fields, ChatRequest)
    object_ = "chat.completion.chunk" if chat else "text_completion"
    changes: list[dict[str, Any]] = []
    for choice in answer["choices"]:
        end = {"index": choice["index"], "logprobs": None, "finish_reason": choice.pop("finish_reason")}
        end["delta" if chat else "text"] = {} if chat else ""
        if chat:
            choice["delta"] = choice.pop("message")
        changes += [{"choices": [change], "usage": None} for change in (choice | {"finish_reason": None}, end)]
    if fields.stream_options.get("include_usage"):
        changes.append({"choices": []})
    events = [json.dumps({**answer, "object": object_, **change}) for change in changes]
    return "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"])
