"""Tools: plain Python functions that the policy calls in its replies.

A `ToolCallParser` finds calls in the text of a reply. Errors (unknown tool, invalid arguments, an exception, a timeout)
are returned to the model as results.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ArgsKwargs

from slipstream.config.section import ConfigError
from slipstream.errors import UserError

Tool = Callable[..., Any]
Schemas = Sequence[Mapping[str, Any]]  # of tools, in OpenAI's format
MAX_RESULT = 4000  # characters; longer results are cut in the middle


class ServerFailed(UserError):
    """A server of tools or of the environment did not answer as it should; the rollout fails."""


class Call(NamedTuple):
    """A call of the tool `name`. `arguments` are named, or the text in the parentheses of a plain call.

    `problem` explains a malformed call to the model.
    """

    name: str
    arguments: Mapping[str, Any] | str
    problem: str = ""


MALFORMED = Call("", {}, 'not a tool call; write {"name": "...", "arguments": {...}}')
ToolCallParser = Callable[[str], list[Call]]
HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def hermes(text: str) -> list[Call]:
    """Tool calls in the Hermes/Qwen format: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""
    return [json_call(body) for body in HERMES.findall(text)]


def split_hermes(text: str) -> tuple[str, list[Call]]:
    """The text before Hermes calls, and the calls; the whole text without calls if text follows them, or one is
    malformed, since a chat template could not render that."""
    before, begin, rest = text.partition("<tool_call>")
    calls = hermes(begin + rest)
    if HERMES.sub("", begin + rest).strip() or any(call.problem for call in calls):
        return text, []
    return before.strip(), calls


def json_call(body: str) -> Call:
    """The call in JSON text such as {"name": ..., "arguments": {...}}."""
    try:
        call = json.loads(body)
        return _call(call["name"], call.get("arguments") or {})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return MALFORMED


def _call(name: Any, arguments: Any) -> Call:
    """A call whose arguments are an object, or its JSON text."""
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return MALFORMED
    return Call(name, arguments) if isinstance(name, str) and isinstance(arguments, dict) else MALFORMED


def plain(text: str) -> list[Call]:
    """One call, alone on the last line of the text: `name(argument)`. For models too small for JSON."""
    found = re.fullmatch(r"(\w+)\((.*)\)", text.rstrip().rpartition("\n")[2].lstrip())
    return [Call(found[1], found[2])] if found else []


class VllmToolCallParser:
    """vLLM's parser of tool calls `name`. Raises `ConfigError` without vLLM, or if the tokenizer lacks its tokens."""

    def __init__(self, name: str, tokenizer: Any) -> None:
        what = f"model.tool_call_parser = {name!r}"
        try:
            from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
            from vllm.tool_parsers import ToolParserManager
        except ImportError:
            raise ConfigError(
                f'{what} is one of vLLM\'s, which is not installed; use "hermes" or "plain", or: pip install '
                "'slipstream-rl[vllm]'"
            ) from None
        try:
            self._kind, self._tokenizer = ToolParserManager.get_tool_parser(name), tokenizer
            self._request = ChatCompletionRequest
            self._kind(tokenizer)
        except KeyError:
            known = sorted({"plain", *ToolParserManager.lazy_parsers})
            raise ConfigError(f"{what} is unknown; there are {', '.join(known)}") from None
        except Exception as error:
            raise ConfigError(f"{what} does not fit this model: {' '.join(str(error).split())}") from None

    def split(self, text: str, schemas: Schemas) -> tuple[str, list[Call]]:
        """The text outside of the calls, and the calls. `text` is the reply with its special tokens."""
        try:
            request = self._request(messages=[{"role": "user", "content": ""}], tools=list(schemas) or None)
            found = self._kind(self._tokenizer, request.tools).extract_tool_calls(text, request)
        except Exception:  # a policy may write anything, a client offer any tool
            return text, []
        return found.content or "", [_call(c.function.name, c.function.arguments) for c in found.tool_calls]


