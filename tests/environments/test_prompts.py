"""Prompts that leave no room in the context are found without tokenizing those that can't be too long."""

from __future__ import annotations

import pytest

from slipstream.environments.base import Codec, Task
from slipstream.environments.prompts import describe, too_long
from tests.conftest import build_tokenizer

CONTEXT = 16


class Counting(Codec):
    """Counts the characters that are tokenized."""

    tokenized = 0

    def _encode_text(self, text: str) -> tuple[int, ...]:
        self.tokenized += len(text)
        return super()._encode_text(text)


def test_a_prompt_that_fills_the_context_is_found_with_where_it_was_read() -> None:
    tasks = [
        Task("a", "1+1="),
        Task("b", "1" * 16, source="train.jsonl, line 2"),
        Task("c", "2" * 15),
        Task("d", "x" * 40),
    ]
    found = too_long(tasks, Codec(build_tokenizer()), CONTEXT)
    assert found == {1: "16 tokens", 3: "40 tokens"}
    assert describe(found, tasks) == "task b (train.jsonl, line 2, 16 tokens), task d (40 tokens)"
    assert describe(found, tasks, most=1).endswith("16 tokens) and more")


def test_messages_count_as_the_template_puts_them() -> None:
    said = ({"role": "user", "content": "1" * 9},)
    tokenizer = build_tokenizer()
    assert not too_long([Task("a", said)], Codec(tokenizer), CONTEXT)
    tokenizer.chat_template = "{% for m in messages %}user {{ m['content'] }} ok{% endfor %}"
    assert too_long([Task("a", said)], Codec(tokenizer), CONTEXT) == {0: "17 tokens"}


def test_only_what_may_be_too_long_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = Counting(build_tokenizer())
    assert not too_long([Task(str(i), "1+1=") for i in range(1000)], codec, CONTEXT)
    assert codec.tokenized == 0
    monkeypatch.setattr("slipstream.environments.prompts.TOKENIZED", 1000)
    assert too_long([Task("huge", "1" * 5000)], codec, CONTEXT) == {0: "1000 tokens or more"}
    assert codec.tokenized == 0
