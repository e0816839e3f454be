"""Tools: plain Python functions that a policy calls in what it says, and is told the results of.

A call is found in the text of a reply by a `Parse`. What goes wrong with a call (no such tool, arguments that do not
fit, an exception, too long) is a result like any other: the model is told, and can do better.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ArgsKwargs

Tool = Callable[..., Any]
LONGEST = 4000  # characters of a result; what is longer keeps its beginning and its end


class Call(NamedTuple):
    """A call of the tool `name`. `arguments` are named, or the text between the brackets of a plain call. `problem`
    says why it is none, in words for the model."""

    name: str
    arguments: Mapping[str, Any] | str
    problem: str = ""


Parse = Callable[[str], list[Call]]


HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def hermes(text: str) -> list[Call]:
    """Calls as Hermes and Qwen models write them: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""
    return [_hermes_call(body) for body in HERMES.findall(text)]


def beside_hermes(text: str) -> str:
    """What stands before, between and after such calls."""
    return HERMES.sub("", text).strip()


def _hermes_call(body: str) -> Call:
    try:
        call = json.loads(body)
        name, arguments = call["name"], call.get("arguments") or {}
        if isinstance(arguments, str):  # some models put JSON into JSON
            arguments = json.loads(arguments)
        if isinstance(name, str) and isinstance(arguments, dict):
            return Call(name, arguments)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    return Call("", {}, 'not a tool call; write {"name": "...", "arguments": {...}}')


def plain(text: str) -> list[Call]:
    """One call, alone on the last line of the text: `name(argument)`. For models too small for JSON."""
    found = re.fullmatch(r"(\w+)\((.*)\)", text.rstrip().rpartition("\n")[2].lstrip())
    return [Call(found[1], found[2])] if found else []


class Tools:
    """The functions that a conversation may call, by name. Each call gets `time_limit` seconds.

    A function that is async runs in the event loop. Any other runs in a thread of its own, which nobody waits for once
    its time is up: a tool that may never return should be async, around a process that can be killed.
    """

    def __init__(self, functions: Sequence[Tool], parse: Parse, time_limit: float = 10.0) -> None:
        self._adapters = {f.__name__: TypeAdapter(f) for f in functions}  # type: ignore[arg-type]
        self._functions = {f.__name__: f for f in functions}
        self._parse = parse
        self._time_limit = time_limit

    def __bool__(self) -> bool:
        return bool(self._functions)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The functions as chat templates take them: JSON schemas, from annotations and docstrings."""
        return [
            {
                "type": "function",
                "function": {
                    "name": name,
                    "description": inspect.getdoc(self._functions[name]) or "",
                    "parameters": {"type": "object", "properties": {}, **adapter.json_schema()},
                },
            }
            for name, adapter in self._adapters.items()
        ]

    def calls(self, text: str) -> list[Call]:
        """The calls in a reply; none where there are no tools."""
        return self._parse(text) if self._functions else []

    async def run(self, call: Call) -> tuple[str, bool]:
        """What to tell the model about its call, and whether it went well."""
        if call.problem:
            return f"error: {call.problem}", False
        if call.name not in self._functions:
            return f"error: no tool {call.name}; there are {', '.join(self._functions)}", False
        function, arguments = self._functions[call.name], call.arguments
        if isinstance(arguments, str):
            first = next(iter(inspect.signature(function).parameters), None)
            arguments = {first: arguments} if first else {}
        try:
            async with asyncio.timeout(self._time_limit) as clock:
                told = await self._call(call.name, arguments)
        except TimeoutError as error:
            what = f"took longer than {self._time_limit:g} s" if clock.expired() else str(error)
            return f"error: {what}", False
        except ValidationError as error:
            wrong = [f"{'.'.join(map(str, e['loc'])) or 'arguments'}: {e['msg']}" for e in error.errors()]
            return _short(f"error: {'; '.join(wrong)}"), False
        except Exception as error:
            return _short(f"error: {type(error).__name__}: {error}"), False
        return _short(told), True

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The function's result as text."""

        def call() -> Any:  # the arguments are checked against the annotations, and made to fit where they can be
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
    """What `function` returns or raises, in a thread that keeps no process alive."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if outcome.done():  # nobody waits any more
            return
        if error is None:
            outcome.set_result(result)
        else:
            outcome.set_exception(error)

    def work() -> None:
        result, error = None, None
        try:
            result = function()
        except Exception as raised:
            error = raised
        except BaseException as raised:  # such as SystemExit, which would end more than the tool
            error = RuntimeError(f"{type(raised).__name__}: {raised}")
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, daemon=True).start()
    return outcome


def _short(text: str) -> str:
    half = LONGEST // 2
    return text if len(text) <= LONGEST else f"{text[:half]} ... {text[-half:]}"
