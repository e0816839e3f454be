"""Conversations: token for token through chat templates and without, with tools and limits, down to the micro-batch."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import inspect
import json
import pickle
import sys
import time
import weakref
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from slipstream.config.environments import EnvironmentConfig
from slipstream.config.schema import NO_TEMPLATE_ARGUMENTS, ConfigError, ModelConfig
from slipstream.environments.base import InvalidReward, Policy, Task
from slipstream.environments.chat_tokenizer import ChatTokenizer
from slipstream.environments.concurrency import RateLimiter
from slipstream.environments.conversation import UNLIMITED, Conversation, ConversationLimits
from slipstream.environments.endpoint import Endpoint
from slipstream.environments.episode import EpisodeOptions, episode_limits, run_episode
from slipstream.environments.tools import Call, Tools, hermes, plain
from slipstream.generators.base import ContextFull, EngineFailed, GenerationError
from slipstream.model.packing import group_by_prefix, pack
from slipstream.rollout import (
    Completion,
    Rollout,
    Sampling,
    StepReward,
    VersionSpan,
    build_samples,
    int32_array,
    turn_rewards_to_steps,
)
from slipstream.runtime.worker import WorkerDied
from tests.conftest import build_tokenizer

CHATML = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t.function.name }} {% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments }}}</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIMS = CHATML.replace("m.content or ''", "m.content | trim")
FORGETS = CHATML.replace("m.content or ''", "(m.content if m.role != 'assistant' else m.content.split('</think>')[-1])")


def chat_tokenizer(template: str | None) -> Any:
    """Letters that merge into pairs, so that the same text has many tokenizations."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(a, b) for a in "abcdeh12" for b in "abcdeo12"]
    vocabulary = {s: i for i, s in enumerate([*letters, *(a + b for a, b in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>", "<eos>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>" if template else "<eos>")
    fast.chat_template = template
    return fast


class Letters:
    """A generator that samples given texts letter by letter; tokenizing a text again would give other tokens.

    A text is ended by the end of a turn, unless it is cut off by "…" or by `max_tokens`.
    """

    version = 3

    def __init__(self, tokenizer: Any, *texts: str, context: int = 10_000, seconds: float = 0.0) -> None:
        self._tokenizer, self._texts, self._context, self._seconds = tokenizer, list(texts), context, seconds
        self.prompts: list[tuple[int, ...]] = []

    async def generate(self, prompt_ids: Any, sampling: Sampling) -> Completion:
        await asyncio.sleep(self._seconds)
        if len(prompt_ids) >= self._context:
            raise ContextFull(f"the prompt has {len(prompt_ids)} tokens")
        self.prompts.append(tuple(prompt_ids))
        text = self._texts.pop(0)
        ids = [i for letter in text.rstrip("…") for i in self._tokenizer.encode(letter, add_special_tokens=False)]
        ids = ids if text.endswith("…") else [*ids, self._tokenizer.eos_token_id]
        cut = len(ids) > sampling.max_tokens or text.endswith("…")
        ids = ids[: sampling.max_tokens]
        spans = (VersionSpan(3, 0, len(ids)),)
        logprobs = tuple(-0.01 * (i + 1) for i in range(len(ids)))
        reason = "length" if cut else "stop"
        return Completion(tuple(prompt_ids), tuple(ids), logprobs, spans, reason, policy=sampling.policy)

    async def close(self) -> None: ...


def policy(template: str | None, *texts: str, limits: ConversationLimits = UNLIMITED, **options: Any) -> Policy:
    tokenizer = chat_tokenizer(template)
    return Policy(Letters(tokenizer, *texts, **options), ChatTokenizer(tokenizer), Sampling(), "0", limits=limits)


def prompts(policy: Policy) -> list[str]:
    generator: Any = policy._generator
    return [generator._tokenizer.decode(ids) for ids in generator.prompts]


def run(episode: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(episode())


def trained_on(policy: Policy) -> list[str]:
    """The trained tokens of each sequence of the packed micro-batch."""
    samples = build_samples(policy.completions, 1.0)
    batch = pack(samples, group_by_prefix(samples, 10_000), torch.device("cpu"))
    drawn = [i for c in policy.completions for i in c.token_ids]
    assert sorted(batch.targets.tolist()) == sorted(drawn) and batch.advantages.tolist() == [1.0] * len(drawn)
    decode = policy.tokenizer._tokenizer.decode
    return [decode(batch.targets[batch.sequences == n].tolist()) for n in range(len(samples))]


@pytest.mark.parametrize("template", [CHATML, TRIMS])
def test_turns_are_one_sequence_and_only_sampled_tokens_are_trained_on(template: str) -> None:
    it = policy(template, "hohoho", "12 \n", "edh…", "ab")

    async def episode() -> Conversation:
        chat = it.conversation("be brief")
        assert await chat.ask("hello") == "hohoho"
        chat.tell("12", role="tool")
        assert [await chat.ask("12?"), await chat.ask("more"), await chat.ask("end")] == ["12 \n", "edh", "ab"]
        return chat

    chat = run(episode)
    [sample] = build_samples(it.completions)
    for before, after in zip(it.completions, it.completions[1:], strict=False):
        read = before.prompt_ids + before.token_ids
        assert after.prompt_ids[: len(read)] == read
    assert chat.forks == 0 and chat.metrics()["turns"] == 4
    assert prompts(it)[-1] == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
        "hohoho<|im_end|>\n<|im_start|>tool\n12<|im_end|>\n<|im_start|>user\n12?<|im_end|>\n<|im_start|>assistant\n"
        "12 \n<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
        "edh<|im_end|>\n<|im_start|>user\nend<|im_end|>\n<|im_start|>assistant\n"
    )
    assert trained_on(it) == ["hohoho<|im_end|>12 \n<|im_end|>edhab<|im_end|>"]
    assert len(sample.sampled_positions) == sum(len(c.token_ids) for c in it.completions)


@pytest.mark.parametrize("keep", [False, True])
def test_a_template_that_rewrites_history_starts_a_new_sequence(keep: bool) -> None:
    it = policy(FORGETS, "hmm</think>12", "2")

    async def episode() -> Rollout:
        chat = it.conversation(keep_history=keep)
        await chat.ask("a")
        await chat.ask("b")
        return it.rollout(1.0)

    rollout = run(episode)
    assert rollout.metrics["forks"] == (not keep) and len(build_samples(it.completions)) == (1 if keep else 2)
    assert ("hmm</think>12" in prompts(it)[1]) is keep and "12<|im_end|>" in prompts(it)[1]
    assert trained_on(it) == (
        ["hmm</think>12<|im_end|>2<|im_end|>"] if keep else ["hmm</think>12<|im_end|>", "2<|im_end|>"]
    )


def test_without_a_template_texts_are_concatenated() -> None:
    it = policy(None, "12", "ab…", "c")

    async def episode() -> None:
        chat = it.conversation("sys")
        for text in ("1+1=", "no", ""):
            await chat.ask(text)

    run(episode)
    assert prompts(it) == ["sys\n\n1+1=", "sys\n\n1+1=12<eos>no", "sys\n\n1+1=12<eos>noab"]
    assert trained_on(it) == ["12<eos>abc<eos>"]


def double(number: int) -> int:
    """Twice a number."""
    return 2 * number


def broken(text: str) -> str:
    raise LookupError(f"no {text}")


def hangs() -> None:
    time.sleep(2)


async def slow() -> None:
    await asyncio.sleep(60)


def test_tool_results_are_returned_to_the_model() -> None:
    it = policy(CHATML, 'hm <tool_call>{"name": "double", "arguments": {"number": 21}}</tool_call>', "42", "bye")

    async def episode() -> Rollout:
        chat = it.conversation(tools=[double])
        assert await chat.ask("twice 21?") == "42"
        assert await chat.ask("thanks") == "bye"
        return it.rollout(1.0)

    rollout = run(episode)
    assert rollout.metrics["tool_calls"] == 1 and rollout.metrics["tool_errors"] == 0 and rollout.metrics["turns"] == 3
    assert prompts(it)[0].startswith("<|im_start|>system\ndouble <|im_end|>")
    assert prompts(it)[1].endswith("<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n")
    assert len(build_samples(it.completions)) == 1


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("double(4)", "8"),
        ("first\n double( 4 ) ", "8"),
        ("double(x)", "error: number: Input should be a valid integer"),
        ("triple(4)", "error: no tool triple; there are double, broken, slow, hangs"),
        ("broken(luck)", "error: LookupError: no luck"),
        ("slow()", "error: took longer than 0.2 s"),
        ("hangs()", "error: took longer than 0.2 s"),
    ],
)
def test_tool_errors_are_returned_to_the_model(said: str, told: str) -> None:
    it = policy(None, said, "so")

    async def episode() -> Conversation:
        chat = it.conversation(tools=[double, broken, slow, hangs], tool_seconds=0.2)
        assert await chat.ask("?") == "so"
        return chat

    chat = run(episode)
    assert chat.messages[-2]["role"] == "tool" and chat.messages[-2]["content"].startswith(told)
    assert chat.tool_calls == 1 and chat.tool_errors == told.startswith("error")
    assert prompts(it)[1] == f"?{said}<eos>\n{chat.messages[-2]['content']}\n"


def test_the_rate_of_tool_calls_is_shared_and_counts_in_no_time_limit() -> None:
    called: list[float] = []

    async def now() -> str:
        called.append(asyncio.get_running_loop().time())
        return "later"

    limits = ConversationLimits(seconds=1.0, tool_calls_per_second=2.0, label="shared")
    policies = [policy(None, "now()", "now()", "42", limits=limits) for _ in range(2)]

    async def episode() -> list[str]:
        called.append(asyncio.get_running_loop().time())
        return await asyncio.gather(*(it.conversation(tools=[now]).ask("when?") for it in policies))

    assert run(episode) == ["42", "42"], "they wait for 1.5 s in all"
    began, *calls = called
    assert len(calls) == 4 and all(call > began + 0.5 * turn - 0.01 for turn, call in enumerate(calls))
    config = EnvironmentConfig(name="a", label="a", tool_calls_per_second=8.0, workers=4)
    assert episode_limits(config).tool_calls_per_second == 2.0


def test_cancelled_waits_of_a_rate_limiter_take_no_turn() -> None:
    async def main() -> None:
        limiter = RateLimiter(20.0)
        await limiter.wait()
        cancelled = [asyncio.ensure_future(limiter.wait()) for _ in range(1000)]
        await asyncio.sleep(0)
        for wait in cancelled:
            wait.cancel()
        async with asyncio.timeout(5.0):  # instead of 50 s
            await limiter.wait()

    run(main)


def test_the_endpoint_returns_tool_calls() -> None:
    aiohttp = pytest.importorskip("aiohttp")
    call = '<tool_call>{"name": "double", "arguments": {"number": 21}}</tool_call>'
    tokenizer = chat_tokenizer(CHATML)
    chat = ChatTokenizer(tokenizer)
    endpoint = Endpoint(chat)
    beside = [f"{call}\nso 42", f"{call} or {call}"]
    replies = (call, "42", *beside, f"{call}\n{call}\n", f"<think>hm</think>\n{call}")
    it = Policy(Letters(tokenizer, *replies), chat, Sampling(max_tokens=200), "0", endpoint)
    tools = [{"type": "function", "function": {"name": "double"}}]

    async def episode() -> None:
        try:
            async with aiohttp.ClientSession() as client:
                url, messages = f"{await it.base_url()}/chat/completions", [{"role": "user", "content": "twice 21?"}]

                async def ask() -> Any:
                    async with client.post(url, json={"messages": messages, "tools": tools}) as response:
                        return (await response.json())["choices"][0]

                choice = await ask()
                [asked] = choice["message"]["tool_calls"]
                assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
                assert asked["function"] == {"name": "double", "arguments": '{"number": 21}'}
                messages += [choice["message"], {"role": "tool", "content": "42", "tool_call_id": asked["id"]}]
                assert (await ask())["message"] == {"role": "assistant", "content": "42"}
                for text in beside:  # nothing that was said is lost
                    choice = await ask()
                    assert choice["message"] == {"role": "assistant", "content": text}
                    assert choice["finish_reason"] == "stop"
                both = (await ask())["message"]
                assert [c["function"] for c in both["tool_calls"]] == [asked["function"]] * 2
                reasoned = (await ask())["message"]
                assert reasoned["content"] == "<think>hm</think>" and len(reasoned["tool_calls"]) == 1
        finally:
            await endpoint.close()

    run(episode)
    assert prompts(it)[1].endswith(f"{call}<|im_end|>\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n")


def test_a_forced_tool_call_is_sampled_by_its_json_schema() -> None:
    aiohttp = pytest.importorskip("aiohttp")
    tokenizer = chat_tokenizer(CHATML)
    chat = ChatTokenizer(tokenizer)
    call, endpoint = '{"name": "double", "arguments": {"n": 1}}', Endpoint(chat)
    generator = Letters(tokenizer, call, call, '{"na…')
    it, schemas = Policy(generator, chat, Sampling(), "0", endpoint), []
    sample = generator.generate

    async def generate(prompt: Any, sampling: Sampling) -> Completion:
        schemas.append(json.loads(sampling.json_schema))
        return await sample(prompt, sampling)

    generator.generate = generate  # type: ignore[method-assign]
    functions = [{"name": name, "parameters": {"type": "object"}} for name in ("double", "half")]
    tools = [{"type": "function", "function": function} for function in functions]
    named = {"type": "function", "function": {"name": "double"}}

    async def episode() -> None:
        try:
            async with aiohttp.ClientSession() as client:
                for choice in (named, "required", named):
                    body = {"messages": [{"role": "user", "content": "a"}], "tools": tools, "tool_choice": choice}
                    async with client.post(f"{await it.base_url()}/chat/completions", json=body) as response:
                        answers.append((await response.json())["choices"][0])
        finally:
            await endpoint.close()

    answers: list[Any] = []
    run(episode)
    for answer in answers[:2]:
        assert answer["message"]["tool_calls"][0]["function"] == {"name": "double", "arguments": '{"n": 1}'}
        assert answer["message"]["content"] is None and answer["finish_reason"] == "tool_calls"
    assert answers[2]["message"] == {"role": "assistant", "content": '{"na'} and answers[2]["finish_reason"] == "length"
    assert [s.get("properties", {}).get("name") for s in schemas] == [{"const": "double"}, None, {"const": "double"}]
    assert [call["properties"]["name"]["const"] for call in schemas[1]["anyOf"]] == ["double", "half"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("pythonic", "[double(number=21)]"),
        ("qwen3_coder", "<tool_call><function=double><parameter=number>21</parameter></function></tool_call>"),
    ],
)
def test_tool_calls_are_parsed_by_the_parsers_of_vllm(name: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    tokenizer = chat_tokenizer(CHATML)
    chat = ChatTokenizer(tokenizer, options=ModelConfig(path="-", tool_call_parser=name))
    it = Policy(Letters(tokenizer, said, "so 42"), chat, Sampling(), "0")
    asked = it.conversation(tools=[double])
    assert run(lambda: asked.ask("twice 21?")) == "so 42" and asked.messages[-2]["content"] == "42"
    assert chat.split_calls(it.completions[0], asked._tools.schemas) == ("", [Call("double", {"number": 21})])
    assert chat.split_calls(it.completions[1], asked._tools.schemas) == ("so 42", [])
    assert chat.split_calls(it.completions[0], [{"function": "abc"}]) == (said, [])
    monkeypatch.setattr(chat.tool_call_parser._kind, "extract_tool_calls", lambda *_: 1 / 0)
    assert chat.split_calls(it.completions[0], asked._tools.schemas) == (said, [])


def test_a_parser_of_tool_calls_that_can_not_be_used_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(name: str) -> str:
        with pytest.raises(ConfigError, match=f"model.tool_call_parser = '{name}' ") as raised:
            ChatTokenizer(chat_tokenizer(CHATML), options=ModelConfig(path="-", tool_call_parser=name))
        return str(raised.value)

    if importlib.util.find_spec("vllm"):
        assert "is unknown; there are apertus, " in refused("nothing")
        assert "does not fit this model: Mistral parser could not locate the tool call token" in refused("mistral")
    monkeypatch.setitem(sys.modules, "vllm.tool_parsers", None)
    assert 'is one of vLLM\'s, which is not installed; use "hermes" or "plain"' in refused("pythonic")


THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content and keep %}<think>"
    "{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think></think>{% endif %}"
)


