"""The HTTP judge: requests, retries, and failure reasons."""

from __future__ import annotations

import asyncio
import json
import math
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from slipstream.config.schema import ConfigError
from slipstream.environments.base import Task
from slipstream.environments.chat_tokenizer import ChatTokenizer
from slipstream.environments.reward_workers import ScoringError
from slipstream.rollout import Completion, Rollout, VersionSpan
from slipstream.scoring.http import Judge
from tests.conftest import build_tokenizer

TOKENIZER = build_tokenizer()
TASK = Task("t1", "1+1=", {"answer": "2"})
IDS = tuple(TOKENIZER.encode("1+1="))
ROLLOUT = Rollout((Completion(IDS, (4,), (-1.0,), (VersionSpan(0, 0, 1),), "stop", text="2"),), math.nan)
FAST = {"backoff": 0.001, "timeout": 5.0}

Handler = Callable[[web.Request], Awaitable[web.Response]]


async def judged(handler: Handler, options: dict[str, Any], count: int = 1) -> tuple[list[Any], Judge]:
    """Answers of the judge for concurrent rollouts, failures included."""
    app = web.Application()
    app.router.add_post("/score", handler)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = "http://{}:{}/score".format(*runner.addresses[0][:2])
    judge = Judge({"url": url, **FAST, **options}, ChatTokenizer(TOKENIZER))
    try:
        scores = (judge.score(TASK, ROLLOUT) for _ in range(count))
        return list(await asyncio.gather(*scores, return_exceptions=True)), judge
    finally:
        await judge.close()
        await runner.cleanup()


def reason(answers: list[Any]) -> str:
    assert isinstance(answers[0], ScoringError), answers
    return answers[0].reason


def made(**fields: Any) -> Callable[[], web.Response]:
    return lambda: web.Response(**fields)


def answering(*answers: Any) -> tuple[Handler, list[Any]]:
    """A handler that gives these answers in turn, the last one for ever, and what it is asked."""
    left, asked = list(answers), []

    async def handler(request: web.Request) -> web.Response:
        asked.append((await request.json(), request.headers.get("Authorization")))
        answer = left.pop(0) if len(left) > 1 else left[0]
        return answer() if callable(answer) else web.json_response(answer)

    return handler, asked


def test_the_request_is_json_and_the_answer_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", "secret")
    handler, asked = answering(0.75)
    answers, _ = asyncio.run(judged(handler, {"token_env": "JUDGE_TOKEN"}))
    assert answers == [0.75]
    completion = {"prompt": "1+1=", "text": "2", "token_ids": [4], "finish_reason": "stop"}
    assert asked == [
        (
            {
                "task": {"id": "t1", "prompt": "1+1=", "data": {"answer": "2"}},
                "completions": [completion],
                "reward": None,
                "metrics": {},
            },
            "Bearer secret",
        )
    ]


@pytest.mark.parametrize("status", [429, 500, 503])
def test_retries_of_a_busy_judge_are_counted(status: int) -> None:
    handler, asked = answering(made(status=status), made(status=status), {"reward": 1.0})
    answers, judge = asyncio.run(judged(handler, {"retries": 2}))
    assert (answers, len(asked), dict(judge.retries)) == ([{"reward": 1.0}], 3, {f"judge HTTP {status}": 2})


def test_exhausted_retries_fail_with_the_reason() -> None:
    handler, asked = answering(made(status=500, text="out of order"))
    answers, _ = asyncio.run(judged(handler, {"retries": 1}))
    assert (reason(answers), len(asked)) == ("judge HTTP 500", 2)
    assert "out of order after 2 attempts" in str(answers[0])


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (made(status=404), "judge HTTP 404"),
        (made(status=302, headers={"Location": "http://127.0.0.1:9/"}), "judge HTTP 302"),
        (made(text="fine"), "judge answer"),
        (made(text="true"), "judge answer"),
    ],
)
def test_permanent_errors_are_not_retried(answer: Any, why: str) -> None:
    handler, asked = answering(answer)
    answers, _ = asyncio.run(judged(handler, {}))
    assert (reason(answers), len(asked)) == (why, 1)


def test_a_silent_or_unreachable_judge_is_retried() -> None:
    async def silent(request: web.Request) -> web.Response:
        await asyncio.sleep(30)
        raise AssertionError

    answers, _ = asyncio.run(judged(silent, {"timeout": 0.05, "retries": 0}))
    assert reason(answers) == "judge timeout"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        judge = Judge(
            {"url": f"http://127.0.0.1:{taken.getsockname()[1]}", **FAST, "retries": 1}, ChatTokenizer(TOKENIZER)
        )

        async def ask() -> str:
            with pytest.raises(ScoringError) as failure:
                await judge.score(TASK, ROLLOUT)
            await judge.close()
            return failure.value.reason

        assert asyncio.run(ask()) == "judge unreachable"
    assert judge.retries == {"judge unreachable": 1}


def test_a_slow_answer_does_not_delay_others() -> None:
    arrived = asyncio.Event()
    seen: list[int] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append(len(seen))
        number = seen[-1]
        if number == 0:
            await arrived.wait()  # the first is answered when the last has been
        if number == 299:
            arrived.set()
        return web.Response(text=json.dumps(number))

    answers, _ = asyncio.run(judged(handler, {"timeout": 60.0}, count=300))
    assert sorted(answers) == list(range(300))


def test_invalid_options_raise() -> None:
    for options in (
        {}, {"url": "localhost"}, {"url": "file:///etc"}, {"url": "http://a", "retries": -1},
        {"url": "http://a", "x": 1}, {"url": "http://a", "token_env": "SLIPSTREAM_NO_SUCH_VARIABLE"},
        {"url": "http://a", "retries": 1.5},
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=r"scoring\.options\.\w+"):
            Judge(options, ChatTokenizer(TOKENIZER))
