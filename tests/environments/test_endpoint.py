"""The OpenAI-compatible endpoint: agents are trained on exactly the tokens of its answers."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import copy
import gzip
import json
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import aiohttp
import pytest
import torch

from slipstream.algorithms.advantages import group_mean, make_batch
from slipstream.config.loading import load_config
from slipstream.config.schema import ConfigError
from slipstream.controller.evaluation import evaluate
from slipstream.environments.base import Policy, Task
from slipstream.environments.chat_tokenizer import ChatTokenizer
from slipstream.environments.endpoint import Endpoint
from slipstream.environments.episode import EpisodeOptions, RolloutFailed, run_episode
from slipstream.environments.load import LoadedEnvironment
from slipstream.environments.reward_workers import CURRENT_EPISODE
from slipstream.generators.base import GenerationError
from slipstream.generators.torch.engine import Engine
from slipstream.generators.torch.generator import TorchGenerator
from slipstream.model.packing import group_by_prefix, pack
from slipstream.model.policy import PackedPolicy
from slipstream.rollout import Group, Rollout, Sampling, build_samples
from tests.conftest import build_model, build_tokenizer

BOUND = 1e-5
TASK = Task("t", "12+34=")
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if messages[0].role == 'alien' %}{{ raise_exception('no such role') }}{% endif %}="
)


CHOICES = "auto", "required"
BAD_TOOLS: list[Any] = [
    {}, {"function": "abc"}, {"function": {}}, {"function": {"name": 1}}, {"type": "x", "function": {"name": "a"}},
    {"function": {"name": "a", "parameters": [1]}}, {"function": {"name": "a", "description": 1}},
]  # fmt: skip


class Served:
    """A real model with an endpoint, and a client."""

    def __init__(self, client: aiohttp.ClientSession, context: int = 0, **sampling: Any) -> None:
        self.tokenizer = build_tokenizer()
        self.tokenizer.chat_template = TEMPLATE
        self.model = build_model(vocab_size=len(self.tokenizer), eos_token_id=1, pad_token_id=0)
        self.engine = Engine(self.model, slots=8, tokenizer=self.tokenizer, version=5)
        self.generator = TorchGenerator(self.engine)
        self.chat_tokenizer = ChatTokenizer(self.tokenizer, context)
        self.endpoint = Endpoint(self.chat_tokenizer)
        self.client = client
        self.sampling = Sampling(**({"max_tokens": 6} | sampling))

    def policy(self, seed: str = "0") -> Policy:
        return Policy(self.generator, self.chat_tokenizer, self.sampling, seed, self.endpoint)

    async def post(self, url: str, **fields: Any) -> tuple[int, Any]:
        async with self.client.post(url, json=fields) as response:
            text = await response.text()
            if response.content_type == "text/event-stream":
                return response.status, [event.removeprefix("data: ") for event in text.strip().split("\n\n")]
            return response.status, json.loads(text)


@contextlib.asynccontextmanager
async def served(context: int = 0, **sampling: Any) -> AsyncIterator[Served]:
    async with aiohttp.ClientSession() as client:
        it = Served(client, context, **sampling)
        try:
            yield it
        finally:
            await it.endpoint.close()
            await it.generator.close()


def said(text: str = "12") -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def by_a_full_pass(it: Served, policy: Policy) -> float:
    """Largest difference between recorded log-probabilities and those of the trainer for the same tokens."""
    samples = build_samples(policy.completions, 1.0)
    batch = pack(samples, group_by_prefix(samples, 100), torch.device("cpu"))
    return float((PackedPolicy(copy.deepcopy(it.model))(batch)[0] - batch.behaviour).abs().max().detach())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["chat/completions", "completions"])
def test_answers_match_recorded_completions(route: str, stream: bool) -> None:
    async def main() -> None:
        async with served() as it:
            policy = it.policy()
            chat = route.startswith("chat")
            asked: dict[str, Any] = {"messages": said()} if chat else {"prompt": "12="}
            status, answer = await it.post(
                f"{await policy.base_url()}/{route}", **asked, n=2, seed=7,
                temperature=0.8, max_tokens=5, logprobs=True if chat else 0, return_token_ids=True, stream=stream,
                stream_options={"include_usage": True}, model="any", user=None,
            )  # fmt: skip
            assert status == 200
            if stream:
                assert answer.pop() == "[DONE]"
                events = [json.loads(event) for event in answer]
                usage = events.pop()
                assert usage["choices"] == [] and all(e["usage"] is None for e in events)
                assert [e["choices"][0]["finish_reason"] is None for e in events] == [True, False] * 2
                answer = usage | {"choices": [e["choices"][0] for e in events[::2]]}
                for choice, end in zip(answer["choices"], events[1::2], strict=True):
                    choice["finish_reason"] = end["choices"][0]["finish_reason"]
            assert len(policy.completions) == 2
            assert policy.completions[0].token_ids != policy.completions[1].token_ids
            for choice, recorded in zip(answer["choices"], policy.completions, strict=True):
                assert choice["token_ids"] == list(recorded.token_ids)
                text = choice["delta" if stream else "message"]["content"] if chat else choice["text"]
                assert text == recorded.text == it.chat_tokenizer.decode(recorded.token_ids)
                given = choice["logprobs"]
                shown = [t["logprob"] for t in given["content"]] if chat else given["token_logprobs"]
                assert shown == list(recorded.logprobs)
                tokens = [t["token"] for t in given["content"]] if chat else given["tokens"]
                assert tokens == [it.tokenizer.decode([i]) for i in recorded.token_ids]
                assert choice["finish_reason"] == recorded.finish_reason
                assert recorded.prompt_ids == it.chat_tokenizer.encode_raw("12=") and recorded.temperature == 0.8
                assert recorded.versions == (5, 5) and answer["system_fingerprint"] == "version 5"
            written = sum(len(c.token_ids) for c in policy.completions)
            assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": written, "total_tokens": 3 + written}
            assert by_a_full_pass(it, policy) < BOUND

    asyncio.run(main())


def test_requests_override_the_runs_sampling() -> None:
    async def main() -> None:
        async with served(temperature=0.7, max_tokens=4, top_p=0.9, record_sampling_mask=True) as it:
            policy = it.policy()
            url = f"{await policy.base_url()}/completions"
            assert (await it.post(url, prompt=[3, 4]))[0] == 200
            assert (await it.post(url, prompt="12", temperature=1.3, top_p=1.0, max_completion_tokens=2))[0] == 200
            assert (await it.post(url, prompt="12", top_p=0.4, top_k=7))[0] == 200
            as_the_run, changed, truncated = policy.completions
            assert (
                as_the_run.temperature == 0.7
                and len(as_the_run.token_ids) <= 4
                and list(as_the_run.prompt_ids) == [3, 4]
            )
            assert as_the_run.sampling_mask is not None and changed.sampling_mask is None
            assert changed.temperature == 1.3 and len(changed.token_ids) <= 2
            assert truncated.sampling_mask is not None and all(1 <= len(ids) <= 7 for ids in truncated.sampling_mask)
            assert by_a_full_pass(it, policy) < BOUND
            text = truncated.text
            assert (await it.post(url, prompt="12", top_p=0.4, top_k=7, max_tokens=64, stop=["", text[-1]]))[0] == 200
            stopped = policy.completions[-1]
            assert text[-1] not in stopped.text and stopped.finish_reason == "stop"

    asyncio.run(main())


def test_seeds_determine_an_episode_and_differ_between_draws() -> None:
    async def main() -> None:
        async with served() as it:
            drawn = []
            for seed in ("0", "0", "1"):
                policy = it.policy(seed)
                await it.post(f"{await policy.base_url()}/chat/completions", messages=said(), n=4)
                drawn.append(sorted(tuple(c.token_ids) for c in policy.completions))
            assert drawn[0] == drawn[1] != drawn[2]
            assert len(set(drawn[0])) > 1

    asyncio.run(main())


def test_concurrent_episodes_do_not_mix() -> None:
    async def main() -> None:
        async with served() as it:
            policies = [it.policy(str(i)) for i in range(6)]

            async def play(number: int) -> list[str]:
                url, texts = await policies[number].base_url(), []
                for turn in range(3):
                    _, answer = await it.post(f"{url}/chat/completions", messages=said(f"{number}{turn}"))
                    texts.append(answer["choices"][0]["message"]["content"])
                return texts

            for number, texts in enumerate(await asyncio.gather(*map(play, range(6)))):
                assert [c.text for c in policies[number].completions] == texts
                prompts = [it.chat_tokenizer.decode(c.prompt_ids) for c in policies[number].completions]
                assert prompts == [f"{number}{turn}=" for turn in range(3)]
            assert len({await p.base_url() for p in policies}) == 6

    asyncio.run(main())


def test_one_url_serves_the_sessions_of_all_episodes() -> None:
    async def main() -> None:
        async with served() as it:
            one, other = it.policy("1"), it.policy("2")
            url = await one.shared_url()
            assert url == await other.shared_url()
            for policy, session in ((one, "solver"), (one, "critic"), (other, "else")):
                policy.open_session(session)

            async def ask(session: str, n: int = 1) -> int:
                body, headers = {"messages": said(), "n": n}, {"X-Session-ID": session}
                async with it.client.post(f"{url}/chat/completions", json=body, headers=headers) as response:
                    return response.status

            assert [await ask(*each) for each in (("solver",), ("critic", 2), ("else",), ("solver",))] == [200] * 4
            solver, critic = one.sessions["solver"], one.sessions["critic"]
            assert one.completions == [solver[0], *critic, solver[1]] and len(critic) == 2
            assert other.completions == other.sessions["else"] and len(other.completions) == 1
            one.end()
            assert [await ask(session) for session in ("solver", "unknown", "else")] == [404, 404, 200]

    asyncio.run(main())


def test_concurrent_runs_have_different_ports() -> None:
    async def main() -> None:
        async with served() as one, served() as other:
            urls = [await it.policy().base_url() for it in (one, other)]
            assert len({url.split("/")[2] for url in urls}) == 2

    asyncio.run(main())


def test_content_in_parts_and_tools_reach_the_template() -> None:
    async def main() -> None:
        async with served() as it:
            policy = it.policy()
            url = f"{await policy.base_url()}/chat/completions"
            tools = [{"type": "function", "function": {"name": "search"}}]
            parts = [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}]
            turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": None}]
            for fields in ({}, {"tools": tools}, {"tools": tools, "tool_choice": "none"}):
                status, answer = await it.post(url, messages=turns, response_format={"type": "text"}, **fields)
                assert status == 200, answer
            prompts = [it.chat_tokenizer.decode(c.prompt_ids) for c in policy.completions]
            assert prompts == ["12=", "search 12=", "12="]
            it.tokenizer.chat_template = None
            status, answer = await it.post(url, messages=turns, tools=tools)
            assert status == 400 and "tools need a chat template" in answer["error"]["message"]
            status, answer = await it.post(url, messages=turns, chat_template_kwargs={"enable_thinking": True})
            assert status == 400 and "the tokenizer has no chat template" in answer["error"]["message"]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"tool_choice": "required"}, "tool_choice: tools has no function"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema is missing"),
        ({"response_format": {"type": "json_object"}}, 'set generator.engine = "vllm"'),
        ({"logit_bias": {"3": 1}}, "logit_bias is not supported"),
        ({"presence_penalty": 0.5}, "presence_penalty is not supported"),
        ({"frequency_penalty": -1}, "frequency_penalty is not supported"),
        ({"top_logprobs": 2, "logprobs": True}, "top_logprobs is not supported"),
        ({"temperature": -1}, "temperature: Input should be greater"),
        ({"temperature": float("nan")}, "temperature: Input should be a finite number"),
        ({"temperature": 1e-320}, "temperature = 1e-320 must be from 0.01 to 100, or 0 (greedy) outside of training"),
        ({"temperature": 1e308}, "temperature = 1e+308 must be"),
        ({"stop": ["x"] * 65}, "stop = "),
        ({"stop": ["x" * 1001]}, "at most 64 strings of 1 to 1000 characters"),
        ({"top_p": 1.5}, "top_p"),
        ({"n": 0}, "n: "),
        ({"max_tokens": "5"}, "max_tokens: Input should be a valid integer"),
        ({"stop": 5}, "stop"),
        ({"messages": []}, "messages"),
        *(({"tools": [tool], "tool_choice": choice}, "tools.") for tool in BAD_TOOLS for choice in CHOICES),
        *(({"chat_template_kwargs": {name: 1}}, f"chat_template_kwargs: {name} is no argument of a chat template")
          for name in ("truncation", "max_length", "tools", "add_generation_prompt")),
        ({"messages": "12"}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "Input tag 'input_audio' found"),
        ({"messages": [{"role": "alien", "content": "1"}]}, "no such role"),
        ({"messages": [{"role": "user", "content": "1" * 300}]}, "the prompt has 301 tokens"),
    ],
)  # fmt: skip
def test_unsupported_fields_get_status_400_in_openais_format(fields: dict[str, Any], complaint: str) -> None:
    async def main() -> None:
        async with served() as it:
            policy = it.policy()
            url = f"{await policy.base_url()}/chat/completions"
            status, answer = await it.post(url, **({"messages": said()} | fields))
            assert status == 400 and set(answer["error"]) == {"message", "type", "param", "code"}
            assert complaint in answer["error"]["message"] and answer["error"]["type"] == "invalid_request_error"
            assert "\n" not in answer["error"]["message"] and not policy.completions
            neutral = {"presence_penalty": 0, "logit_bias": {}, "top_logprobs": None}
            assert (await it.post(url, messages=said(), **neutral))[0] == 200

    asyncio.run(main())


def test_bad_bodies_prompts_and_paths() -> None:
    async def main() -> None:
        async with served() as it:
            url = await it.policy().base_url()
            deep = b"[" * 100_000
            for body in (b"", b"{", b"[]", b"7", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', deep):
                async with it.client.post(f"{url}/completions", data=body) as response:
                    assert response.status == 400 and (await response.json())["error"]["message"], body
            for prompt in ("", [], [3, len(it.tokenizer)], [-1], ["a", "b"], [True], None):
                status, answer = await it.post(f"{url}/completions", prompt=prompt)
                assert status == 400 and answer["error"]["type"] == "invalid_request_error", prompt
            root = url.rsplit("/", 2)[0]
            for wrong in (f"{url}/embeddings", f"{root}/v1/completions", f"{root}/guess/v1/completions", f"{root}/"):
                status, answer = await it.post(wrong, prompt="12")
                assert status == 404 and answer["error"]["message"], wrong
            async with it.client.get(f"{url}/models") as response:
                assert [m["id"] for m in (await response.json())["data"]] == ["policy"]
            async with it.client.get(f"{url}/completions") as response:
                assert response.status == 404 and "GET completions is not served" in await response.text()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("headers", "body", "status", "complaint"),
    [
        ({"Content-Encoding": "gzip"}, b"no gzip", 400, "the body can't be read"),
        ({"Content-Encoding": "gzip"}, gzip.compress(b'{"prompt": "12"}', mtime=0)[:14], 400, "the body"),
        ({"Content-Encoding": "gzip"}, gzip.compress(b" " * 30_000_000, mtime=0), 413,
         "the body has more than 1048576 bytes"),
        ({}, b" " * 2_000_000, 413, "the body has more than 1048576 bytes; shorten the prompt"),
        ({}, b'{"prompt": [' + b"3," * 300 + b"3]}", 400, "301 tokens, messages or parts"),
        ({}, b'{"prompt": "' + b"1" * 100_000 + b'"}', 400, "the prompt has 100000 characters"),
        ({}, b'{"prompt": ["a"' + b', "b"' * 100 + b"]}", 400, "prompt.list"),
    ],
)  # fmt: skip
def test_too_large_or_damaged_bodies_are_refused(
    headers: dict[str, str], body: bytes, status: int, complaint: str
) -> None:
    async def main() -> None:
        async with served(context=256) as it:
            policy = it.policy()
            url = f"{await policy.base_url()}/completions"
            async with it.client.post(url, data=body, headers=headers) as response:
                message = (await response.json())["error"]["message"]
                assert response.status == status and complaint in message and "\n" not in message, message
                assert len(message) < 500
            assert (await it.post(url, prompt="12"))[0] == 200
            async with it.client.post(url, data=gzip.compress(b'{"prompt": "12"}', mtime=0), headers=GZIP) as response:
                assert response.status == 200

    asyncio.run(main())


GZIP = {"Content-Encoding": "gzip"}
MALFORMED = [
    b"nonsense\r\n\r\n", b"POST / HTTP/9.9\r\n\r\n", b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n",
    b"POST / HTTP/1.1\r\nX: " + b"y" * 100_000 + b"\r\n\r\n", b"POST / HTTP/1.1\r\nno colon\r\n\r\n",
    b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", b"\x16\x03\x01\x00" * 20 + b"\r\n\r\n",
]  # fmt: skip


@pytest.mark.parametrize("data", MALFORMED)
def test_malformed_http_gets_4xx_and_prints_nothing(
    data: bytes, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with served() as it:
            url = await it.policy().base_url()
            port = int(url.split(":")[2].split("/")[0])
            for _ in range(2):  # the first request of a connection, and one after a good one
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(data)
                answer = await reader.read(20)
                assert answer.startswith(b"HTTP/1.") and answer.split()[1].startswith(b"4"), answer
                writer.close()
            assert (await it.post(f"{url}/completions", prompt="12"))[0] == 200

    asyncio.run(main())
    assert not caplog.records and capfd.readouterr() == ("", "")


def test_an_incomplete_body_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.environments.endpoint.BODY_TIMEOUT_S", 0.05)

    async def main() -> None:
        async with served() as it:
            host, port = (url := await it.policy().base_url()).split("/")[2].split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            path = url.split(port)[1]
            writer.write(f"POST {path}/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{{".encode())
            assert b"408" in await reader.read(20)
            writer.close()

    asyncio.run(main())


def test_one_failed_completion_cancels_the_others() -> None:
    """The response is the error alone, so tokens sampled after the failure are not trained on."""

    class Fails(TorchGenerator):
        count = 0

        async def generate(self, prompt_ids: Any, sampling: Sampling, *clock: Any) -> Any:
            self.count += 1
            if self.count == 2:
                raise GenerationError("no distribution")
            return await super().generate(prompt_ids, sampling, *clock)

    async def main() -> None:
        async with served(max_tokens=200) as it:
            it.engine._eos = frozenset()
            it.generator = Fails(it.engine)
            policy = it.policy()
            status, answer = await it.post(f"{await policy.base_url()}/completions", prompt="12", n=4)
            assert (status, answer["error"]["message"]) == (400, "no distribution")
            await until(lambda: not it.engine.busy)
            assert not policy.completions

    asyncio.run(main())


def test_a_dead_generator_is_a_server_error() -> None:
    class Gone(TorchGenerator):
        async def generate(self, prompt_ids: Any, sampling: Sampling, *clock: Any) -> Any:
            raise ConnectionError("the generator is gone")

    async def main() -> None:
        async with served() as it:
            it.generator = Gone(it.engine)
            status, answer = await it.post(f"{await it.policy().base_url()}/completions", prompt="12")
            assert (status, answer["error"]["type"]) == (500, "server_error")
            assert answer["error"]["message"] == "ConnectionError: the generator is gone"

    asyncio.run(main())


def test_requests_run_outside_the_context_of_the_episode_that_started_the_server() -> None:
    """The watchdog of the event loop would otherwise interrupt the server because of an episode."""
    seen = []

    class Looks(TorchGenerator):
        async def generate(self, prompt_ids: Any, sampling: Sampling, *clock: Any) -> Any:
            seen.append(CURRENT_EPISODE.get() is not None)
            return await super().generate(prompt_ids, sampling, *clock)

    async def main() -> None:
        async with served() as it:

            class Both:
                train = test = (TASK,)

                async def rollout(self, task: Task, policy: Policy) -> float:
                    await policy.sample(task.prompt)
                    return float((await it.post(f"{await policy.base_url()}/completions", prompt="12"))[0])

            it.generator = Looks(it.engine)
            await run_episode(Both(), TASK, it.policy(), EpisodeOptions(10.0))
            assert seen == [True, False]

    asyncio.run(main())


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


def test_a_client_that_disconnects_aborts_its_request() -> None:
    async def main() -> None:
        async with served(max_tokens=200) as it:
            policy = it.policy()
            url = f"{await policy.base_url()}/completions"
            it.engine._eos = frozenset()
            request = asyncio.ensure_future(it.post(url, prompt="12", n=2))
            await until(lambda: it.engine.tokens_generated > 4)
            request.cancel()
            await until(lambda: not it.engine.busy)
            assert it.engine.tokens_generated < 2 * 200 and not policy.completions
            assert (await it.post(url, prompt="12", max_tokens=2))[0] == 200

    asyncio.run(main())


def test_nothing_is_sampled_after_the_episode_ends() -> None:
    async def main() -> None:
        async with served(max_tokens=200) as it:
            it.engine._eos = frozenset()
            late: list[Any] = []

            class Leaves:
                train = test = (TASK,)

                async def rollout(self, task: Task, policy: Policy) -> float:
                    url = f"{await policy.base_url()}/completions"
                    assert (await it.post(url, prompt="12", max_tokens=2))[0] == 200
                    late.extend([policy, url, asyncio.ensure_future(it.post(url, prompt="34"))])
                    await until(lambda: it.engine.busy)
                    return 1.0

            [rollout] = await run_episode(Leaves(), TASK, it.policy(), EpisodeOptions(10.0))
            policy, url, in_flight = late
            status, answer = await in_flight
            assert status == 404 and "has ended" in answer["error"]["message"]
            assert (await it.post(url, prompt="12"))[0] == 404
            assert len(rollout.completions) == len(policy.completions) == 1 and not it.endpoint._episodes
            await until(lambda: not it.engine.busy)
            with pytest.raises(RuntimeError, match="ended"):
                await policy.base_url()

    asyncio.run(main())


def test_an_environment_around_an_agent_is_trained_on() -> None:
    """A group of episodes, each an agent of two turns; the trainer's own pass agrees with what was recorded."""

    async def main() -> None:
        async with served() as it:

            class Agent:
                train = test = (TASK, Task("u", "5+6="))

                async def rollout(self, task: Task, policy: Policy) -> float:
                    url = f"{await policy.base_url()}/chat/completions"
                    turns = said(str(task.prompt))
                    for _ in range(2):
                        status, answer = await it.post(url, messages=turns)
                        assert status == 200
                        turns += [answer["choices"][0]["message"], *said("+")]
                    return float(len(turns[-2]["content"]))

            policies = [it.policy(f"0/{i}") for i in range(4)]
            episodes = await asyncio.gather(
                *(run_episode(Agent(), TASK, policy, EpisodeOptions(10.0)) for policy in policies)
            )
            played = [rollout for episode in episodes for rollout in episode]
            batch = make_batch([Group(0, TASK.id, tuple(played))], partial(group_mean, normalize=True))
            assert [len(c) for _, c in ((r, r.completions) for r in played)] == [2] * 4 and not it.endpoint._episodes
            assert all(span.version == 5 for r in played for c in r.completions for span in c.spans)
            samples = batch.samples()
            packed = pack(samples, group_by_prefix(samples, 100), torch.device("cpu"))
            config = load_config(None, ["--model.path=m", "--environment.name=e", "--sampling.max_tokens=6"])
            loaded = LoadedEnvironment(config.each_environment[0], Agent())
            result = await evaluate(
                config,
                [loaded],
                it.generator,
                it.chat_tokenizer,
                it.endpoint,
            )
            assert result["eval/tasks"] == 2 and result["eval/failed"] == 0
            logprobs, _ = PackedPolicy(it.model)(packed)
            assert (logprobs - packed.behaviour).abs().max() < BOUND
            (-(logprobs * packed.advantages).mean()).backward()
            assert any(p.grad is not None and p.grad.abs().max() > 0 for p in it.model.parameters())

    asyncio.run(main())