def test_arguments_of_the_chat_template_come_from_the_configuration_and_from_requests() -> None:
    aiohttp = pytest.importorskip("aiohttp")
    tokenizer = chat_tokenizer(THINKS)
    chat = ChatTokenizer(tokenizer, options=ModelConfig(path="-", chat_template_kwargs={"enable_thinking": False}))
    endpoint = Endpoint(pickle.loads(pickle.dumps(chat)))
    it = Policy(Letters(tokenizer, "1", "2", "3"), chat, Sampling(), "0", endpoint)

    async def episode() -> None:
        await it.conversation().ask("a")
        earlier = {"role": "assistant", "content": "b", "reasoning_content": "since c"}
        try:
            async with aiohttp.ClientSession() as client:
                for extra in ({}, {"chat_template_kwargs": {"enable_thinking": True, "keep": True}}):
                    body = {"messages": [earlier], **extra}
                    async with client.post(f"{await it.base_url()}/chat/completions", json=body) as response:
                        assert response.status == 200, await response.text()
        finally:
            await endpoint.close()

    run(episode)
    off, on = "<|im_start|>assistant\n<think></think>", "<|im_start|>assistant\n"
    said = "<|im_start|>assistant\n{}b<|im_end|>\n"
    assert prompts(it) == [
        f"<|im_start|>user\na<|im_end|>\n{off}", said.format("") + off, said.format("<think>since c</think>") + on
    ]  # fmt: skip


