"""`slipstream watch`: the page of runs while they go on, and their last records for Prometheus, over HTTP.

Everything comes from the run directories, which are read when somebody asks. The server waits for requests and the
disk only.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import os
import re
import secrets
import socket
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from slipstream.config.schema import ConfigError
from slipstream.observe.formatting import is_finite
from slipstream.observe.page.data import LivePage, RunData
from slipstream.observe.page.render import render
from slipstream.observe.page.rollouts import find_text, step_texts
from slipstream.observe.run_data import Run, load_run
from slipstream.runtime.priority import OBSERVER_NICENESS, lower_process_priority

HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",  # in addition to the policy in the page
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",  # the URL may hold the token
    "X-Content-Type-Options": "nosniff",
}


def watch(paths: Sequence[str], host: str, port: int) -> None:
    """Serve the page of these runs until Ctrl-C. Raises `ConfigError` for a bad run, host or port."""
    server = WatchServer([load_run(path) for path in paths], host, port)
    lower_process_priority(OBSERVER_NICENESS)

    def announce(_: str) -> None:  # called once `run_app` handles Ctrl-C
        print(server.url, flush=True)
        print("slipstream: open this URL in a browser; Ctrl-C ends the server", file=sys.stderr)

    with contextlib.suppress(KeyboardInterrupt):  # before that
        web.run_app(server.app, sock=server.socket, print=announce, access_log=None, shutdown_timeout=1.0)


class WatchServer:
    """An HTTP server for the page of `runs`: `/`, `/api/data`, `/api/texts`, `/api/search` and `/metrics`.

    On a loopback address it answers requests to loopback names only, elsewhere only those with its token.
    """

    def __init__(self, runs: Sequence[Run], host: str = "127.0.0.1", port: int = 0) -> None:
        self.socket = listen(host, port)
        self._host, (self._address, port, *_) = host, self.socket.getsockname()
        address = ipaddress.ip_address(self._address.partition("%")[0])
        self._token = "" if address.is_loopback else secrets.token_urlsafe(24)
        name = socket.gethostname() if address.is_unspecified else host
        query = f"?token={self._token}" if self._token else ""
        self.url = f"http://{f'[{name}]' if ':' in name else name}:{port}/{query}"
        self._page, self._lock = LivePage(runs), asyncio.Lock()
        self._html = render({"runs": [{"name": run.name} for run in runs]}, live=True)
        self.app = web.Application(middlewares=[self._guard])
        self.app.on_response_prepare.append(_add_headers)
        for path, handler in (
            ("/", self._index), ("/api/data", self._data), ("/api/texts", self._texts), ("/api/search", self._search),
            ("/metrics", self._metrics),
        ):  # fmt: skip
            self.app.router.add_get(path, handler, allow_head=False)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Callable[..., Any]) -> web.StreamResponse:
        if self._token:
            given = request.query.get("token", "")
            if not hmac.compare_digest(given.encode("utf-8", "replace"), self._token.encode()):
                raise web.HTTPForbidden(text="open the URL that slipstream watch printed, with its token\n")
        elif _hostname(request) not in {"localhost", "127.0.0.1", "::1", self._host, self._address}:
            raise web.HTTPForbidden(text="this server answers requests to localhost only\n")  # e.g. DNS rebinding
        response: web.StreamResponse = await handler(request)
        if self._token:  # not on this machine
            response.enable_compression()
        return response

    async def _index(self, request: web.Request) -> web.Response:
        return web.Response(text=self._html, content_type="text/html")

    async def _data(self, request: web.Request) -> web.Response:
        since = request.query.get("since", "")
        async with self._lock:
            return await _json(lambda: self._page.changes(since))

    async def _texts(self, request: web.Request) -> web.Response:
        live, step, visit = self._run(request), _number(request, "step"), _number(request, "visit")
        if step not in live.run.rollout_steps:
            raise web.HTTPNotFound(text="no rollouts of this step are recorded\n")
        return await _json(lambda: step_texts(live.run, step, live.texts, visit=visit))

    async def _search(self, request: web.Request) -> web.Response:
        run, words = self._run(request).run, request.query.get("text", "")
        return await _json(lambda: find_text(run, words))

    async def _metrics(self, request: web.Request) -> web.Response:
        async with self._lock:
            await asyncio.to_thread(self._page.poll)
        text = prometheus([live.run for live in self._page.runs])
        return web.Response(text=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    def _run(self, request: web.Request) -> RunData:
        if (index := _number(request, "run")) >= len(self._page.runs):
            raise web.HTTPNotFound(text="no such run\n")
        return self._page.runs[index]


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises `ConfigError` for an unknown host, or a port that can't be used."""
    if not 0 <= port < 2**16:
        raise ConfigError(f"--port {port} is no port; choose one from 1 to 65535, or 0 for any free port")
    try:
        family, *_, address = socket.getaddrinfo(host or ".", port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError):
        raise ConfigError(f"--host {host!r} is unknown; give an address of this machine, or leave it out") from None
    try:
        return socket.create_server((str(address[0]), *address[1:]), family=family)
    except OSError as error:
        where = f"--port {port} of {host} can't be used: {os.strerror(error.errno or 0)}"
        raise ConfigError(f"{where}; choose another, or --port 0 for any free port") from None


def _hostname(request: web.Request) -> str | None:
    try:
        return urlsplit("//" + request.headers.get("Host", "")).hostname
    except ValueError:
        return None


def _number(request: web.Request, name: str) -> int:
    text = request.query.get(name, "")
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise web.HTTPBadRequest(text=f"{name} must be a number\n")
    return int(text)


async def _json(compute: Callable[[], Any]) -> web.Response:
    """The answer with what `compute` returns, computed in a thread."""
    text = await asyncio.to_thread(lambda: json.dumps(compute(), separators=(",", ":")))
    return web.Response(text=text, content_type="application/json")


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(HEADERS)


def prometheus(runs: Sequence[Run]) -> str:
    """The numbers of each run's last record and last evaluation, as gauges in Prometheus' text format.

    `reward/mean` is `slipstream_reward_mean{run="NAME"}`; the label of runs of one name is their path.
    """
    names = Counter(run.name for run in runs)
    gauges: dict[str, list[str]] = {}
    for run in runs:
        label = run.name if names[run.name] == 1 else str(run.path)
        label = label.encode("utf-8", "replace").decode().translate({92: "\\\\", 34: '\\"', 10: "\\n"})
        for name, value in _last(run).items():
            gauges.setdefault(name, []).append(f'{name}{{run="{label}"}} {float(value)!r}\n')
    return "".join(f"# TYPE {name} gauge\n{''.join(lines)}" for name, lines in gauges.items())


def _last(run: Run) -> dict[str, float]:
    """The numbers of the last record and of the last evaluation by the name of their gauge."""
    evaluation = {name: v for name, v in (run.evaluations or [{}])[-1].items() if name.startswith("eval/")}
    last = (run.metrics or [{}])[-1] | evaluation
    found = {f"slipstream_{re.sub(r'[^a-zA-Z0-9_]', '_', name)}": value for name, value in last.items()}
    return {"slipstream_running": run.state == "running"} | {k: v for k, v in found.items() if is_finite(v)}
