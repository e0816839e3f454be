"""A run continues after any request of a client and any rollout that an environment returns.

A whole run, with an engine and a trainer in processes of their own: two episodes of four play cases that hypothesis
drew, the others are ordinary and are trained on. SLIPSTREAM_FUZZ_CASES sets how many cases there are, and has the
counts of answers and failures printed.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import gzip
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from slipstream.config.loading import load_config
from slipstream.controller.finish import close
from slipstream.controller.probe import probe
from slipstream.controller.run_context import RunContext
from slipstream.controller.setup import resolve_config
from slipstream.environments.base import Policy, Task
from slipstream.rollout import Completion, Rollout, Sampling, StepReward, VersionSpan
from slipstream.run import training_loop
from slipstream.runtime.run_directory import RunDirectory

pytestmark = pytest.mark.e2e
CASES = int(os.environ.get("SLIPSTREAM_FUZZ_CASES", "300"))
GROUPS, MEMBERS = 8, 4
CONNECTIONS = 200
ANSWER_S, FRAGMENT_S = 30.0, 0.1

NUMBERS = [
    "0", "-0", "-0.0", "1", "-1", "0.5", "1e-320", "1e-40", "0.009", "0.01", "100", "101", "1e308", "-1e308", "NaN",
    "Infinity", "-Infinity", "1e400", "2147483647", "2147483648", str(2**63), str(2**70), "9" * 5000,
    "1." + "9" * 5000,
]  # fmt: skip
OTHERS = [
    "true", "false", "null", '""', '"1"', '"x"', '"\\ud800"', '"\\u0000"', '"\\ud83d\\ude42"', "[]", "{}", "[1]",
    '["a"]', "[[]]", "[null]", '{"a": 1}', "[" * 190 + "]" * 190, "[" * 10_000, '{"a":' * 10_000,
    '"' + "1" * 100_000 + '"', "[3, 4]", "[" + "3," * 20_000 + "3]", '["a", "b"]', "[-1]", f"[{2**70}]", "[3.5]",
    "[true]", '"</s>"', "nul", "'1'",
]  # fmt: skip
VALUES = (
    st.sampled_from(NUMBERS + OTHERS) | st.floats().map(json.dumps) | st.integers().map(str) | st.text().map(json.dumps)
)
FIELDS = [
    "temperature", "top_p", "top_k", "max_tokens", "max_completion_tokens", "stop", "seed", "n", "logprobs", "stream",
    "return_token_ids", "stream_options", "messages", "prompt", "tools", "tool_choice", "response_format", "metadata",
    "user", "presence_penalty", "logit_bias", "\u0000", "messages.0.role",
]  # fmt: skip
MESSAGES = ['[{"role": "user", "content": "12"}]', '[{"role": "user", "content": [{"type": "text", "text": "1"}]}]',
            '[{"role": "alien"}]', '[{"role": 7, "content": "1"}]', '[{"content": "1"}]', '[7, {"role": "user"}]',
            '[{"role": "user", "content": {"a": 1}}]', '[{"role": "user", "content": "1", "extra": [[[1]]]}]',
            "[" + '{"role": "user", "content": ""},' * 5000 + '{"role": "user"}]']  # fmt: skip
Client = Callable[[str], list[bytes]]  # what a case sends, each over a connection of its own, to the URL of this secret


def encoded(lines: list[str]) -> bytes:
    return "\r\n".join(lines).encode("utf-8", "replace") + b"\r\n\r\n"


def post(path: str, body: bytes, *headers: str, length: bool = True) -> bytes:
    lengths = [f"Content-Length: {len(body)}"] * length
    return encoded([f"POST {path} HTTP/1.1", "Host: x", *headers, *lengths, "Connection: close"]) + body


FIRST = [("prompt", '"12"'), ("prompt", "[3, 4]"), *(("messages", messages) for messages in MESSAGES)]
BODIES = st.tuples(
    st.sampled_from(["completions", "chat/completions"]),
    st.sampled_from(FIRST),
    st.lists(st.tuples(st.sampled_from(FIELDS), VALUES), max_size=3),  # a name may come twice
)


def json_request(case: tuple[str, tuple[str, str], list[tuple[str, str]]]) -> Client:
    route, first, fields = case
    body = "{" + ",".join(f"{json.dumps(name)}:{value}" for name, value in [first, *fields]) + "}"
    return lambda s: [post(f"/{s}/v1/{route}", body.encode(errors="replace"))]


def head_request(case: tuple[str, list[str], bytes]) -> Client:
    head, headers, body = case
    return lambda s: [encoded([f"{head} HTTP/1.1".replace("{s}", s), "Host: x", *headers]) + body]


RAW = st.sampled_from(
    [b"", b"\xff\xfe{}", b'{"prompt": "\xff"}', b'{"prompt": "\xed\xa0\x80"}', b"\xef\xbb\xbf{}", b"null"]
)
HEADS = st.sampled_from([
    "GET /{s}/v1/models", "PUT /{s}/v1/completions", "POST /{s}/v1/../v1/completions", "POST /{s}/v1/%ff%00",
    "POST //v1/", "POST /", "POST *", "OPTIONS *", "CONNECT a:1", "POST http://[::1/{s}", "\x16\x03\x01",
    "POST /{s}/v1/completions#x?%zz", "post /{s}/v1/completions", "HEAD /{s}/v1/models",
    "POST /{s}/v1/" + "a" * 20_000, "P" * 9000, "", "POST",
])  # fmt: skip
HEADERS = st.lists(
    st.sampled_from([
        "Content-Type: multipart/form-data; boundary=x", "Content-Type: \u00ff", "Content-Encoding: gzip",
        "Content-Encoding: deflate", "Content-Encoding: br", "Content-Encoding: nonsense", "Transfer-Encoding: chunked",
        "Transfer-Encoding: nonsense", "Content-Length: -1", f"Content-Length: {10**20}", "Content-Length: 3",
        "Content-Length: x", "Expect: 100-continue", "Expect: nonsense", "Upgrade: websocket", "Connection: upgrade",
        "X: " + "y" * 100_000, "no colon", ": no name", "Cookie: " + "a=b; " * 900, "Host:",
        "X: \x00", "X: a\r\n folded",
        *(["X: y"] * 2),
    ]), max_size=3,
)  # fmt: skip


JSON_REQUEST = BODIES.map(json_request)
RAW_REQUEST = st.builds(lambda body: lambda s: [post(f"/{s}/v1/completions", body)], RAW | st.binary(max_size=200))
HEAD_REQUEST = st.tuples(HEADS, HEADERS, st.binary(max_size=50)).map(head_request)
HEADER_REQUEST = st.builds(
    lambda headers, body, length: lambda s: [post(f"/{s}/v1/completions", body, *headers, length=length)],
    HEADERS,
    st.sampled_from([b'{"prompt": "12"}', gzip.compress(b'{"prompt": "12"}'), b"\x1f\x8b\x08", b"5\r\nabc", b"zz\r\n"]),
    st.booleans(),
)  # fmt: skip
HALF_REQUEST = st.builds(
    lambda part: lambda s: [(whole := post(f"/{s}/v1/completions", b'{"prompt": "12"}'))[: int(part * len(whole))]],
    st.floats(0, 1),
)
GARBAGE = st.binary(max_size=300).map(lambda data: lambda s: [data])
REQUESTS = st.one_of(JSON_REQUEST, JSON_REQUEST, RAW_REQUEST)
FRAGMENTS = st.one_of(HEAD_REQUEST, HEADER_REQUEST, HALF_REQUEST, GARBAGE)  # may not end: no answer has to come


def large(route: str, name: str, value: bytes) -> Client:
    return lambda s: [post(f"/{s}/v1/{route}", b'{"%s": %s}' % (name.encode(), value))]


MANY: list[Client] = [
    large("completions", "prompt", b'"' + b"1" * 50_000_000 + b'"'),
    large("chat/completions", "messages", b'[{"role": "user", "content": "' + b"1" * 50_000_000 + b'"}]'),
    large("completions", "prompt", b"[" + b"3," * 400_000 + b"3]"),
    large("completions", "prompt", b'"' + b"1" * 1_000_000 + b'"'),
    lambda s: [post(f"/{s}/v1/completions", gzip.compress(b" " * 50_000_000), "Content-Encoding: gzip")],
    lambda s: [post(f"/{s}/v1/completions", b'{"prompt": "12", "max_tokens": 3}') for _ in range(CONNECTIONS)],
    lambda s: [b"\x00" * 64 for _ in range(CONNECTIONS)],
]
MANY_FRAGMENTS: list[Client] = [
    lambda s: [post(f"/{s}/v1/completions", b'{"prompt": "12"}')[:-5] for _ in range(CONNECTIONS)]
]

Hands = Callable[[Policy, Completion], Any]  # an awaitable, or what an episode that drew this returns
WEIRD = st.sampled_from(
    [
        None,
        "",
        "x",
        "1",
        b"1",
        True,
        -1,
        0,
        2**70,
        10**400,
        1e308,
        1e-320,
        math.nan,
        math.inf,
        (),
        [],
        {},
        [None],
        [[]],
        "\ud800",
        object(),
        np.nan,
        np.array([1.0, 2.0]),
        np.int64(3),
        1j,
        Completion,
        range(3),
    ]
)
NUMBER = st.floats() | st.integers() | st.integers(-10, 10**6)
ROWS = st.lists(NUMBER, max_size=12).map(tuple) | st.lists(st.integers(0, 41), max_size=12).map(tuple) | WEIRD


def returned(build: Callable[[Policy, Completion], Any]) -> Hands:
    return build


FABRICATED = st.builds(
    lambda changes: returned(lambda p, c: Rollout((dataclasses.replace(c, **changes),), 1.0)),
    st.dictionaries(st.sampled_from([f.name for f in dataclasses.fields(Completion)]), ROWS, min_size=1, max_size=3),
)
OF_ROLLOUT = st.builds(
    lambda changes: returned(lambda p, c: dataclasses.replace(p.rollout(1.0), **changes)),
    st.dictionaries(st.sampled_from([f.name for f in dataclasses.fields(Rollout)]), ROWS, min_size=1, max_size=2),
)
SPANS = st.lists(st.builds(VersionSpan, st.integers(-3, 99), st.integers(-3, 12), st.integers(-3, 12)), max_size=3)
SPANNED = st.builds(
    lambda spans: returned(lambda p, c: Rollout((dataclasses.replace(c, spans=tuple(spans)),), 1.0)), SPANS
)
STEPS = st.lists(st.lists(st.builds(StepReward, st.integers(-3, 12), NUMBER), max_size=3), max_size=3)
STEPPED = st.builds(lambda steps: returned(lambda p, c: dataclasses.replace(p.rollout(1.0), steps=tuple(steps))), STEPS)
REWARD = (NUMBER | WEIRD).map(lambda reward: returned(lambda p, c: reward))
METRICS = st.builds(
    lambda metrics: returned(lambda p, c: p.rollout(1.0, **metrics)),
    st.dictionaries(st.text(max_size=3), NUMBER | WEIRD, max_size=3),
)
SAMPLED = st.builds(
    lambda changes: returned(lambda p, c: p.sample("12", **changes)),
    st.dictionaries(
        st.sampled_from([field.name for field in dataclasses.fields(Sampling)]),
        NUMBER | WEIRD | ROWS, min_size=1, max_size=2,
    ),
)  # fmt: skip
PROMPTED = st.builds(
    lambda prompt: returned(lambda p, c: p.sample(prompt)),
    ROWS | st.text() | st.sampled_from([
        "1" * 10**7, [3] * 10**6, [{"role": "user", "content": "1" * 10**7}], [{}], [{"content": 7}],
        [{"role": "user", "content": "1"}] * 10**5,
    ]),
)  # fmt: skip
TOLD = st.builds(
    lambda text: returned(lambda p, c: p.conversation().ask(text)), WEIRD | st.text() | st.just("1" * 10**7)
)
OLD: list[Rollout] = []


def old(policy: Policy, completion: Completion) -> Rollout:
    OLD.append(policy.rollout(1.0))
    return OLD[0]


def foreign(policy: Policy, completion: Completion) -> float:
    policy.completions += [*(c for rollout in OLD for c in rollout.completions), 7]  # type: ignore[list-item]
    return 1.0


HANDS = st.one_of(
    FABRICATED, OF_ROLLOUT, SPANNED, STEPPED, REWARD, METRICS, SAMPLED, PROMPTED, TOLD,
    st.sampled_from([old, foreign, lambda p, c: [Rollout((c,), 1.0)] * 3]),
)  # fmt: skip


def cases(count: int) -> list[tuple[str, Any]]:
    """As many of what clients send and environments hand in, the same each time."""
    found: list[tuple[str, Any]] = [("request", many) for many in MANY] + [
        ("fragment", many) for many in MANY_FRAGMENTS
    ]
    kinds = {"request": REQUESTS, "fragment": FRAGMENTS, "hands": HANDS}

    @settings(
        max_examples=count, derandomize=True, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.sampled_from(sorted(kinds)).flatmap(lambda kind: kinds[kind].map(lambda case: (kind, case))))
    def collect(case: tuple[str, Any]) -> None:
        found.append(case)

    collect()
    return found[:count]


class Fuzzed:
    """Two of four episodes of a task play a case each, as long as there are any."""

    def __init__(self) -> None:
        self.train = tuple(Task(str(i), f"{i}+1=") for i in range(GROUPS))
        self.test: tuple[Task, ...] = ()
        self.begin(0)

    def begin(self, count: int) -> None:
        self.cases: Iterator[tuple[str, Any]] = iter(cases(count) if count else ())
        self.played: collections.Counter[str] = collections.Counter()
        self.statuses: collections.Counter[int | None] = collections.Counter()
        self.errors: list[tuple[str, bytes, bytes]] = []
        self._members = {task.id: itertools.count() for task in self.train}

    async def rollout(self, task: Task, policy: Policy) -> Any:
        member = next(self._members[task.id]) % MEMBERS
        kind, case = next(self.cases, ("", None)) if member % 2 else ("", None)
        drawn = await policy.sample(task.prompt)
        self.played[kind] += 1
        if kind in ("request", "fragment"):
            url = urlsplit(await policy.base_url())
            secret = url.path.split("/")[1]
            patience = ANSWER_S if kind == "request" else FRAGMENT_S
            await asyncio.gather(*(self._send(url.port or 0, data, patience) for data in case(secret)))
            fine = post(f"/{secret}/v1/completions", b'{"prompt": "12"}')
            assert await self._send(url.port or 0, fine, ANSWER_S) == 200
        elif kind == "hands":
            outcome = case(policy, drawn)
            return await outcome if asyncio.iscoroutine(outcome) else outcome
        return float(member // 2)

    async def _send(self, port: int, data: bytes, patience: float) -> int | None:
        """The status of the answer; None if there is none, as to half a request."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        answer = b""
        try:
            writer.write(data)
            with contextlib.suppress(TimeoutError, ConnectionError):  # as if a body is sent on that was refused
                async with asyncio.timeout(patience):
                    answer = await reader.read(100_000)
        finally:
            writer.close()
        found = answer.split(b" ", 2)
        status = int(found[1]) if answer.startswith(b"HTTP/1.") else None
        self.statuses[status] += 1
        if (status is None and patience == ANSWER_S) or not 100 <= (status or 400) < 500:
            self.errors.append((str(status), data[:300], answer[-300:]))
        return status


