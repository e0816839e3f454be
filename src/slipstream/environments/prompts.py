"""Prompts that leave no room in the context, found before engines start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.environments.base import Codec, Task
from slipstream.generators.base import ContextFull

TOKENIZED = 2**20  # bytes of a prompt up to which its tokens are counted exactly


def too_long(tasks: Sequence[Task], codec: Codec, context: int) -> dict[int, str]:
    """Indices of tasks whose prompt leaves no room in `context` tokens, each with its length.

    A token is at least one byte of text, so a prompt with fewer bytes than the context is not tokenized.
    """
    least, longest = _overhead(codec), codec.limits.longest_token  # a pass over the vocabulary: here, in a thread
    found = {}
    for index, task in enumerate(tasks):
        texts = _texts(task.prompt)
        bytes_ = sum(len(text.encode(errors="replace")) for text in texts)
        if bytes_ + least * (len(texts) + 1) < context:
            continue
        if bytes_ > max(TOKENIZED, context * longest):
            found[index] = f"{bytes_ // longest} tokens or more"
            continue
        try:
            tokens = _tokens(task.prompt, codec)
        except ContextFull:
            found[index] = f"{bytes_} bytes"
        else:
            if tokens >= context:
                found[index] = f"{tokens} tokens"
    return found


def describe(found: Mapping[int, str], tasks: Sequence[Task], most: int = 3) -> str:
    """The first of these tasks, with the file and line of each if that is known."""
    named = [
        f"task {tasks[i].id} ({', '.join(filter(None, (getattr(tasks[i], 'source', ''), length)))})"
        for i, length in list(found.items())[:most]
    ]
    return ", ".join(named) + (" and more" if len(found) > most else "")


def _overhead(codec: Codec) -> int:
    """Tokens that a chat template, or the tokenizer, adds to an empty prompt."""
    return _tokens("", codec)


def _texts(prompt: Any) -> list[str]:
    if isinstance(prompt, str):
        return [prompt]
    return [str(message.get("content") or "") for message in prompt if isinstance(message, Mapping)]


def _tokens(prompt: Any, codec: Codec) -> int:
    """Tokens of a prompt; 0 if it can't be encoded, which its episodes will report. Raises `ContextFull`."""
    try:
        return len(codec.encode(prompt))
    except ContextFull:
        raise
    except Exception:  # a chat template is a program: it may raise anything
        return 0
