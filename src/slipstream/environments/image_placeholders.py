"""Put the images of a dataset's row into its prompt.

Consumes chat messages and image parts in the normal form of `images`. Produces messages without placeholders.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from slipstream.environments.images import PLACEHOLDER

TEXT_PLACEHOLDER = "<image>"

Message = dict[str, Any]
Part = dict[str, Any]  # of a message's content


def place_images(messages: Sequence[Message], images: Sequence[Part]) -> list[Message]:
    """The messages with the images at the placeholders, in order.

    Placeholders are parts `{"type": "image"}`; without these parts, "<image>" in texts of the user. Without both, the
    images come before the text of the first user message. Raises `ValueError` if the numbers of both differ.
    """
    if not count_placeholders(messages):
        messages = [_split_text(message) for message in messages]
    count = count_placeholders(messages)
    if images and not count:
        return _prepend(messages, images)
    if count != len(images):
        raise ValueError(f"placeholders for images: {count}, images: {len(images)}; give as many of both")
    rest = iter(images)
    return [
        {**message, "content": [next(rest) if part == PLACEHOLDER else part for part in message["content"]]}
        if isinstance(message["content"], list)
        else message
        for message in messages
    ]


def count_placeholders(messages: Sequence[Message]) -> int:
    """The number of parts `{"type": "image"}`."""
    return sum(m["content"].count(PLACEHOLDER) for m in messages if isinstance(m["content"], list))


def _prepend(messages: Sequence[Message], images: Sequence[Part]) -> list[Message]:
    """The messages with the images before the content of the first user message. Raises `ValueError` without one."""
    index = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    if index is None:
        raise ValueError('images need a message with the role "user"')
    content = messages[index]["content"] or []
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return [*messages[:index], {**messages[index], "content": [*images, *parts]}, *messages[index + 1 :]]


def _split_text(message: Message) -> Message:
    """The message; if the user's text has "<image>", with its content as parts."""
    text = message["content"]
    if message["role"] != "user" or not isinstance(text, str) or TEXT_PLACEHOLDER not in text:
        return message
    pieces = re.split(f"({TEXT_PLACEHOLDER})", text)
    parts = [PLACEHOLDER if piece == TEXT_PLACEHOLDER else {"type": "text", "text": piece} for piece in pieces if piece]
    return {**message, "content": parts}
