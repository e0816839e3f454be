"""Limits on the text to tokenize, since long text takes seconds and gigabytes.

Text that is certainly too long for the context raises `ContextFull` before all of it is tokenized: by its size, from
`MIN_BOUND` characters on, or by the tokens of its start. Other long text is tokenized in a thread.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from slipstream.generators.base import validate_length
from slipstream.runtime.event_loop import lower_priority, throttle

MAX_INLINE = 8192  # characters that are tokenized in the event loop, in about 10 ms
MIN_BOUND = 65_536  # characters, about 100 ms: shorter text is tokenized whatever the context
CHARACTERS_PER_TOKEN = 8  # upper bound for almost all text
SLACK = 64  # tokens by which a text's start, tokenized alone, may differ
THREADS = ThreadPoolExecutor(2, "tokenizer", lower_priority)

Result = TypeVar("Result")


async def run_in_thread(size: int, function: Callable[..., Result], *arguments: Any) -> Result:
    """The result of `function`, which runs in a thread if `size` (characters or tokens) exceeds `MAX_INLINE`.

    `throttle` spreads hundreds of simultaneous calls over several iterations of the event loop.
    """
    if size <= MAX_INLINE:
        return function(*arguments)
    await throttle()
    result = await asyncio.get_running_loop().run_in_executor(THREADS, function, *arguments)
    await throttle()
    return result


def is_encodable(text: str) -> bool:
    """Whether UTF-8 can encode the text: it has no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def count_characters(value: Any) -> int:
    """Size of a prompt: the characters of its text and keys, and one for each image, list element and other value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        if value.get("type") == "image" and value.keys() == {"type", "image"}:
            return 1
        return sum(count_characters(name) + count_characters(part) for name, part in value.items())
    if isinstance(value, list | tuple):
        return len(value) + sum(map(count_characters, value))
    return 1


class PromptLimits:
    """Refuses prompts that can't fit a context of `context` tokens. 0: no limit."""

    def __init__(self, tokenizer: Any, context: int = 0) -> None:
        self._tokenizer, self.context = tokenizer, context

    @functools.cached_property
    def longest_token(self) -> int:
        """Characters of the longest entry of the vocabulary."""
        return max(map(len, self._tokenizer.get_vocab()), default=1)

    def validate_tokens(self, found: str, tokens: int) -> None:
        """Raise `ContextFull`, with `found` in its message, if `tokens`, a lower bound, fill the context."""
        if self.context:
            validate_length(found, tokens, self.context)

    def validate_size(self, size: int) -> None:
        """Raise `ContextFull` if even the longest tokens can't make `size` characters fit."""
        if self.context and size > MIN_BOUND:
            longest = self.longest_token
            self.validate_tokens(f"{size} characters (at most {longest} a token)", size // longest)

    def validate_text(self, text: str) -> None:
        """Raise `ContextFull` for text too long by its size, or by the number of tokens of its start."""
        self.validate_size(len(text))
        start = CHARACTERS_PER_TOKEN * self.context
        if self.context and len(text) > max(MAX_INLINE, 2 * start):
            count = len(self._tokenizer.encode(text[:start], add_special_tokens=False))
            self.validate_tokens(f"{len(text)} characters, and the first {start} make {count} tokens", count - SLACK)
