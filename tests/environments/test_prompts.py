"""Overlong prompts are found, and prompts that are short enough are not tokenized."""

from __future__ import annotations

import pytest

from slipstream.environments.base import Task
from slipstream.environments.chat_tokenizer import ChatTokenizer
from slipstream.environments.prompts import describe, find_overlong_prompts
from tests.conftest import build_tokenizer

CONTEXT = 16


class Counting(ChatTokenizer):
    """Counts the characters that are tokenized."""

    tokenized = 0

    def _encode_text(self, text: str) -> tuple[int, ...]:
        self.tokenized += len(text)
        return super()._encode_text(text)


def test_overlong_prompts_are_found_with_file_and_line() -> None:
    tasks = [
        Task("a", "1+1="),
        Task("b", "1" * 16, source="train.jsonl, line 2"),
        Task("c", "2" * 15),
        Task("d", "x" * 40),
    ]
    found = find_overlong_prompts(tasks, ChatTokenizer(build_tokenizer()), CONTEXT)
    assert found == {1: "16 tokens", 3: "40 tokens"}
    assert describe(found, tasks) == "task b (train.jsonl, line 2, 16 tokens), task d (40 tokens)"
    assert describe(found, tasks, most=1).endswith("16 tokens) and more")


def test_messages_are_counted_with_the_chat_template() -> None:
    said = ({"role": "user", "content": "1" * 9},)
    tokenizer = build_tokenizer()
    assert not find_overlong_prompts([Task("a", said)], ChatTokenizer(tokenizer), CONTEXT)
    tokenizer.chat_template = "{% for m in messages %}user {{ m['content'] }} ok{% endfor %}"
    assert find_overlong_prompts([Task("a", said)], ChatTokenizer(tokenizer), CONTEXT) == {0: "17 tokens"}


def test_only_prompts_that_may_be_too_long_are_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Counting(build_tokenizer())
    assert not find_overlong_prompts([Task(str(i), "1+1=") for i in range(1000)], tokenizer, CONTEXT)
    assert tokenizer.tokenized == 0
    monkeypatch.setattr("slipstream.environments.prompts.MAX_EXACT_BYTES", 1000)
    assert find_overlong_prompts([Task("huge", "1" * 5000)], tokenizer, CONTEXT) == {0: "1000 tokens or more"}
    assert tokenizer.tokenized == 0
