"""Servers of OpenEnv's package, and servers that misbehave: a counted failure of one rollout."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp.web
import pytest

from slipstream.config.environments import EnvironmentConfig
from slipstream.config.schema import ConfigError
from slipstream.environments.base import Policy
from slipstream.environments.chat_tokenizer import ChatTokenizer
from slipstream.environments.conversation import ConversationLimits
from slipstream.environments.episode import EpisodeOptions, RolloutFailed, run_episode
from slipstream.environments.load import load_environment
from slipstream.rollout import Rollout, Sampling
from tests.environments.test_conversation import CHATML, Letters, chat_tokenizer

PYTHON = Path(sys.prefix) / "openenv/bin/python"  # `make test` installs the package there
SERVERS = "tests.environments.openenv_sums"


def play(environment: Any, *said: str, task: int = 0, turns: int = 0) -> tuple[Rollout, list[str]]:
    """An episode of a task, and what the policy read before each reply."""
    tokenizer = chat_tokenizer(CHATML)
    generator = Letters(tokenizer, *said)

    async def main() -> Rollout:
        policy = Policy(generator, ChatTokenizer(tokenizer), Sampling(), "0", limits=ConversationLimits(turns))
        [rollout] = await run_episode(environment, environment.train[task], policy, EpisodeOptions(30.0))
        return rollout

    return asyncio.run(main()), [tokenizer.decode(ids) for ids in generator.prompts]


def loaded(name: str, **options: Any) -> Any:
    return load_environment(EnvironmentConfig(name=f"openenv:{name}", options=options))


@contextlib.contextmanager
def served(app: str, **options: Any) -> Iterator[Any]:
    """The environment of an app of `openenv_sums`, which is ended afterwards."""
    if not PYTHON.exists():
        pytest.skip("openenv is not installed")
    environment = loaded(f"{SERVERS}:{app}", python=str(PYTHON), **options)
    try:
        yield environment
    finally:
        asyncio.run(environment.close())
        with pytest.raises(ConfigError, match="no OpenEnv server answers"):
            loaded(environment._url)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_replies_are_actions_and_rewards_are_of_the_server() -> None:
    with served("guess", seed=40, test=3, train=9, prompt="Guess!") as environment:
        assert [t.data["seed"] for t in environment.test] == [40, 41, 42] and len(environment.train) == 9
        rollout, prompts = play(environment, "1", "<think>2</think>43", task=0)
        assert rollout.reward == 1.25 and rollout.metrics["done"] == 1 and rollout.metrics["steps"] == 2
        assert [step.reward for turn in rollout.steps for step in turn] == [0.25, 1.0]
        assert "Guess!\n\nWhich number?" in prompts[0] and prompts[1].startswith(prompts[0]) and "\nno<" in prompts[1]
        rollout, _ = play(environment, "1", "2", turns=2)
        assert rollout.reward == 0.5 and rollout.metrics["done"] == 0 and rollout.metrics["ended/turns"] == 1
        with pytest.raises(RolloutFailed, match="failed to step: out of paper") as failed:
            play(environment, "crash")
        assert failed.value.reason == "ServerFailed"
        stateless = loaded(environment._url, seed=40, transport="http")
        assert play(stateless, "43", turns=1)[0].reward == 0.25, "each request has an environment of its own"
        _fill_and_free(environment)


def _fill_and_free(environment: Any) -> None:
    """Four episodes with two sessions: the others wait."""

    async def main() -> None:
        async def one(number: int) -> float:
            tokenizer = chat_tokenizer(CHATML)
            policy = Policy(Letters(tokenizer, "43", seconds=0.3), ChatTokenizer(tokenizer), Sampling(), str(number))
            [rollout] = await run_episode(environment, environment.train[0], policy, EpisodeOptions(30.0))
            return rollout.reward

        assert await asyncio.gather(*map(one, range(4))) == [1.0] * 4

    asyncio.run(main())


def test_mcp_tools_are_tools_of_the_conversation() -> None:
    with served("calculator") as environment:
        assert [t.id for t in environment.train] == [f"train/{i}" for i in range(5)] and len(environment.test) == 2
        said = (call("add", a="x", b=1), call("add", a=3, b=1), call("submit", answer=4))
        rollout, prompts = play(environment, *said, task=3)
        assert rollout.reward == 1.0 and rollout.metrics["tool_calls"] == 3 and rollout.metrics["tool_errors"] == 1
        assert "add submit" in prompts[0] and "3+1?" in prompts[0]
        assert "validation error" in prompts[1] and "tool\n4<" in prompts[2]
        assert play(environment, call("submit", answer=9))[0].reward == 0.0
        assert play(environment, "I don't know")[0].reward == 0.0


def test_a_package_that_can_not_be_served_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no OpenEnv server answers .*No module named 'nothing'"):
        loaded("nothing.here:app")
    with pytest.raises(ConfigError, match=r"environment.options.seconds = -1: .*; the options are train, test"):
        loaded("http://127.0.0.1:1", seconds=-1)


ANSWER = {"observation": {"hint": "go"}, "reward": 1.0, "done": True}
DEEP = 100_000 * "["
SCHEMA = {"action": {"properties": {"number": {"type": "string"}}, "required": ["number"]}}


@contextlib.contextmanager
def misbehaving(answers: dict[str, Any]) -> Iterator[str]:
    """The URL of a server. `answers` by message: JSON, a status, or None to hang; they may change while it runs."""

    async def answer(request: aiohttp.web.Request) -> aiohttp.web.StreamResponse:
        if request.path == "/ws":
            socket = aiohttp.web.WebSocketResponse()
            await socket.prepare(request)
            async for message in socket:
                kind = message.json()["type"]
                if answers[kind] is None:
                    continue
                if isinstance(answers[kind], int):
                    break
                is_error = "code" in answers[kind]
                await socket.send_json({"type": "error" if is_error else "observation", "data": answers[kind]})
            return socket
        found = answers.get(request.path[1:], 404)
        if isinstance(found, int):
            return aiohttp.web.Response(status=found, text="broken")
        return aiohttp.web.Response(
            text=found if isinstance(found, str) else json.dumps(found), content_type="application/json"
        )

    loop, started, ports = asyncio.new_event_loop(), threading.Event(), []

    async def start() -> None:
        app = aiohttp.web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        runner = aiohttp.web.AppRunner(app)
        await runner.setup()
        await aiohttp.web.TCPSite(runner, "127.0.0.1", 0).start()
        ports.append(runner.addresses[0][1])
        started.set()

    def serve() -> None:
        loop.run_until_complete(start())
        loop.run_forever()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    started.wait()
    try:
        yield f"http://127.0.0.1:{ports[0]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


@pytest.mark.parametrize("transport", ["websocket", "http"])
@pytest.mark.parametrize(
    ("changes", "reason", "message"),
    [
        ({"step": None}, "ServerFailed", "failed to step: no answer for 0.5 s"),
        ({"reset": 500}, "ServerFailed", "failed to reset: (it closed the connection|HTTP 500: broken)"),
        ({"step": {**ANSWER, "reward": "high"}}, "reward is not a number", "'high', of type str"),
        ({"step": {**ANSWER, "reward": float("nan")}}, "reward is nan", "finite"),
        ({"step": {"reward": 1.0}}, "ServerFailed", "the answer has no observation"),
        ({"step": [1]}, "ServerFailed", r"the answer is \[1\], not an object"),
        ({"reset": {"observation": {}}}, "ServerFailed", "no field 'hint' among"),
        (
            {"step": {**ANSWER, "observation": {"hint": "go", "metadata": "m"}}},
            "ServerFailed",
            "metadata is 'm', not an",
        ),
        ({"step": {**ANSWER, "done": "no"}}, "ServerFailed", "done is 'no', not true or false"),
    ],
)
def test_a_server_that_misbehaves_fails_the_rollout(
    changes: dict[str, Any], reason: str, message: str, transport: str
) -> None:
    if transport == "http" and changes == {"step": None}:
        changes, message = {"step": 503}, "HTTP 503"
    with misbehaving(answers := {"schema": SCHEMA, "reset": ANSWER | {"done": False}, "step": ANSWER}) as url:
        environment = loaded(url, observation="hint", seconds=0.5, transport=transport)
        assert play(environment, "1")[0].reward == 1.0
        answers.update(changes)
        with pytest.raises(RolloutFailed, match=message) as failed:
            play(environment, "1")
        assert failed.value.reason == reason


def test_an_invalid_action_is_told_to_the_policy_unless_the_schema_has_changed() -> None:
    refused = {"code": "VALIDATION_ERROR", "errors": [{"loc": ["number"], "msg": "Input should be 'a' or 'b'"}]}
    with misbehaving(answers := {"schema": SCHEMA, "reset": ANSWER | {"done": False}, "step": refused}) as url:
        environment = loaded(url)
        rollout, prompts = play(environment, "1", "2", turns=2)
        assert rollout.reward == 0.0 and "error: number: Input should be 'a' or 'b'" in prompts[1]
        answers["schema"] = {"action": {"properties": {"word": {"type": "string"}}}}
        with pytest.raises(RolloutFailed, match="it has changed the schema of its actions during the run"):
            play(environment, "1")


def test_an_action_of_several_fields_is_a_tool() -> None:
    fields = {"x": {"type": "integer"}, "y": {"type": "integer"}, "metadata": {"type": "object"}}
    schema = {"action": {"properties": fields, "required": ["x", "y"], "description": "Go there."}}
    answer = {"observation": {"hint": "further"}, "reward": 0.5, "done": False}
    with misbehaving({"schema": schema, "reset": ANSWER | {"done": False}, "step": answer}) as url:
        rollout, prompts = play(loaded(url), call("act", x=1, y=2), "I stay")
    assert rollout.reward == 0.5 and rollout.metrics["tool_calls"] == 1 and "tool\nfurther<" in prompts[1]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"schema": 500}, "HTTP Error 500"),
        ({"schema": [1]}, ""),
        ({"schema": {"action": {}}}, "properties"),
        ({"schema": {"action": {"properties": []}}}, "the schema of its actions has properties []"),
        ({"schema": {"action": {"properties": {"a": 1}}}}, "the schema of its actions has properties {'a': 1}"),
        ({"schema": {"action": {"properties": {}, "required": None}}}, "required None"),
        ({"schema": DEEP}, "RecursionError"),
        ({"list_environments": {}}, "it lists 0 environments; needs one"),
        ({"list_environments": ["a", "b"]}, "it lists 2 environments; needs one"),
        ({"list_environments": ["a b"]}, "InvalidURL"),
        *(({"num_tasks": {"num_tasks": n}}, f"num_tasks of train is {n!r};") for n in (0, True, 1.5, "9", 100_001)),
    ],
)
def test_a_server_that_does_not_answer_as_openenv_does_is_one_line(changes: dict[str, Any], why: str) -> None:
    lists = {"list_environments": ["a"], "a/splits": [{"type": "train", "name": "train"}]}
    answers = {"schema": SCHEMA} | lists | changes
    answers["a/num_tasks"] = answers.pop("num_tasks", 404)
    with misbehaving(answers) as url, pytest.raises(ConfigError) as raised:
        loaded(url)
    assert "no OpenEnv server answers as it should there" in str(raised.value) and "\n" not in str(raised.value)
    assert why in str(raised.value) and len(str(raised.value)) < 500


def test_arguments_of_resets_that_tasks_set_are_refused() -> None:
    """A server that lists tasks gets a split and an index, another one gets a seed."""
    splits = {
        "list_environments": ["a"],
        "a/splits": [{"type": "train", "name": "train"}],
        "a/num_tasks": {"num_tasks": 9},
    }
    with misbehaving({"schema": SCHEMA}) as url:
        loaded(url, reset={"index": 1, "size": 2})
        with pytest.raises(ConfigError, match=r"options\.reset has seed, which each task sets"):
            loaded(url, reset={"seed": 1})
    with misbehaving({"schema": SCHEMA} | splits) as url:
        loaded(url, reset={"seed": 1})
        with pytest.raises(ConfigError, match=r"options\.reset has index, split, which"):
            loaded(url, reset={"split": "test", "index": 1})


def test_a_python_that_can_not_be_started_is_one_line() -> None:
    with pytest.raises(ConfigError, match="no OpenEnv server answers as it should there: FileNotFoundError"):
        loaded("some.module:app", python="/no/python")


def test_a_servers_message_is_cut_to_one_line_and_a_refused_reset_is_the_servers_failure() -> None:
    refused = {"code": "VALIDATION_ERROR", "message": "bad\nseed " + 1000 * "x"}
    failing = pytest.raises(RolloutFailed, match=r"failed to reset: bad seed x+$")
    with misbehaving({"schema": SCHEMA, "reset": refused}) as url, failing as failed:
        play(loaded(url), "1")
    assert failed.value.reason == "ServerFailed" and len(str(failed.value)) < 450


TOOL_SCHEMA = {"action": {"properties": {"tool_name": {"type": "string"}}}}


def tool_server(observation: Any, *names: str) -> Any:
    tools = [{"name": name, "inputSchema": {"type": "object"}} for name in names]
    step = {"observation": observation, "reward": 0.5, "done": False}
    return misbehaving(
        {"schema": TOOL_SCHEMA, "reset": ANSWER | {"done": False}, "step": step, "mcp": {"result": {"tools": tools}}}
    )


def test_a_server_of_tool_calls_that_lists_no_tool_fails() -> None:
    with tool_server({}) as url, pytest.raises(RolloutFailed, match="failed to list its tools: there are none"):
        play(loaded(url), "hello")


@pytest.mark.parametrize(
    "observation",
    [
        {"error": "broken"},
        {"error": {"type": "timeout"}},
        *({"result": {"content": content}} for content in (None, "text", [1], [{"type": "text"}])),
    ],
)
def test_an_answer_to_a_tool_call_that_is_not_mcp_fails_the_rollout(observation: Any) -> None:
    with tool_server(observation, "add") as url, pytest.raises(RolloutFailed, match="failed to call a tool") as failed:
        play(loaded(url), call("add"), "done")
    assert failed.value.reason == "ServerFailed"


@pytest.mark.parametrize("name", ["is_error", "isError"])
def test_a_tools_error_is_told_to_the_policy(name: str) -> None:
    content = [{"type": "text", "text": "no such file"}]
    with tool_server({"result": {"content": content, name: True}}, "add") as url:
        rollout, prompts = play(loaded(url), call("add"), "done")
    assert rollout.metrics["tool_errors"] == 1 and "no such file" in prompts[1]


def test_an_episode_does_not_wait_for_a_garbage_collection() -> None:
    """A full collection is rare in a run (`raise_gc_thresholds`)."""
    tokenizer = chat_tokenizer(CHATML)

    async def main(environment: Any) -> weakref.ref[Policy]:
        policy = Policy(Letters(tokenizer, call("add"), "done"), ChatTokenizer(tokenizer), Sampling(), "0")
        await run_episode(environment, environment.train[0], policy, EpisodeOptions(30.0))
        return weakref.ref(policy)

    with tool_server({"result": "4"}, "add") as url:
        environment = loaded(url)
        gc.disable()
        try:
            assert asyncio.run(main(environment))() is None
        finally:
            gc.enable()
