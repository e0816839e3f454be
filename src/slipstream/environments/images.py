"""Encoded images in chat messages.

Consumes images and content parts of datasets and requests. Produces content parts in the normal form:
`{"type": "text", "text": "..."}` and `{"type": "image", "image": "data:image/png;base64,..."}`.
"""

from __future__ import annotations

import base64
import importlib.util
import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.config.schema import ConfigError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_IMAGE_BYTES = 20 * 10**6  # of the encoded file
DATA_URI = re.compile(r"data:[^,]*;base64,", re.IGNORECASE)
IMAGE_TYPES = ("image", "image_url")  # of content parts
PLACEHOLDER = {"type": "image"}  # content part for the next image of a row


def image_part(value: Any, folder: Path | None) -> dict[str, Any]:
    """The content part `{"type": "image", "image": DATA_URI}` of an image.

    `value` is a data URI, bytes, a mapping with "bytes" or "path", or a path in `folder`. Without a folder, files are
    refused. Raises `ValueError`.
    """
    if isinstance(value, Mapping):
        value = value.get("path") if value.get("bytes") is None else value["bytes"]
    if isinstance(value, str) and not DATA_URI.match(value):
        encoded, name = _read_file(value, folder), f"image file {value!r:.200}"
    else:
        encoded, name = decode_data_uri(value) if isinstance(value, str) else value, "the image"
    if not isinstance(encoded, bytes):
        raise ValueError(f"an image is {value!r:.80}; give a file, a data URI or bytes")
    if len(encoded) > MAX_IMAGE_BYTES:
        raise ValueError(f"{name} has {len(encoded)} bytes; the limit is {MAX_IMAGE_BYTES}")
    data = base64.b64encode(encoded).decode()
    return {"type": "image", "image": f"data:image/{_validated_format(encoded, name)};base64,{data}"}


def image_uri(part: Mapping[str, Any]) -> str:
    """The data URI of a content part in the normal form. Raises `ValueError`."""
    uri = part.get("image")
    if not isinstance(uri, str) or not DATA_URI.match(uri):
        raise ValueError(f'the "image" of a content part is {uri!r:.80}; give a data URI: "data:image/png;base64,..."')
    return uri


def normal_parts(parts: Any, folder: Path | None) -> Any:
    """A list of content parts in the normal form, in which placeholders stay; any other value unchanged.

    Takes parts in the formats of OpenAI ("image_url") and Hugging Face ("image", "path" or "url"). Raises `ValueError`.
    """
    return [_normal_part(part, folder) for part in parts] if isinstance(parts, list) else parts


def image_parts(prompt: Any) -> list[Mapping[str, Any]]:
    """The parts of chat messages that are images, in order; none of a prompt of another form."""
    messages = prompt if isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], Mapping) else ()
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list | tuple) for part in content)
    return [part for part in parts if isinstance(part, Mapping) and part.get("type") == "image"]


def content_text(content: Any) -> str:
    """The content of a message to show: its text, with "[image]" for an image."""
    if not isinstance(content, list | tuple):
        return str(content or "")
    return " ".join(part["text"] if is_text_part(part) else "[image]" for part in content)


def is_text_part(part: Any) -> bool:
    """Whether a content part is a text: of any type except images."""
    return isinstance(part, Mapping) and part.get("type") not in IMAGE_TYPES and isinstance(part.get("text"), str)


def require_pillow() -> None:
    """Raise `ConfigError` if Pillow is missing."""
    if importlib.util.find_spec("PIL") is None:
        raise ConfigError("images need Pillow: pip install 'slipstream-rl[images]'")


def _normal_part(part: Any, folder: Path | None) -> dict[str, Any]:
    if not isinstance(part, Mapping):
        raise ValueError(f'a content part is {part!r:.80}; give {{"type": "text", "text": "..."}} or an image')
    if part.get("type") in IMAGE_TYPES:
        # `datasets` fills fields that a part lacks with None.
        image = next((part[key] for key in ("image_url", "image", "path", "url") if part.get(key) is not None), None)
        if isinstance(image, Mapping) and "url" in image:
            image = image["url"]
        return PLACEHOLDER if image is None else image_part(image, folder)
    if is_text_part(part):
        return {"type": "text", "text": part["text"]}
    raise ValueError(f"a content part has type {part.get('type')!r:.80}; give text or an image")


def decode_data_uri(uri: str) -> bytes:
    """The data of a data URI in base64. Raises `ValueError`."""
    data = uri[uri.index(",") + 1 :]
    if len(data) > MAX_IMAGE_BYTES * 2:  # before a copy: base64 with line breaks has fewer than 2 characters a byte
        raise ValueError(f"a data URI has {len(data)} characters; the limit of an image is {MAX_IMAGE_BYTES} bytes")
    try:
        return base64.b64decode("".join(data.split()), validate=True)
    except ValueError as error:
        raise ValueError(f"a data URI is not base64: {error}") from None


def _read_file(name: str, folder: Path | None) -> bytes:
    """The content of a file, relative to the folder. Raises `ValueError`."""
    if re.match("https?://", name, re.IGNORECASE) and folder:
        raise ValueError(f"the image {name!r:.200} is a URL; download it and give a file")
    if folder is None:
        raise ValueError(f'the image is {name!r:.80}; give a data URI: "data:image/png;base64,..."')
    path = folder / name.removeprefix("file://")
    try:
        with path.open("rb") as file:
            return file.read(MAX_IMAGE_BYTES + 1)
    except (OSError, ValueError) as error:  # a ValueError for a null character in the name
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"the image file {str(path)!r:.200} can't be read: {reason}") from None


def _validated_format(encoded: bytes, name: str) -> str:
    """The format of an encoded image, as in its MIME type. Raises `ValueError`."""
    require_pillow()
    from PIL import Image

    try:
        with Image.open(io.BytesIO(encoded), formats=FORMATS) as image:
            image.verify()
            return str(image.format).lower().replace("mpo", "jpeg")  # a JPEG file with several pictures
    except Image.DecompressionBombError as error:
        raise ValueError(f"{name} has too many pixels: {error}") from None
    except Exception:  # Pillow raises errors of many types for malformed files
        raise ValueError(f"{name} is not an image in the formats {', '.join(FORMATS)}, or is damaged") from None
