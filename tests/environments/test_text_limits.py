"""Text too long for the context is never tokenized; other long text does not block the event loop."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from slipstream.config.environments import EnvironmentConfig
from slipstream.config.schema import ConfigError
from slipstream.environments.base import Policy, Task
from slipstream.environments.chat_tokenizer import ChatTokenizer
from slipstream.environments.conversation import Conversation
from slipstream.environments.episode import EpisodeOptions, RolloutFailed, run_episode
from slipstream.environments.load import load_environment
from slipstream.environments.prompts import describe, find_overlong_prompts
from slipstream.environments.text_limits import MAX_INLINE, MIN_BOUND
from slipstream.environments.tools import Call, Tools, plain
from slipstream.generators.base import ContextFull
from slipstream.rollout import Completion, Sampling, VersionSpan
from tests.conftest import build_tokenizer

CONTEXT = 256
HUGE = "1" * 10_000_000
TASK = Task("t", "12")
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}="


class Spy:
    """A tokenizer that notes the longest text that it was given, and the threads that it worked in."""

    def __init__(self, template: str | None) -> None:
        self._tokenizer = build_tokenizer()
        self._tokenizer.chat_template = template
        self.longest = 0
        self.threads: set[threading.Thread] = set()

    def encode(self, text: str, **options: Any) -> list[int]:
        self._note(len(text))
        ids: list[int] = self._tokenizer.encode(text, **options)
        return ids

    def apply_chat_template(self, messages: Any, **options: Any) -> Any:
        self._note(sum(len(m["content"]) for m in messages))
        return self._tokenizer.apply_chat_template(messages, **options)

    def _note(self, length: int) -> None:
        self.longest = max(self.longest, length)
        if length > MAX_INLINE:
            self.threads.add(threading.current_thread())

    def __len__(self) -> int:
        return len(self._tokenizer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


class Says:
    """A generator of one token."""

    version = 0

    async def generate(self, prompt_ids: Any, sampling: Sampling) -> Completion:
        assert all(type(token) is int for token in prompt_ids)
        return Completion(tuple(prompt_ids), (3,), (-1.0,), (VersionSpan(0, 0, 1),), "stop")

    async def close(self) -> None: ...


def policy(tokenizer: Any, context: int = CONTEXT) -> Policy:
    return Policy(Says(), ChatTokenizer(tokenizer, context), Sampling(), "0")


@pytest.mark.parametrize("template", [None, TEMPLATE])
@pytest.mark.parametrize(
    "prompt",
    [HUGE, [{"role": "user", "content": HUGE}], [{"role": "user", "content": "1"}] * 100_000, [3] * 10_000_000],
    ids=["text", "message", "messages", "ids"],
)
def test_text_too_long_for_the_context_fails_without_being_tokenized(template: str | None, prompt: Any) -> None:
    tokenizer = Spy(template)

    class Asks:
        train = test = (TASK,)

        async def rollout(self, task: Task, policy: Policy) -> float:
            await policy.sample(prompt)
            return 1.0

    with pytest.raises(RolloutFailed, match="share a context of 256 tokens; shorten the prompt") as failure:
        asyncio.run(run_episode(Asks(), TASK, policy(tokenizer), EpisodeOptions(10.0)))
    assert failure.value.reason == "ContextFull" and tokenizer.longest == 0


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_only_the_start_of_doubtful_text_is_tokenized(template: str | None) -> None:
    tokenizer = Spy(template)
    with pytest.raises(ContextFull, match=r"has 6000[01] characters, and the first 2048 make 2048 tokens"):
        asyncio.run(policy(tokenizer).sample("1" * 60_000))
    assert tokenizer.longest <= (60_001 if template else 2048)  # a template is rendered first
    assert not tokenizer.threads or threading.main_thread() not in tokenizer.threads


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_overlong_text_ends_a_conversation(template: str | None) -> None:
    """For text of the policy, a tool or the environment: the episode is rewarded for its turns so far."""
    tokenizer = Spy(template)

    async def main(conversation: Conversation) -> None:
        with pytest.raises(ContextFull):
            await policy(tokenizer).conversation().ask(HUGE)
        assert await conversation.ask("1") and not conversation.ended
        assert await conversation.ask(HUGE) == "" and conversation.ended == "context"

    asyncio.run(main(policy(tokenizer).conversation()))
    assert tokenizer.longest < MIN_BOUND


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_long_text_that_fits_is_rendered_and_tokenized_in_a_thread(template: str | None) -> None:
    tokenizer = Spy(template)
    long = "12" * MAX_INLINE

    async def main() -> None:
        it = policy(tokenizer, context=40_000)
        assert len((await it.sample(long)).prompt_ids) == len(long) + bool(template)
        conversation = it.conversation()
        for _ in range(2):
            assert await conversation.ask(long[: len(long) // 2 + 1])
        assert not conversation.ended

    asyncio.run(main())
    assert tokenizer.threads and threading.main_thread() not in tokenizer.threads


def test_token_ids_may_be_any_integer_type() -> None:
    import numpy as np

    it = policy(build_tokenizer())
    assert list(asyncio.run(it.sample(np.array([3, 4]))).prompt_ids) == [3, 4]  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        asyncio.run(it.sample([3, 4.5]))  # type: ignore[list-item]


def test_lines_too_long_for_the_context_are_found_when_tasks_load(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    lines = [{"prompt": "1"}, {"prompt": [{"role": "user", "content": HUGE}]}, {"prompt": "2"}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "users.py").write_text("def reward(task, completion):\n    return 1.0\n")
    options = {"train": str(file), "test": str(file)}
    environment = load_environment(EnvironmentConfig(name=f"{tmp_path / 'users.py'}:reward", options=options))
    tokenizer = Spy(TEMPLATE)
    found = find_overlong_prompts(environment.train, ChatTokenizer(tokenizer, CONTEXT), CONTEXT)
    assert describe(found, environment.train) == f"task train/2 ({file}, line 2, 2000000 tokens or more)"
    assert tokenizer.longest == 0
    assert find_overlong_prompts([Task("t", "1" * 60_000)], ChatTokenizer(tokenizer, CONTEXT), CONTEXT) == {
        0: "60000 bytes"
    }


@pytest.mark.parametrize("line", ['{"prompt": "\\ud800"}', '{"prompt": "1", "id": "\\udfff"}', "[" * 100_000])
def test_lines_that_no_tokenizer_can_encode_are_named_when_tasks_load(tmp_path: Path, line: str) -> None:
    (tmp_path / "tasks.jsonl").write_text(f'{{"prompt": "1"}}\n{line}\n{{"prompt": "\\ud83d\\ude42"}}\n')
    (tmp_path / "users.py").write_text("def reward(task, completion):\n    return 1.0\n")
    options = {"train": str(tmp_path / "tasks.jsonl")}
    with pytest.raises(ConfigError, match=r"tasks\.jsonl, line 2: "):
        load_environment(EnvironmentConfig(name=f"{tmp_path / 'users.py'}:reward", options=options))


def test_parsing_blank_lines_for_calls_takes_linear_time() -> None:
    assert plain("\n" * 100_000 + "x") == [] and plain("f(" + ")" * 100_000 + "x") == []
    assert plain("think\n  add(1, (2)) \n ") == [Call("add", "1, (2)")] and plain("add(1)\nthen") == []


@pytest.mark.parametrize("kind", ["async", "thread"])
def test_large_tool_results_become_text_in_a_thread(kind: str) -> None:
    threads = []

    class Result:
        def __str__(self) -> str:
            threads.append(threading.current_thread())
            return "x" * 100_000

    async def later() -> Any:
        return [Result()]

    def now() -> Any:
        return [Result()]

    tool = later if kind == "async" else now
    told, well = asyncio.run(Tools([tool], plain).run(Call(tool.__name__, {})))
    assert well and len(told) < 5000 and threads and threading.main_thread() not in threads
