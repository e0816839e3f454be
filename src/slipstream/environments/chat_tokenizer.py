"""Prompts to token ids and completions to text, with the tokenizer's chat template: `ChatTokenizer`."""

from __future__ import annotations

import functools
import json
import weakref
from array import array
from collections.abc import Callable, Mapping, Sequence
from operator import index
from typing import Any, SupportsIndex

from slipstream.config.schema import ConfigError, ModelConfig
from slipstream.environments.images import decode_data_uri, image_parts, image_uri
from slipstream.environments.text_limits import MAX_INLINE, PromptLimits, count_characters, is_encodable
from slipstream.environments.tools import (
    Call,
    Schemas,
    ToolCallParser,
    VllmToolCallParser,
    hermes,
    plain,
    split_hermes,
)
from slipstream.generators.base import GenerationError
from slipstream.model.images import IMAGE_TYPES, ImageTokenSpec, InvalidImages, expand, image_processor
from slipstream.rollout import Completion, Image, int32_array

Message = Mapping[str, Any]
Prompt = str | Sequence[Message] | Sequence[int]
DEFAULTS = ModelConfig(path="-")
READ_IMAGES = 64  # kept with their files, for the rollouts of a group and the turns of a conversation
MAX_TEMPLATES = 64  # copies with arguments of the chat template that requests have set
REPLY = "THE-REPLY"  # placeholder for the text of a reply


def _invalid_prompt_error(prompt: Any) -> GenerationError:
    wanted = 'give text, token ids, or messages such as {"role": "user", "content": "text"}'
    return GenerationError(f"the prompt is {prompt!r:.80}, of type {type(prompt).__name__}: {wanted}")


@functools.lru_cache(READ_IMAGES)
def _read_image(uri: str, tokens: ImageTokenSpec) -> Image:
    """The image of a data URI: one object for all rollouts of a group."""
    return tokens.read(decode_data_uri(uri))


