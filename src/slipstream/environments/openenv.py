"""Environments of OpenEnv servers: `openenv:URL`, or `openenv:MODULE:APP` to start the server of a package.

https://github.com/meta-pytorch/OpenEnv. The policy's replies are actions, or call the server's tools. The server
computes the rewards.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from slipstream.config.section import ConfigError, Section, bearer_headers, parse_options
from slipstream.environments.base import Policy, Task
from slipstream.environments.openenv_session import MAX_WHY, Episode, EpisodeTool, open_session
from slipstream.rollout import Rollout

SEEDS = 1000  # training tasks of a server that lists none
MAX_TASKS = 100_000  # of a split
START_S = 120.0  # for the server of a package to import its modules and answer
STOP_S = 5.0
SERVE = """
import os, socket, sys, threading, uvicorn
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
server = uvicorn.Server(uvicorn.Config(sys.argv[1], log_level="warning"))
server.run(sockets=[socket.socket(fileno=int(sys.argv[2]))])
"""


class OpenEnvOptions(Section):
    """`environment.options`. `train` and `test` are numbers of tasks; 0 training tasks: all that the server lists.

    `prompt` precedes the first observation; `observation` names the field that is its text. `reset` has further
    arguments of each reset. Each request has `seconds`. `token_env` names an environment variable with a bearer token.
    `python` starts the server of a package.
    """

    train: int = Field(0, ge=0)
    test: int = Field(100, ge=0)
    seed: int = Field(0, ge=0)
    system: str = ""
    prompt: str = ""
    observation: str = ""
    reset: dict[str, Any] = Field({})
    transport: Literal["websocket", "http"] = "websocket"
    seconds: float = Field(30.0, gt=0)
    token_env: str = ""
    python: str = sys.executable


class OpenEnv:
    """The environment of the server at `name`: a URL, or the "module:app" of a package.

    Tasks are the server's, or seeds if it lists none. Raises `ConfigError` for a server that does not answer.
    """

    def __init__(self, name: str, **options: Any) -> None:
        self._options = taken = parse_options("environment", OpenEnvOptions, options)
        self._headers = bearer_headers("environment", taken.token_env)
        if not importlib.util.find_spec("aiohttp"):
            raise ConfigError(
                f"environment.name = 'openenv:{name}' needs aiohttp: pip install 'slipstream-rl[openenv]'"
            )
        self._server: PackageServer | None = None
        self._url = name.rstrip("/").replace("ws", "http", name.startswith("ws"))
        try:
            if "://" not in name:
                self._server = PackageServer(name, taken.python)
                self._url = self._server.url
            self._action = _validate_schema(self._fetch("/schema")["action"])
            self.train, self.test = self._list_tasks()
        except (
            LookupError, TypeError, AttributeError, ValueError, OSError, RecursionError, http.client.HTTPException
        ) as error:  # fmt: skip
            why = (self._server and self._server.close()) or f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise ConfigError(
                f"environment.name = 'openenv:{name}': no OpenEnv server answers as it should there: {why:.{MAX_WHY}}"
            ) from None
        if overwritten := sorted({*taken.reset} & {*self.train[0].data}):
            if self._server:
                self._server.close()
            raise ConfigError(
                f"environment.options.reset has {', '.join(overwritten)}, which each task sets: leave it out; choose "
                "tasks by options.seed, train and test"
            )
        self._tools: list[Any] | None = None  # as first listed in this process

    async def rollout(self, task: Task, policy: Policy) -> Rollout:
        taken = self._options
        async with open_session(self._url, taken.seconds, self._headers, taken.transport == "http") as session:
            answer = await session.reset({**taken.reset, **task.data})
            episode = Episode(session, self._action, taken.observation)
            tools = await self._list_tools(episode)
            episode.conversation = policy.conversation(taken.system, tools, tool_seconds=taken.seconds + 1)
            try:
                first = "\n\n".join(text for text in (taken.prompt, episode.show(episode.read(answer))) if text)
                await (episode.conversation.ask(first) if episode.text_field is None else episode.alternate(first))
                rewards = episode.rewards_by_turn()
            finally:
                del episode.conversation  # its tools refer to the episode: a cycle would wait for a full collection
        metrics = {"steps": float(len(episode.rewards)), "done": float(episode.done)}
        return policy.rollout(sum(rewards), turn_rewards=rewards, **metrics)

    async def close(self) -> None:
        if self._server:
            self._server.close()

    async def _list_tools(self, episode: Episode) -> list[EpisodeTool]:
        """Tools for the conversation; [] if a reply is an action. Raises `ServerFailed` if they have changed."""
        if episode.text_field is not None:
            return []
        if not episode.takes_tool_calls:
            return [EpisodeTool(episode.act, "act", self._action.get("description") or "", self._action)]
        listed = await episode.session.tools()
        if not listed:
            raise episode.session.failed("list its tools", "there are none")
        self._tools = self._tools or listed
        if listed != self._tools:
            raise episode.session.failed("list its tools", "they have changed during the run")
        return [EpisodeTool(episode.caller(name), name, description, schema) for name, description, schema in listed]

    def _list_tasks(self) -> tuple[list[Task], list[Task]]:
        """Training and held-out tasks: indices in the server's splits, or seeds."""
        taken, splits = self._options, {}
        try:
            names = self._fetch("/list_environments")
            if len(names) != 1:
                raise ValueError(f"it lists {len(names)} environments; needs one")
            [name] = names
            splits = {split["type"]: split["name"] for split in reversed(self._fetch(f"/{name}/splits"))}
        except urllib.request.HTTPError as error:
            if error.code not in (404, 405, 501):  # a server without a list, an environment without tasks
                raise
        if "train" not in splits:
            first = taken.seed + taken.test
            ranges = range(first, first + (taken.train or SEEDS)), range(taken.seed, first)
            train, test = ([Task(f"seed/{seed}", f"seed {seed}", {"seed": seed}) for seed in each] for each in ranges)
            return train, test
        held_out = splits.get("test") or splits.get("validation")
        lists = (splits["train"], taken.train or sys.maxsize), (held_out, taken.test)
        train, test = (
            [
                Task(f"{split}/{i}", f"task {i} of {split}", {"split": split, "index": i})
                for i in range(min(most, self._count_tasks(name, split)))
            ]
            if split
            else []
            for split, most in lists
        )
        return train, test

    def _count_tasks(self, name: str, split: str) -> int:
        """The number of tasks in a split. Raises `ValueError`."""
        count = self._fetch(f"/{name}/num_tasks", {"split": split})["num_tasks"]
        if type(count) is not int or not 1 <= count <= MAX_TASKS:
            raise ValueError(f"num_tasks of {split} is {count!r:.80}; it must be an integer from 1 to {MAX_TASKS}")
        return count

    def _fetch(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON answer of the server to GET, or to POST of a body. Raises `OSError`, `ValueError`."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {**self._headers, "Content-Type": "application/json"})
        seconds = START_S if self._server else self._options.seconds
        with urllib.request.urlopen(request, timeout=seconds) as response:
            return json.load(response)


def _validate_schema(action: Any) -> dict[str, Any]:
    """The JSON schema of actions. Raises `ValueError` and others for one without fields."""
    fields, needed = action["properties"], action.get("required", [])
    is_object = isinstance(fields, dict) and all(isinstance(field, dict) for field in fields.values())
    if not (is_object and isinstance(needed, list) and all(isinstance(name, str) for name in needed)):
        raise ValueError(f"the schema of its actions has properties {fields!r:.100} and required {needed!r:.100}")
    return dict(action)


class PackageServer:
    """A process that serves the app "module:app". It ends when its standard input is closed."""

    def __init__(self, app: str, python: str) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        with socket.create_server(("127.0.0.1", 0)) as listening:
            self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            self._process = subprocess.Popen(
                [python, "-c", SERVE, app, str(listening.fileno())],
                stdin=subprocess.PIPE, stdout=self._log, stderr=self._log, pass_fds=[listening.fileno()],
            )  # fmt: skip

    def close(self) -> str:
        """End the process. Returns the last line of its output."""
        assert self._process.stdin
        self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")