def test_arguments_of_a_chat_template_need_one_and_exclude_the_parameters_of_transformers() -> None:
    with pytest.raises(ConfigError, match=r"model\.chat_template_kwargs = {'keep': 1}: .* has no chat template"):
        ChatTokenizer(chat_tokenizer(None), options=ModelConfig(path="-", chat_template_kwargs={"keep": 1}))
    parameters = {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters}
    assert parameters - {"self", "documents", "kwargs"} <= NO_TEMPLATE_ARGUMENTS


def test_a_tokenizer_has_one_copy_for_equal_template_arguments_and_does_not_wait_for_a_garbage_collection() -> None:
    chat = ChatTokenizer(chat_tokenizer(THINKS))
    one = chat.with_template({"keep": True, "enable_thinking": True})
    assert one is chat.with_template({"enable_thinking": True, "keep": True}) is not chat.with_template({"keep": True})
    assert one.encode("a") == one.encode("a") != chat.with_template({"enable_thinking": False}).encode("a")
    freed = weakref.ref(chat), weakref.ref(one)
    gc.disable()
    try:
        del chat, one
        assert [ref() for ref in freed] == [None, None]
    finally:
        gc.enable()


def test_the_reward_of_a_conversation_is_a_number() -> None:
    it = policy(None, "42")

    async def episode() -> None:
        conversation = it.conversation()
        await conversation.ask("?")
        with pytest.raises(InvalidReward, match="of type str: return a number"):
            conversation.rollout("0.5")  # type: ignore[arg-type]

    run(episode)


