"""How much text may be tokenized, and where: long text takes seconds and gigabytes.

Text that no context can hold is refused before it is tokenized. Other long text is rendered and tokenized in a thread,
so that the event loop goes on. Consumes prompts, raises `ContextFull`.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from slipstream.generators.base import refuse_length

MAX_INLINE = 8192  # characters that are tokenized in the event loop, in about 10 ms
MIN_BOUND = 65_536  # characters that are tokenized for any context, in about 100 ms
USUAL_CHARACTERS = 8  # of a token, at most, in almost all text
SLACK = 64  # tokens by which the start of a text may differ from the same text in the whole
THREADS = ThreadPoolExecutor(2, "tokenizer")

Result = TypeVar("Result")


async def off_loop(size: int, function: Callable[..., Result], *arguments: Any) -> Result:
    """What `function` returns; called in a thread if it works on more than `MAX_INLINE` characters or tokens."""
    if size <= MAX_INLINE:
        return function(*arguments)
    return await asyncio.get_running_loop().run_in_executor(THREADS, function, *arguments)


def characters(value: Any) -> int:
    """Characters of all text in a prompt of text or messages; anything else in it counts as one."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(characters(name) + characters(part) for name, part in value.items())
    if isinstance(value, list | tuple):
        return len(value) + sum(map(characters, value))
    return 1


class TextLimits:
    """What a context of so many tokens can hold of a tokenizer's text. A context of 0 holds any text."""

    def __init__(self, tokenizer: Any, context: int = 0) -> None:
        self._tokenizer = tokenizer
        self.context = context

    @functools.cached_property
    def longest_token(self) -> int:
        """Characters of the longest entry of the vocabulary."""
        return max(map(len, self._tokenizer.get_vocab()), default=1)

    def refuse(self, found: str, tokens: int) -> None:
        """Raise `ContextFull`, which says what was `found`, for a prompt of at least so many tokens."""
        if self.context:
            refuse_length(found, tokens, self.context)

    def refuse_size(self, size: int) -> None:
        """Raise `ContextFull` if text of `size` characters makes too many tokens, however it is tokenized."""
        if self.context and size > MIN_BOUND:
            self.refuse(f"{size} characters (at most {self.longest_token} a token)", size // self.longest_token)

    def refuse_text(self, text: str) -> None:
        """Raise `ContextFull` for text that is too long by its size, or by the tokens of its start alone."""
        self.refuse_size(len(text))
        start = USUAL_CHARACTERS * self.context
        if self.context and len(text) > max(MAX_INLINE, 2 * start):
            count = len(self._tokenizer.encode(text[:start], add_special_tokens=False))
            self.refuse(f"{len(text)} characters, and the first {start} make {count} tokens", count - SLACK)
