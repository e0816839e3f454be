"""Sessions with OpenEnv servers over WebSocket or HTTP, and one episode in a session.

The messages are those of https://github.com/meta-pytorch/OpenEnv since 0.2. Its package is not imported: it needs
mcp 1, and vLLM needs mcp 2.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any

from slipstream.environments.base import as_reward
from slipstream.environments.conversation import Conversation
from slipstream.environments.tools import ServerFailed

MAX_MESSAGE = 100 * 2**20  # bytes, as in OpenEnv's own client
SESSION_WAIT_S = 60.0  # for one of the server's sessions
SESSION_PAUSE_S = 0.2  # between two tries
CLOSE_S = 1.0  # for the closing handshake
EMPTY: tuple[Any, ...] = (None, "", [], {})  # fields that are not shown
MAX_WHY = 300  # characters of a server's message
THOUGHT = "</think>"  # the action begins after it


class InvalidAction(Exception):
    """The server's validation refused an action. The message is for the policy."""


class _ServerFull(Exception):
    """All sessions of the server are taken."""


class Session:
    """One episode's session with the server at `url`; each request has `seconds`.

    `client` is an `aiohttp.ClientSession`. Over `http` the server keeps no state between requests, unless its
    environment does.
    """

    def __init__(self, client: Any, url: str, seconds: float, http: bool = False) -> None:
        self._client, self._url, self._seconds, self._http = client, url, seconds, http
        self._socket: Any = None

    async def reset(self, data: dict[str, Any]) -> dict[str, Any]:
        """Start an episode with the arguments `data`. Returns the server's first answer.

        If all sessions are taken, tries again for `SESSION_WAIT_S`. Raises `ServerFailed`.
        """
        deadline = asyncio.get_running_loop().time() + SESSION_WAIT_S
        while True:
            try:
                return await self.request("reset", data)
            except _ServerFull as full:
                if asyncio.get_running_loop().time() > deadline:
                    why = f"all its sessions were taken for {SESSION_WAIT_S:g} s ({full!s:.80}); set "
                    why += "environment.max_concurrent to their number, or start it with more (max_concurrent_envs)"
                    raise self.failed("open a session", why) from None
                await self.close()
                await asyncio.sleep(SESSION_PAUSE_S)

    async def request(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """The answer to "reset", "step", "mcp" or "schema". Raises `InvalidAction`, and `ServerFailed` for others."""
        try:
            async with asyncio.timeout(self._seconds):
                over_http = self._http or kind == "schema"
                answer = await (self._request_over_http if over_http else self._request_over_socket)(kind, data)
        except (ServerFailed, InvalidAction, _ServerFull):
            raise
        except TimeoutError:
            raise self.failed(kind, f"no answer for {self._seconds:g} s") from None
        except Exception as error:  # of aiohttp, or an answer that is not JSON
            raise self.failed(kind, f"{type(error).__name__}: {error}") from None
        if not isinstance(answer, dict):
            raise self.failed(kind, f"the answer is {answer!r:.80}, not an object")
        return answer

    async def tools(self) -> list[tuple[str, str, dict[str, Any]]]:
        """Name, description and argument schema of each MCP tool. Raises `ServerFailed`."""
        call = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
        answer = await self.request("mcp", call)
        try:
            return [
                (str(tool["name"]), str(tool.get("description") or ""), dict(_either(tool, "inputSchema")))
                for tool in answer["result"]["tools"]
            ]
        except (KeyError, TypeError, ValueError, AttributeError):
            raise self.failed("list its tools", f"the answer is {answer!r:.200}") from None

    def failed(self, what: str, why: str) -> ServerFailed:
        return ServerFailed(f"the OpenEnv server {self._url} failed to {what}: {' '.join(why.split()):.{MAX_WHY}}")

    async def close(self) -> None:
        """End the session."""
        if self._socket is not None:
            await self._socket.close()
            self._socket = None

    async def _request_over_socket(self, kind: str, data: dict[str, Any]) -> Any:
        """The answer's data by WebSocket, which is connected first if needed.

        Raises `InvalidAction`, `_ServerFull`, `ServerFailed`, and errors of aiohttp or of parsing.
        """
        from aiohttp import ClientWSTimeout, WSMsgType

        if self._socket is None:
            url, timeout = f"{self._url}/ws", ClientWSTimeout(ws_close=CLOSE_S)
            self._socket = await self._client.ws_connect(url, timeout=timeout, max_msg_size=MAX_MESSAGE)
        with contextlib.suppress(ConnectionError):  # a full server says so, and closes
            await self._socket.send_json({"type": kind, "data": data})
        message = await self._socket.receive()
        if message.type is not WSMsgType.TEXT:
            raise self.failed(kind, "it closed the connection")
        answer = message.json()
        if answer.get("type") != "error":
            return answer.get("data")
        error = answer["data"]
        match error.get("code"):
            case "VALIDATION_ERROR" if kind == "step":
                raise InvalidAction(_problems(error.get("errors")))
            case "CAPACITY_REACHED":
                raise _ServerFull(error.get("message"))
        raise self.failed(kind, f"{error.get('message') or _problems(error.get('errors'))} ({error.get('code')})")

    async def _request_over_http(self, kind: str, data: dict[str, Any]) -> Any:
        """The answer by HTTP. Raises `InvalidAction`, `ServerFailed`, and errors of aiohttp or of parsing."""
        method, body = ("GET", None) if kind == "schema" else ("POST", {"action": data} if kind == "step" else data)
        async with self._client.request(method, f"{self._url}/{kind}", json=body) as response:
            if kind == "step" and response.status == 422:
                raise InvalidAction(_problems((await response.json()).get("detail")))
            if response.status != 200:
                raise self.failed(kind, f"HTTP {response.status}: {await response.text()}")
            return await response.json()


@contextlib.asynccontextmanager
async def open_session(url: str, seconds: float, headers: Mapping[str, str], http: bool) -> AsyncIterator[Session]:
    """A session, which is closed at the end."""
    import aiohttp

    async with aiohttp.ClientSession(headers=headers, trust_env=True) as client:
        session = Session(client, url, seconds, http)
        try:
            yield session
        finally:
            await session.close()


class Episode:
    """Actions and observations of one episode. `rewards` are the server's, each with its number of replies before."""

    conversation: Conversation

    def __init__(self, session: Session, action: dict[str, Any], field: str) -> None:
        """`action` is the JSON schema of actions, `field` the observation's field to show, or ""."""
        self.session, self._action, self._field = session, action, field
        self.rewards: list[tuple[int, Any]] = []
        self.done = False
        fields = {name: schema for name, schema in action["properties"].items() if name != "metadata"}
        needed = [name for name in action.get("required", fields) if name in fields]
        is_text = len(needed) == 1 and fields[needed[0]].get("type") == "string"
        self.takes_tool_calls = not fields or "tool_name" in fields
        self.text_field = needed[0] if is_text and not self.takes_tool_calls else None

    def read(self, answer: dict[str, Any]) -> dict[str, Any]:
        """The observation of an answer. Ends the conversation if the episode is done. Raises `ServerFailed`."""
        observation = answer.get("observation")
        if not isinstance(observation, dict):
            raise self.session.failed("observe", f"the answer has no observation: {answer!r:.200}")
        if not isinstance(done := answer.get("done", False), bool):
            raise self.session.failed("observe", f"done is {done!r:.80}, not true or false")
        if done:
            self.done = True
            self.conversation.ended = self.conversation.ended or "done"
        return observation

    def show(self, observation: dict[str, Any]) -> str:
        """The text of an observation: its only text, or JSON. Raises `ServerFailed` if it lacks the field to show."""
        metadata = observation.get("metadata") or {}
        if not isinstance(metadata, dict):
            raise self.session.failed("observe", f"metadata is {metadata!r:.80}, not an object")
        shown = {name: value for name, value in observation.items() if name != "metadata" and value not in EMPTY}
        shown = shown or metadata
        if self._field:
            if self._field not in (every := {**metadata, **observation}):
                raise self.session.failed("observe", f"there is no field {self._field!r} among {', '.join(every)}")
            shown = {self._field: every[self._field]}
        values = [*shown.values()]
        return values[0] if len(values) == 1 and isinstance(values[0], str) else json.dumps(shown) if shown else ""

    async def act(self, **action: Any) -> str:
        """Take a step. Returns the text of its observation. Raises `InvalidAction` and `ServerFailed`."""
        return self.show(self.read(await self._step(action)))

    def caller(self, tool: str) -> Callable[..., Coroutine[Any, Any, str]]:
        """A function that calls an MCP tool by a step. An error of the tool is a `RuntimeError`."""

        async def call(**arguments: Any) -> str:
            observation = self.read(await self._step({"type": "call_tool", "tool_name": tool, "arguments": arguments}))
            try:
                text, is_error = _tool_result(observation)
            except (TypeError, KeyError, AttributeError):
                raise self.session.failed("call a tool", f"the answer is {observation!r:.200}") from None
            if is_error:
                raise RuntimeError(text)
            return text

        return call

    async def alternate(self, text: str) -> None:
        """Observations and replies, each of which is an action, until the episode or the conversation ends."""
        assert self.text_field is not None
        count = 0
        while True:
            reply = await self.conversation.ask(text)
            if len(self.conversation.completions) == count:
                return
            count += 1
            try:
                text = await self.act(**{self.text_field: reply.rpartition(THOUGHT)[2].strip()})
            except InvalidAction as error:
                text = f"error: {error}"

    def rewards_by_turn(self) -> list[float]:
        """For each reply of the model, the sum of the rewards that it got. Raises `InvalidReward`."""
        totals = [0.0] * len(self.conversation.completions)
        for turn, reward in self.rewards:
            totals[turn - 1] += 0.0 if reward is None else as_reward(reward)
        return totals

    async def _step(self, action: dict[str, Any]) -> dict[str, Any]:
        if self.done:
            raise RuntimeError("the episode is done")
        try:
            answer = await self.session.request("step", action)
        except InvalidAction:
            if (await self.session.request("schema", {})).get("action") != self._action:
                raise self.session.failed("step", "it has changed the schema of its actions during the run") from None
            raise
        self.rewards.append((len(self.conversation.completions), answer.get("reward")))
        return answer


class EpisodeTool:
    """A tool of an episode for `Policy.conversation`. `schema` is the JSON schema of its arguments."""

    def __init__(self, call: Callable[..., Any], name: str, description: str, schema: dict[str, Any]) -> None:
        self.__name__, self.__doc__, self.schema, self._call = name, description, schema, call

    async def __call__(self, **arguments: Any) -> str:
        return str(await self._call(**arguments))


def _either(tool: dict[str, Any], name: str) -> Any:
    """The tool's schema: "inputSchema" in MCP, "input_schema" in OpenEnv's own models."""
    return tool[name] if name in tool else tool["input_schema"]


def _tool_result(observation: dict[str, Any]) -> tuple[str, bool]:
    """Text of a tool's result, and whether it is an error. Raises `TypeError`, `KeyError` for an invalid answer."""
    if error := observation.get("error"):
        return str(error["message"]), True
    result = observation.get("result")
    if not isinstance(result, dict) or "content" not in result:
        return result if isinstance(result, str) else json.dumps(result), False
    text = "\n".join(part["text"] for part in result["content"] if part["type"] == "text")
    return text, bool(result.get("is_error") or result.get("isError"))


def _problems(errors: Any) -> str:
    """Pydantic's errors in one line."""
    try:
        return "; ".join(f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in errors)
    except (TypeError, KeyError):
        return "invalid action"