def test_tool_calls_are_parsed() -> None:
    good = '<tool_call>\n{"name": "f", "arguments": {"x": [1, "</a>"]}}\n</tool_call>'
    assert hermes(f"hm {good} and {good}") == [Call("f", {"x": [1, "</a>"]})] * 2
    assert hermes('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}') == [Call("f", {"x": 1})]
    assert hermes("f(1)") == [] == plain("so f(1) it is") == plain("")
    for bad in ("{}", "[]", "f(1)", '{"name": 3}', '{"name": "f", "arguments": [1]}', "null", ""):
        [call] = hermes(f"<tool_call>{bad}</tool_call>")
        assert call.problem
        assert asyncio.run(Tools([double], hermes).run(call))[1] is False
    [schema] = Tools([double], hermes).schemas
    assert schema["function"]["description"] == "Twice a number."
    assert schema["function"]["parameters"]["properties"]["number"]["type"] == "integer"
    assert schema["function"]["parameters"]["required"] == ["number"]
    with pytest.raises(ConfigError, match=r"must return a list of Call\(name, arguments\), and returned {'name': 'f'}"):
        Tools([double], lambda _: [{"name": "f"}]).calls("f", "f")  # type: ignore[list-item]
    with pytest.raises(TypeError, match="tools has 'double', which is no function; give the functions themselves"):
        Tools(["double"], hermes)  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("limits", "options", "ended", "turns", "tokens"),
    [
        (ConversationLimits(turns=2), {}, "turns", 2, 6),
        (ConversationLimits(tokens=5), {}, "tokens", 2, 5),
        (ConversationLimits(tokens=6), {}, "tokens", 2, 6),
        (ConversationLimits(seconds=0.25), {"seconds": 0.1}, "seconds", 2, 6),
        (UNLIMITED, {"context": 7}, "context", 2, 6),
    ],
)
def test_a_limit_ends_a_conversation_and_keeps_its_turns(
    limits: ConversationLimits, options: dict[str, Any], ended: str, turns: int, tokens: int
) -> None:
    class Asks:
        train = test = (Task("t", "a"),)

        async def rollout(self, task: Task, it: Policy) -> float:
            chat = it.conversation()
            while not chat.ended:
                await chat.ask("a")
            assert await chat.ask("more") == "" and chat.ended == ended
            return 0.5

    async def episode() -> Rollout:
        it = policy(None, *["12"] * 9, limits=limits, **options)
        [rollout] = await run_episode(Asks(), Asks.train[0], it, EpisodeOptions(30.0))
        return rollout

    rollout = run(episode)
    assert rollout.reward == 0.5 and rollout.metrics[f"ended/{ended}"] == 1.0
    assert sum(v for k, v in rollout.metrics.items() if k.startswith("ended/")) == 1.0
    assert (rollout.metrics["turns"], rollout.tokens) == (turns, tokens) == (len(rollout.completions), tokens)


