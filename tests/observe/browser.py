"""Chromium without a window, driven through its DevTools protocol. Needs the program `chromium` and aiohttp."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-port=0")


class Tab:
    """A page that is open. `requests`: the URLs it asked for besides its own; `errors`: what its console printed."""

    def __init__(self, socket: Any) -> None:
        self.socket, self.ids = socket, itertools.count(1)
        self.answers: dict[int, asyncio.Future[Any]] = {}
        self.requests: list[str] = []
        self.errors: list[str] = []
        self.loaded = asyncio.Event()
        self.reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self.socket:
            data = message.json()
            kind, what = data.get("method"), data.get("params", {})
            if "id" in data:
                self.answers.pop(data["id"]).set_result(data)
            elif kind == "Network.requestWillBeSent":
                self.requests.append(what["request"]["url"])
            elif kind == "Log.entryAdded" or kind == "Runtime.exceptionThrown":
                self.errors.append(str(what))
            elif kind == "Runtime.consoleAPICalled" and what["type"] in ("error", "warning", "assert"):
                self.errors.append(str(what["args"]))
            elif kind == "Page.loadEventFired":
                self.loaded.set()

    async def call(self, method: str, **parameters: Any) -> Any:
        number = next(self.ids)
        self.answers[number] = asyncio.get_running_loop().create_future()
        await self.socket.send_json({"id": number, "method": method, "params": parameters})
        answer = await self.answers[number]
        assert "error" not in answer, answer
        return answer["result"]

    async def run(self, script: str) -> Any:
        """The value of an expression, awaited."""
        found = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def open(self, url: str) -> None:
        for domain in ("Page", "Network", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)
        await self.loaded.wait()
        await self.until("document.documentElement.dataset.ready")
        self.requests = [requested for requested in self.requests if requested != url]

    async def until(self, condition: str) -> None:
        """Wait until an expression is true. The test's time limit ends a wait for what never comes."""
        await self.run(
            f"new Promise((done) => {{ const look = () => {condition} ? done() : setTimeout(look, 10); look(); }})"
        )


@contextlib.asynccontextmanager
async def tab(url: str, profile: Path, width: int = 1440, height: int = 1000) -> AsyncIterator[Tab]:
    """Open a page in a new browser with an empty profile, wait until it is drawn, and end the browser afterwards."""
    import aiohttp

    assert PROGRAM is not None
    arguments = (*FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}", "about:blank")
    process = await asyncio.create_subprocess_exec(
        PROGRAM, *arguments, stderr=asyncio.subprocess.PIPE, env=os.environ | {"HOME": str(profile)}
    )
    try:
        assert process.stderr is not None
        address = ""
        async for line in process.stderr:
            if b"DevTools listening on" in line:
                address = line.decode().split()[-1].removeprefix("ws://").split("/")[0]
                break
        drain = asyncio.create_task(process.stderr.read())
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://{address}/json") as answer:
                pages = [page for page in await answer.json() if page["type"] == "page"]
            async with session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                opened = Tab(socket)
                await opened.open(url)
                yield opened
                opened.reader.cancel()
        drain.cancel()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