class Tools:
    """The functions that a conversation may call, by name, each call within `timeout` seconds.

    Async functions run in the event loop, others in a thread each, which is abandoned at the timeout. A tool that may
    hang should be async, around a process that can be killed.
    """

    def __init__(
        self, functions: Sequence[Tool], parse: ToolCallParser | VllmToolCallParser, timeout: float = 10.0
    ) -> None:
        for wrong in (f for f in functions if not callable(f)):
            raise TypeError(f"tools has {wrong!r:.60}, which is no function; give the functions themselves")
        # A tool of a server has a schema, by which the server validates.
        self._server_schemas = {f.__name__: f.schema for f in functions if hasattr(f, "schema")}
        adapted = [f for f in functions if f.__name__ not in self._server_schemas]
        self._adapters = {f.__name__: TypeAdapter(f) for f in adapted}  # type: ignore[arg-type]
        self._functions = {f.__name__: f for f in functions}
        self._parse, self._timeout = parse, timeout

    def __bool__(self) -> bool:
        return bool(self._functions)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The functions as OpenAI tool definitions, for the chat template.

        Descriptions are docstrings. Parameters are JSON schemas: of type annotations, or from the server of the tool.
        """
        schemas = {name: adapter.json_schema() for name, adapter in self._adapters.items()} | self._server_schemas
        return [
            {
                "type": "function",
                "function": {
                    "name": name,
                    "description": inspect.getdoc(function) or "",
                    "parameters": {"type": "object", "properties": {}, **schemas[name]},
                },
            }
            for name, function in self._functions.items()
        ]

    def calls(self, text: str, raw: str) -> list[Call]:
        """The calls in a reply, which with its special tokens is `raw`; [] without tools."""
        if not self._functions:
            return []
        if isinstance(self._parse, VllmToolCallParser):
            return self._parse.split(raw, self.schemas)[1]
        found: list[Any] = self._parse(text)
        for call in found:
            if not isinstance(call, Call):
                wanted = "a list of Call(name, arguments)"
                raise ConfigError(f"parse must return {wanted}, and returned {call!r:.100} in it")
        return found

    async def run(self, call: Call) -> tuple[str, bool]:
        """The result of a call as text for the model, and whether the call succeeded."""
        if call.problem:
            return f"error: {call.problem}", False
        if call.name not in self._functions:
            return f"error: no tool {call.name}; there are {', '.join(self._functions)}", False
        function, arguments = self._functions[call.name], call.arguments
        if isinstance(arguments, str):
            known = self._server_schemas.get(call.name, {}).get("properties")
            first = next(iter(known or inspect.signature(function).parameters), None)
            arguments = {first: arguments} if first else {}
        try:
            async with asyncio.timeout(self._timeout) as clock:
                result = await self._call(call.name, arguments)
        except ServerFailed:
            raise
        except TimeoutError as error:
            what = f"took longer than {self._timeout:g} s" if clock.expired() else str(error)
            return f"error: {what}", False
        except ValidationError as error:
            wrong = [f"{'.'.join(map(str, e['loc'])) or 'arguments'}: {e['msg']}" for e in error.errors()]
            return _short(f"error: {'; '.join(wrong)}"), False
        except Exception as error:
            return _short(f"error: {type(error).__name__}: {error}"), False
        return _short(result), True

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The result of a call as text: a string as it is, other values as JSON. Raises what the function raises."""

        if name in self._server_schemas:
            return str(await self._functions[name](**arguments))

        def call() -> Any:  # validates the arguments against the annotations, with pydantic's conversions
            return self._adapters[name].validate_python(ArgsKwargs((), dict(arguments)))

        def call_to_text() -> Any:
            result = call()
            return result if inspect.isawaitable(result) else _text(result)

        if inspect.iscoroutinefunction(self._functions[name]):
            result = await call()
        elif inspect.isawaitable(result := await _in_thread(call_to_text)):
            result = await result
        return result if isinstance(result, str) else await _in_thread(lambda: _text(result))


def _text(result: Any) -> str:
    return result if isinstance(result, str) else json.dumps(result, default=str)


def _in_thread(function: Callable[[], Any]) -> asyncio.Future[Any]:
    """Run `function` in a daemon thread, which does not keep the process alive."""
    outcome: Future[Any] = Future()
    outcome.set_running_or_notify_cancel()  # from now on a cancellation abandons the thread

    def set_outcome() -> None:
        try:
            outcome.set_result(function())
        except Exception as raised:
            outcome.set_exception(raised)
        except BaseException as raised:  # SystemExit would end more than the tool
            outcome.set_exception(RuntimeError(f"{type(raised).__name__}: {raised}"))

    threading.Thread(target=set_outcome, daemon=True).start()
    return asyncio.wrap_future(outcome)


def _short(text: str) -> str:
    half = MAX_RESULT // 2
    return text if len(text) <= MAX_RESULT else f"{text[:half]} ... {text[-half:]}"