@pytest.mark.parametrize(
    ("limits", "option"),
    [(ConversationLimits(turns=2), "turns = 2"), (ConversationLimits(tokens=5, seconds=9.0), "tokens = 5")],
)
@pytest.mark.parametrize("where", ["sample", "base_url"])
def test_limits_without_a_conversation_raise(limits: ConversationLimits, option: str, where: str) -> None:
    """The error ends the run; a failed episode would be tried again."""

    class Samples:
        train = test = (Task("t", "a"),)

        async def rollout(self, task: Task, it: Policy) -> float:
            await it.conversation().ask("which keeps to it")
            await (it.sample(task.prompt) if where == "sample" else it.base_url())
            return 1.0

    it = policy(None, "12", "34", limits=limits)
    with pytest.raises(ConfigError, match=rf"^environment.max_{option} .*policy.{where}\(\); leave it out"):
        run(lambda: run_episode(Samples(), Samples.train[0], it, EpisodeOptions(10.0)))
    assert len(it.completions) == 1


def test_a_first_prompt_longer_than_the_context_fails_the_episode() -> None:
    with pytest.raises(ContextFull):
        run(lambda: policy(None, "1", context=1).conversation().ask("too long"))


@pytest.mark.parametrize("error", [EngineFailed("no memory"), GenerationError("top_k can't be"), WorkerDied("killed")])
def test_an_engine_failure_is_raised_in_a_conversation(error: Exception) -> None:
    """The episode fails, since its turns so far are not a complete episode of the policy."""
    it = policy(None, "12", "34")

    async def episode() -> None:
        chat = it.conversation()
        await chat.ask("a")
        it._generator.generate = fails  # type: ignore[method-assign]
        with pytest.raises(type(error)):
            await chat.ask("b")
        assert not chat.ended

    async def fails(*_: Any) -> Completion:
        raise error

    run(episode)