class ChatTokenizer:
    """Encodes prompts and decodes completions. A cache encodes the text of a group's prompt once.

    `context` bounds prompts, in tokens; 0: no bound. Methods that encode raise `ContextFull` for longer prompts, and
    `GenerationError` for text with half of a surrogate pair. `options` are arguments of the chat template and the
    parser of tool calls. Raises `ConfigError` if there is no such parser, or no template for these arguments.
    """

    def __init__(self, tokenizer: Any, context: int = 0, options: ModelConfig = DEFAULTS) -> None:
        self._tokenizer, self._options = tokenizer, options
        if options.chat_template_kwargs and not tokenizer.chat_template:
            shown = f"{dict(options.chat_template_kwargs)!r:.100}"
            raise ConfigError(f"model.chat_template_kwargs = {shown}: the tokenizer has no chat template; leave it out")
        name = options.tool_call_parser or ("hermes" if tokenizer.chat_template else "plain")
        own = {"hermes": hermes, "plain": plain}.get(name)
        self.tool_call_parser: ToolCallParser | VllmToolCallParser = own or VllmToolCallParser(name, tokenizer)
        self.limits = PromptLimits(tokenizer, context)
        self._end_tokens: set[int | None] | None = None
        # Without a reference to itself, whose memory would wait for a full garbage collection.
        encode = functools.partial(ChatTokenizer._encode_text, weakref.proxy(self))
        self.encode_text = functools.lru_cache(maxsize=256)(encode)
        self._templates: dict[str, ChatTokenizer] = {}

    @functools.cached_property
    def image_token_spec(self) -> ImageTokenSpec | None:
        """Placeholder id, pixels of a token's side, and limits of an image's pixels; None for a text-only model.

        The first access imports torch.
        """
        processor = image_processor(self._options.path)  # episode workers should not import torch
        return processor.token_spec if processor else None

    def images(self, prompt: Any) -> tuple[Image, ...]:
        """The images of a prompt, in order. Raises `GenerationError` for images that the model can't read."""
        if not (found := image_parts(prompt)):
            return ()
        if (tokens := self.image_token_spec) is None:
            known = ", ".join(IMAGE_TYPES)
            raise GenerationError(f"the prompt has images, and the model reads none; give one of type {known}")
        try:
            return tuple(_read_image(image_uri(part), tokens) for part in found)
        except (InvalidImages, ValueError) as error:
            raise GenerationError(str(error)) from None

    def _with_placeholders(self, token_ids: array[int], images: Sequence[Image]) -> array[int]:
        """Token ids with a placeholder for each token of the images. Raises `GenerationError`."""
        if self.image_token_spec is None:
            return token_ids
        try:
            return expand(token_ids, images, self.image_token_spec.placeholder)
        except InvalidImages as error:
            raise GenerationError(str(error)) from None

    def __reduce__(self) -> tuple[Callable[..., ChatTokenizer], tuple[Any, int, ModelConfig, ImageTokenSpec | None]]:
        return _with_images, (self._tokenizer, self.limits.context, self._options, self.image_token_spec)

    def with_template(self, arguments: Mapping[str, Any]) -> ChatTokenizer:
        """A copy with further arguments of the chat template; the same one for equal arguments."""
        if not arguments:
            return self
        both = {**self._options.chat_template_kwargs, **arguments}
        key = json.dumps(both, sort_keys=True, default=str)
        if not (found := self._templates.get(key)):
            options = self._options.model_copy(update={"chat_template_kwargs": both})
            found = _with_images(self._tokenizer, self.limits.context, options, self.image_token_spec)
            if len(self._templates) >= MAX_TEMPLATES:
                self._templates.clear()
            self._templates[key] = found
        return found

    def split_calls(self, completion: Completion, tools: Schemas) -> tuple[str, list[Call]]:
        """The text of a reply outside of its tool calls, and the calls."""
        if isinstance(self.tool_call_parser, VllmToolCallParser):
            return self.tool_call_parser.split(self.decode_reply(completion.token_ids), tools)
        return split_hermes(completion.text) if self.tool_call_parser is hermes else (completion.text, [])

    def size(self, prompt: Prompt, tools: Sequence[Any] | None = None) -> int:
        """Characters of text and messages, or the number of token ids. Raises `ContextFull` if it is too large."""
        if not isinstance(prompt, str):
            if isinstance(prompt, Mapping) or not (hasattr(prompt, "__len__") and hasattr(prompt, "__getitem__")):
                raise _invalid_prompt_error(prompt)
            is_ids = not len(prompt) or isinstance(prompt[0], SupportsIndex)
            self.limits.validate_tokens(f"{len(prompt)} {'tokens' if is_ids else 'messages'}", len(prompt))
            if is_ids:
                return len(prompt)
        size = count_characters(prompt) + count_characters(tools or ())
        self.limits.validate_size(size)
        return size

    def encode(self, prompt: Prompt, tools: Sequence[Any] | None = None) -> array[int]:
        """Token ids of a prompt, with the chat template applied where the tokenizer has one; `tools` need one.

        Raises `GenerationError` for an invalid prompt, `ValueError` for tools without a template.
        """
        self.size(prompt, tools)
        if isinstance(prompt, str):
            return self.encode_text(prompt)
        if not len(prompt) or isinstance(prompt[0], SupportsIndex):
            return int32_array(index(token) for token in prompt)  # type: ignore[arg-type]
        images = self.images(prompt)
        if self._tokenizer.chat_template:
            return self._with_placeholders(self._chat(prompt, tools), images)
        if tools:
            raise ValueError("tools need a chat template, and the tokenizer has none")
        try:
            return self.encode_text("\n\n".join(m["content"] for m in prompt))  # type: ignore[index]
        except (LookupError, TypeError):
            raise _invalid_prompt_error(prompt) from None

    def encode_raw(self, prompt: str | Sequence[int]) -> array[int]:
        """Token ids of a text without chat template; given ids are returned. Raises `ValueError` for unknown ids."""
        self.size(prompt)
        token_ids = self._tokenize(prompt) if isinstance(prompt, str) else prompt
        count = len(self._tokenizer)
        if wrong := [i for i in token_ids if not 0 <= i < count]:
            raise ValueError(f"{wrong[0]} is no token's id; there are {count}")
        return int32_array(token_ids)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def encode_continuation(self, text: str, images: Sequence[Image] = ()) -> array[int]:
        """Token ids of text that continues a sequence: no template, no special tokens. `images` are those of the text.

        Raises `GenerationError`.
        """
        return self._with_placeholders(self._tokenize(text, add_special_tokens=False), images)

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> str:
        """The chat template's text for these messages, up to the next reply. Raises `GenerationError`."""
        self.size(messages, tools)
        return str(self._apply_template(messages, tools, tokenize=False))

    def _apply_template(self, messages: Sequence[Message], tools: Sequence[Any] | None, **options: Any) -> Any:
        """The template's text or token ids. Raises `GenerationError` for any exception inside the template."""
        options = {**self._options.chat_template_kwargs, **options}
        options |= {"tools": tools or None, "add_generation_prompt": True}
        try:
            return self._tokenizer.apply_chat_template(list(messages), **options)
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise GenerationError(f"the tokenizer's chat template can't render the messages ({reason})") from None

    def render_after_reply(self, messages: Sequence[Message]) -> str:
        """The chat template's text between a reply and the next one, if these messages are in between."""
        before = [{"role": "user", "content": "."}, {"role": "assistant", "content": REPLY}]
        return self.render([*before, *messages]).partition(REPLY)[2]

    def decode_reply(self, token_ids: Sequence[int]) -> str:
        """The text of a reply with special tokens, but without its end-of-turn token."""
        if self._end_tokens is None:
            self._end_tokens = {self._tokenizer.eos_token_id}
            if self.has_chat_template:
                after = self.encode_continuation(self.render_after_reply([{"role": "user", "content": "."}]))
                self._end_tokens |= {*after[:1]}
        text_ids = token_ids[:-1] if token_ids and token_ids[-1] in self._end_tokens else token_ids
        return self._decode(text_ids, skip_special_tokens=False)

    def decode_token(self, token_id: int) -> str:
        """One token as text, also a special one."""
        return str(self._tokenizer.decode([token_id]))

    def decode(self, token_ids: Sequence[int], stop_strings: Sequence[str] = ()) -> str:
        """Text of a completion, cut before the first stop string; special tokens are left out."""
        text = self._decode(token_ids, skip_special_tokens=True)
        cuts = [at for stop in stop_strings if (at := text.find(stop)) >= 0]
        return text[: min(cuts)] if cuts else text

    def decode_prompt(self, token_ids: Sequence[int]) -> str:
        """Text of a prompt to show, with special tokens, and one placeholder for each image."""
        if self.image_token_spec:
            placeholder = self.image_token_spec.placeholder
            pairs = zip(token_ids, (None, *token_ids), strict=False)
            token_ids = [token for token, before in pairs if token != placeholder or before != placeholder]
        return self._decode(token_ids, skip_special_tokens=False)

    def _decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of token ids, without removing spaces before punctuation."""
        if self._has_decode_batch:
            # The same text without the GIL, which `decode` holds for 1.4 ms with 8,192 tokens.
            return str(self._tokenizer.backend_tokenizer.decode_batch([list(token_ids)], skip_special_tokens)[0])
        options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode(token_ids, **options))

    @functools.cached_property
    def _has_decode_batch(self) -> bool:
        """Whether the `tokenizers` library alone decodes: the tokenizer's class overrides neither of its methods."""
        from transformers import PreTrainedTokenizerFast as Fast

        kind = type(self._tokenizer)
        return issubclass(kind, Fast) and (kind.decode, kind._decode) == (Fast.decode, Fast._decode)

    def _encode_text(self, text: str) -> array[int]:
        chat = self._tokenizer.chat_template
        return self._with_placeholders(
            self._chat([{"role": "user", "content": text}]) if chat else self._tokenize(text), ()
        )

    def _tokenize(self, text: str, **options: Any) -> array[int]:
        """Encode text without a chat template. Raises `ContextFull`, or `GenerationError` for half a surrogate pair."""
        self.limits.validate_text(text)
        if not is_encodable(text):
            raise GenerationError("the prompt holds half of a surrogate pair, which is no text; remove it")
        return int32_array(self._tokenizer.encode(text, **options))

    def _chat(self, messages: Any, tools: Sequence[Any] | None = None) -> array[int]:
        if self.size(messages, tools) > MAX_INLINE:
            self.limits.validate_text(self.render(messages, tools))
        return int32_array(self._apply_template(messages, tools, tokenize=True, return_dict=False))


def _with_images(tokenizer: Any, context: int, options: ModelConfig, images: ImageTokenSpec | None) -> ChatTokenizer:
    """A tokenizer that does not read the model's files again, as in another process."""
    found = ChatTokenizer(tokenizer, context, options)
    found.image_token_spec = images
    return found
