"""The tools of MCP servers in a conversation.

A server that fails is a failed rollout; the error of a tool is its result, which the model reads.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from typing import Any

from slipstream.config.schema import ConfigError
from slipstream.environments.episode import first_error
from slipstream.environments.reward_workers import core_slot
from slipstream.environments.tools import ServerFailed

_schemas: dict[str, list[Any]] = {}  # of each server, as first listed in this process


class ServerTool:
    """A tool of a connected MCP server. `schema` is the JSON schema of its arguments."""

    def __init__(self, client: Any, tool: Any, server: str, seconds: float) -> None:
        self.__name__, self.__doc__, self.schema = tool.name, tool.description, tool.input_schema
        self._client, self._server, self._seconds = client, server, seconds

    async def __call__(self, **arguments: Any) -> str:
        """The text of the result. Raises `RuntimeError` for an error of the tool, `ServerFailed` for others."""
        try:
            async with asyncio.timeout(self._seconds):
                result = await self._client.call_tool(self.__name__, arguments)
        except Exception as error:
            raise _failed(self._server, f"to call {self.__name__}", error, self._seconds) from None
        text = "\n".join(part.text for part in result.content if part.type == "text")
        if result.is_error:
            raise RuntimeError(text)
        return text


@asynccontextmanager
async def mcp_tools(*servers: str | Sequence[str], seconds: float = 9.0) -> AsyncIterator[list[ServerTool]]:
    """The tools of MCP servers, each a URL or a command, for `Policy.conversation`; `seconds` limits each request.

    At most one command for each core starts at a time; the episode's timeout excludes the wait.

    Raises `ServerFailed` for a server that can't be reached, or whose tools changed since this process first listed
    them, and `ConfigError` without the `mcp` package.
    """
    try:
        from mcp import Client, StdioServerParameters
    except ImportError:
        raise ConfigError("mcp_tools needs the package mcp: pip install 'slipstream-rl[mcp]'") from None
    try:
        async with AsyncExitStack() as stack:
            tools: list[ServerTool] = []
            for server in servers:
                name = server if isinstance(server, str) else " ".join(server)
                target: Any = server
                if not isinstance(server, str):
                    target = StdioServerParameters(command=server[0], args=[*server[1:]])
                async with nullcontext() if target is server else core_slot():
                    try:
                        async with asyncio.timeout(seconds):
                            client = await stack.enter_async_context(Client(target))
                            listed = (await client.list_tools()).tools
                    except Exception as error:
                        raise _failed(name, "to list its tools", error, seconds) from None
                _validate_unchanged(name, [(tool.name, tool.description, tool.input_schema) for tool in listed])
                tools += [ServerTool(client, tool, name, seconds) for tool in listed]
            yield tools
    except BaseExceptionGroup as group:  # of the client's tasks
        raise first_error(group) from None


def _validate_unchanged(server: str, schemas: list[Any]) -> None:
    """Raise `ServerFailed` if the tools differ from the server's first list in this process."""
    if schemas != _schemas.setdefault(server, schemas):
        pairs = itertools.zip_longest(schemas, _schemas[server])
        changed = next(new or old for new, old in pairs if new != old)
        raise ServerFailed(f"the MCP server {server} changed its tool {changed[0]} during the run")


def _failed(server: str, what: str, error: BaseException, seconds: float) -> ServerFailed:
    error = first_error(error)
    why = f"no answer for {seconds:g} s" if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
    return ServerFailed(f"the MCP server {server} failed {what}: {why}")