def test_an_episode_of_two_roles_has_one_rollout_for_each() -> None:
    class Both:
        train = test = (Task("t", "a"),)

        async def rollout(self, task: Task, it: Policy) -> list[Rollout]:
            proposer, solver = it.conversation(), it.conversation()
            problem = await proposer.ask("propose")
            answer = await solver.ask(problem)
            await proposer.ask("harder")
            return [proposer.rollout(1.0, role="proposer"), solver.rollout(float(answer == "3"), role="solver")]

    it = policy(None, "1+2", "3", "12+2")
    proposer, solver = run(lambda: run_episode(Both(), Both.train[0], it, EpisodeOptions(10.0)))
    assert [proposer.role, solver.role] == ["proposer", "solver"] and solver.reward == 1.0
    assert [c.text for c in proposer.completions] == ["1+2", "12+2"] and [c.text for c in solver.completions] == ["3"]
    assert len(build_samples(proposer.completions)) == len(build_samples(solver.completions)) == 1


TOKENS = st.lists(st.integers(2, 5), max_size=3).map(tuple)


@given(st.data())
def test_continued_turns_are_merged_and_every_sampled_token_is_trained_on_once_in_its_context(
    data: st.DataObject,
) -> None:
    completions: list[Completion] = []
    for number in range(data.draw(st.integers(1, 6))):
        continued = data.draw(st.sampled_from([None, *completions]))
        before = continued.prompt_ids + continued.token_ids if continued else int32_array([1])
        prompt, drawn = before + int32_array(data.draw(TOKENS)), data.draw(TOKENS)
        versions = (VersionSpan(number, 0, len(drawn)),) if drawn else ()
        logprobs = tuple(-number - i / 10 for i in range(len(drawn)))
        completions.append(Completion(prompt, drawn, logprobs, versions, "stop"))
    samples = build_samples(completions, [float(n) for n, c in enumerate(completions) for _ in c.token_ids])
    wanted = sorted(
        (c.prompt_ids + c.token_ids[:i], token, c.logprobs[i], float(n), n)
        for n, c in enumerate(completions)
        for i, token in enumerate(c.token_ids)
    )
    found = sorted(
        (s.token_ids[:at], s.token_ids[at], s.logprobs[i], s.advantages[i], s.versions[i])
        for s in samples
        for i, at in enumerate(s.sampled_positions)
    )
    assert found == wanted
    assert len(samples) <= len([c for c in completions if c.token_ids])
    for sample in samples:
        positions = list(sample.sampled_positions)
        assert positions[-1] == len(sample.token_ids) - 1 and positions == sorted(set(positions))
    if samples:
        batch = pack(samples, group_by_prefix(samples, 20), torch.device("cpu"), version=9)
        packed = sorted(zip(batch.targets.tolist(), batch.advantages.tolist(), (9 - batch.lags).tolist(), strict=True))
        assert packed == sorted((token, advantage, version) for _, token, _, advantage, version in wanted)