FUZZED = Fuzzed()


def test_a_run_continues_after_any_request_and_any_rollout(
    tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    FUZZED.begin(CASES)
    steps = math.ceil(CASES / 2 / GROUPS) + 2
    config = load_config(None, [
        f"--model.path={tiny}", f"--environment.name={__name__}:FUZZED", "--environment.max_failures=100000",
        "--environment.timeout=60", f"--loop.steps={steps}", f"--loop.groups_per_step={GROUPS}",
        f"--loop.group_size={MEMBERS}", "--loop.retries=1000", "--sampling.max_tokens=6", "--evaluation.tasks=0",
        "--generator.threads=1", "--generator.max_num_seqs=16", "--trainer.threads=1", "--trainer.learning_rate=1e-4",
        f"--checkpoint.every={steps}",
    ])  # fmt: skip

    async def main() -> dict[str, Any]:
        run = RunContext(resolve_config(config), RunDirectory.create(tmp_path / "run"), quiet=True)
        try:
            summary = await training_loop(run)
            await probe(run)  # engine and trainer still give the same tokens the same log-probabilities
            assert len(run.cluster.generator.alive) == 1 and not run.totals.engines_lost
            return summary
        finally:
            await close(run)

    summary = asyncio.run(main())
    with capfd.disabled() if "SLIPSTREAM_FUZZ_CASES" in os.environ else contextlib.nullcontext():
        print(json.dumps([FUZZED.played, FUZZED.statuses, summary["failures"]]))
    assert summary["steps"] == steps and not summary["stopped"]
    assert next(FUZZED.cases, None) is None, "all cases were played"
    assert not FUZZED.errors
    assert FUZZED.statuses[200] > CONNECTIONS
    assert "AssertionError" not in summary["failures"], "a request after a case is answered"
    assert sum(summary["failures"].values()) <= FUZZED.played["hands"]
    said = caplog.text + "".join(capfd.readouterr())
    assert "Traceback" not in said and "Error handling request" not in said
