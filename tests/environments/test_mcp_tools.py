"""Tools of real MCP servers: results reach the model, and a server that fails is a failed rollout."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp.web
import pytest

from slipstream.environments.base import Policy, Task
from slipstream.environments.episode import EpisodeOptions, RolloutFailed, run_episode
from slipstream.environments.mcp_tools import mcp_tools
from slipstream.environments.reward_workers import core_slot, cores
from slipstream.environments.tools import Call, ServerFailed, Tools, plain
from tests.environments.test_environments import policy

pytest.importorskip("mcp")
SERVER = """
import os, sys, time
from mcp.server import MCPServer
server = MCPServer("calculator")

@server.tool()
def add(a: int, b: int) -> int:
    "Add two numbers."
    if a < 0: raise ValueError("a is negative")
    if a == 99: time.sleep(1000)
    if a == 98: os._exit(1)
    return a + b

if len(sys.argv) > 1 and os.path.exists(sys.argv[1]):
    @server.tool()
    def more() -> str: return "new"

server.run()
"""


def called(tmp_path: Path, *calls: dict[str, Any], **options: Any) -> list[tuple[str, bool]]:
    (tmp_path / "server.py").write_text(SERVER)

    async def main() -> list[tuple[str, bool]]:
        async with mcp_tools([sys.executable, str(tmp_path / "server.py"), str(tmp_path / "more")], **options) as found:
            tools = Tools(found, plain)
            [schema] = [s["function"] for s in tools.schemas if s["function"]["name"] == "add"]
            assert schema["description"] == "Add two numbers." and {*schema["parameters"]["properties"]} == {"a", "b"}
            return [await tools.run(Call("add", arguments)) for arguments in calls]

    return asyncio.run(main())


def test_results_and_errors_of_a_tool_are_for_the_model(tmp_path: Path) -> None:
    good, wrong, raised = called(tmp_path, {"a": 1, "b": 2}, {"a": "x", "b": 2}, {"a": -1, "b": 2})
    assert good == ("3", True) and not wrong[1] and not raised[1] and "Error executing tool add" in raised[0]


@pytest.mark.parametrize("a", [98, 99])
def test_a_server_that_dies_or_hangs_fails_the_rollout(tmp_path: Path, a: int) -> None:
    with pytest.raises(ServerFailed, match="failed to call add"):
        called(tmp_path, {"a": a, "b": 2}, seconds=6.0)


def test_a_command_starts_once_a_core_is_free(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(SERVER)

    async def start() -> int:
        async with mcp_tools([sys.executable, str(tmp_path / "server.py")], seconds=30) as tools:
            return len(tools)

    async def main() -> None:
        async with AsyncExitStack() as stack:
            for _ in range(cores()):
                await stack.enter_async_context(core_slot())
            with pytest.raises(TimeoutError):  # of the test, before that of the server
                await asyncio.wait_for(asyncio.shield(starting := asyncio.create_task(start())), 0.5)
        assert await starting == 1

    asyncio.run(main())


def test_a_server_that_changes_its_tools_fails_the_rollout(tmp_path: Path) -> None:
    called(tmp_path)
    (tmp_path / "more").touch()
    with pytest.raises(ServerFailed, match="changed its tool more"):
        called(tmp_path)


def test_a_server_that_answers_500_fails_the_rollout() -> None:
    async def main() -> None:
        async def refuse(_: aiohttp.web.Request) -> aiohttp.web.Response:
            return aiohttp.web.Response(status=500)

        app = aiohttp.web.Application()
        app.router.add_route("*", "/mcp", refuse)
        runner = aiohttp.web.AppRunner(app)
        await runner.setup()
        await aiohttp.web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            with pytest.raises(ServerFailed, match="failed to list its tools"):
                async with mcp_tools(f"http://127.0.0.1:{runner.addresses[0][1]}/mcp"):
                    pass
        finally:
            await runner.cleanup()

    asyncio.run(main())


def test_an_episode_whose_server_dies_is_a_failed_rollout_with_a_reason(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(SERVER)

    class Calculates:
        train = (Task("t", "?"),)
        test = ()

        async def rollout(self, task: Task, policy: Policy) -> float:
            async with mcp_tools([sys.executable, str(tmp_path / "server.py")]) as tools:
                await policy.conversation(tools=tools, parse=lambda text: [Call("add", {"a": 98, "b": 1})]).ask("?")
            return 1.0

    with pytest.raises(RolloutFailed, match=r"(?s)ServerFailed: .*server\.py failed to call add") as failed:
        asyncio.run(run_episode(Calculates(), Calculates.train[0], policy("1"), EpisodeOptions(30.0)))
    assert failed.value.reason == "ServerFailed"