def test_interleaved_conversations_are_one_sequence_each() -> None:
    it = policy(None, "a", "b", "c", "d", "e")

    async def episode() -> None:
        first, second = it.conversation(), it.conversation()
        for chat, text in ((first, "1"), (second, "2"), (first, "1"), (second, "2"), (first, "1")):
            await chat.ask(text)

    run(episode)
    assert sorted(trained_on(it)) == ["a<eos>c<eos>e<eos>", "b<eos>d<eos>"]


def test_the_tiny_tokenizer_holds_conversations() -> None:
    it = Policy(Letters(build_tokenizer(), "12"), ChatTokenizer(build_tokenizer()), Sampling(), "0")
    assert run(lambda: it.conversation().ask("1+1=")) == "12"


def test_turn_rewards_become_steps() -> None:
    """One reward for each reply, at its last token; any other number is an error."""
    drawn: list[tuple[int, ...]] = [(5, 6), (), (7,)]
    turns = [Completion((1,), ids, (0.0,) * len(ids), (VersionSpan(0, 0, len(ids)),), "stop") for ids in drawn]
    assert turn_rewards_to_steps(turns, [0.5, 1.0, 2]) == ((StepReward(1, 0.5),), (), (StepReward(0, 2.0),))
    assert turn_rewards_to_steps(turns, ()) == ()
    with pytest.raises(ValueError, match="1 rewards were given for 3 turns; give one for each"):
        turn_rewards_to_steps(turns, [1.0])