def test_a_failed_episode_reports_the_last_http_error() -> None:
    """The exception of an agent's client contains only the status."""

    async def main() -> None:
        async with served() as it:

            class Agent:
                train = test = (TASK,)

                async def rollout(self, task: Task, policy: Policy) -> float:
                    async with it.client.post(f"{await policy.base_url()}/completions", json={"n": 1}) as response:
                        response.raise_for_status()
                    return 1.0

            with pytest.raises(RolloutFailed, match=r"(?s)Bad Request.*Its URL had answered: prompt: Field required"):
                await run_episode(Agent(), TASK, it.policy(), EpisodeOptions(10.0))

    asyncio.run(main())


def test_without_aiohttp_the_error_names_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    really = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "aiohttp":
            raise ImportError(name)
        return really(name, *rest)

    class Asks:
        train = test = (TASK,)

        async def rollout(self, task: Task, policy: Policy) -> Rollout:
            raise AssertionError(await policy.base_url())

    async def main() -> None:
        async with served() as it:
            monkeypatch.setattr(builtins, "__import__", without)
            with pytest.raises(ConfigError, match=r"pip install 'slipstream-rl\[endpoint\]'"):
                await run_episode(Asks(), TASK, it.policy(), EpisodeOptions(10.0))
            it.endpoint._server = None
            no_url = Policy(it.generator, it.chat_tokenizer, it.sampling, "0")
            with pytest.raises(RolloutFailed, match="has no URL"):
                await run_episode(Asks(), TASK, no_url, EpisodeOptions(10.0))

    asyncio.run(main())
