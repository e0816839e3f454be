"""Find prompts that leave no room in the context, before engines start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.environments.base import Task
from slipstream.environments.chat_tokenizer import ChatTokenizer
from slipstream.environments.images import image_parts, is_text_part
from slipstream.generators.base import ContextFull

MAX_EXACT_BYTES = 2**20  # longer prompts are bounded instead of tokenized


def find_overlong_prompts(tasks: Sequence[Task], tokenizer: ChatTokenizer, context: int) -> dict[int, str]:
    """Indices of tasks whose prompt has at least `context` tokens, with the length of each as text.

    A text with fewer bytes than the context is not tokenized: a token has at least one byte.
    """
    overhead = _tokens("", tokenizer)
    longest = tokenizer.limits.longest_token  # iterates over the vocabulary; the caller runs this in a thread
    found = {}
    for index, task in enumerate(tasks):
        texts = _texts(task.prompt)
        bytes_ = sum(len(text.encode(errors="replace")) for text in texts)
        if bytes_ + overhead * (len(texts) + 1) < context and not image_parts(task.prompt):
            continue
        if bytes_ > max(MAX_EXACT_BYTES, context * longest):
            found[index] = f"{bytes_ // longest} tokens or more"
            continue
        try:
            tokens = _tokens(task.prompt, tokenizer)
        except ContextFull:
            found[index] = f"{bytes_} bytes"
        else:
            if tokens >= context:
                found[index] = f"{tokens} tokens"
    return found


def describe(found: Mapping[int, str], tasks: Sequence[Task], most: int = 3) -> str:
    """The first `most` tasks `found` by `find_overlong_prompts`, with file and line if known, and the length."""
    named = [
        f"task {tasks[i].id} ({', '.join(filter(None, (getattr(tasks[i], 'source', ''), length)))})"
        for i, length in list(found.items())[:most]
    ]
    return ", ".join(named) + (" and more" if len(found) > most else "")


def _texts(prompt: Any) -> list[str]:
    if isinstance(prompt, str):
        return [prompt]
    contents = [message.get("content") or "" for message in prompt if isinstance(message, Mapping)]
    return [text for content in contents for text in _content_texts(content)]


def _content_texts(content: Any) -> list[str]:
    """The content, or the texts of its parts without its images."""
    return [part["text"] for part in content if is_text_part(part)] if isinstance(content, list) else [str(content)]


def _tokens(prompt: Any, tokenizer: ChatTokenizer) -> int:
    """Tokens of a prompt; 0 if encoding fails, which its episodes will report. Raises `ContextFull`."""
    try:
        return len(tokenizer.encode(prompt))
    except ContextFull:
        raise
    except Exception:  # a chat template may raise anything
        return 0
