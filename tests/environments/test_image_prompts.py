"""Prompts with images reach the generator as the model's own processor encodes them."""

from __future__ import annotations

import asyncio
import io
import json
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as Pil

from slipstream.config.schema import ModelConfig
from slipstream.environments.base import Policy, Task
from slipstream.environments.chat_tokenizer import ChatTokenizer
from slipstream.environments.images import content_text, decode_data_uri, image_parts, image_uri
from slipstream.environments.openai_api import ChatRequest, parse_request
from slipstream.environments.prompts import find_overlong_prompts
from slipstream.generators.base import GenerationError
from slipstream.model.tokenizer import load_tokenizer
from slipstream.rollout import Completion, Sampling, VersionSpan, build_samples
from tests.conftest import build_tokenizer
from tests.vision import TEMPLATE, png, question, save_vision_model

pytest.importorskip("torchvision")
SIZES = ((20, 24), (40, 16), (16, 64), (7, 300), (200, 190))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    found = tmp_path_factory.mktemp("vision") / "model"
    save_vision_model(found, "Qwen2_5_VL")
    return str(found)


@pytest.fixture
def chat(path: str) -> ChatTokenizer:
    return ChatTokenizer(load_tokenizer(path), 4096, ModelConfig(path=path))


class Generator:
    """Answers "3" and keeps what was asked."""

    version = 0

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], Sampling]] = []

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        self.asked.append((list(prompt_ids), sampling))
        answer = [build_tokenizer().convert_tokens_to_ids("3"), 1]
        return Completion(prompt_ids, answer, [-1.0] * 2, (VersionSpan(0, 0, 2),), "stop")  # type: ignore[arg-type]

    async def close(self) -> None: ...


def by_processor(path: str, messages: Sequence[Any]) -> list[int]:
    """The token ids of the processor that transformers makes of the same files."""
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(path)
    text = processor.apply_chat_template(list(messages), add_generation_prompt=True)
    images = [Pil.open(io.BytesIO(decode_data_uri(image_uri(part)))) for part in image_parts(messages)]
    found: list[int] = processor(text=[text], images=images).input_ids[0]
    return list(found)


@pytest.mark.parametrize("sizes", [SIZES[:1], SIZES[1:3], SIZES[3:], ()])
def test_a_prompt_has_the_tokens_of_the_models_processor(path: str, chat: ChatTokenizer, sizes: Any) -> None:
    messages = question(*(png(*size) for size in sizes))
    generator = Generator()
    policy = Policy(generator, chat, Sampling(), "0")
    completion = asyncio.run(policy.sample(messages))
    [(prompt_ids, sampling)] = generator.asked
    assert prompt_ids == (by_processor(path, messages) if sizes else list(chat.encode(messages)))
    assert [image.data for image in sampling.images] == [png(*size) for size in sizes]
    assert policy.recorded[0].images == completion.images == sampling.images
    assert chat.image_token_spec is not None
    assert prompt_ids.count(chat.image_token_spec.placeholder) == sum(image.tokens for image in sampling.images)


def test_a_conversation_adds_images(path: str, chat: ChatTokenizer) -> None:
    generator = Generator()
    policy = Policy(generator, chat, Sampling(), "0")

    async def main() -> None:
        talk = policy.conversation("be brief")
        await talk.ask(question(png(20, 24))[0]["content"])
        await talk.ask("and")
        await talk.ask(question(png(40, 16), png(16, 64))[0]["content"])
        (first, _), (second, _), (third, _) = generator.asked
        assert second[: len(first)] == first and third[: len(second)] == second
        assert [len(sampling.images) for _, sampling in generator.asked] == [1, 1, 3]
        assert third == by_processor(path, talk.messages[:-1])
        [sample] = build_samples(talk.completions)
        assert len(sample.images) == 3

    asyncio.run(main())


def test_a_chat_request_has_its_images(chat: ChatTokenizer) -> None:
    messages = question(png(20, 24))
    url = messages[0]["content"][0]["image"]
    messages[0]["content"][0] = {"type": "image_url", "image_url": {"url": url}}
    _, (token_ids, images) = parse_request(ChatRequest, json.dumps({"messages": messages}).encode(), chat)
    assert token_ids == chat.encode(question(png(20, 24))) and [image.data for image in images] == [png(20, 24)]


@pytest.mark.parametrize("ask", [lambda chat, text: chat.encode(text),
                                 lambda chat, text: chat.encode([{"role": "user", "content": text}]),
                                 lambda chat, text: chat.encode(question(png(20, 24), text=text)),
                                 lambda chat, text: chat.encode_continuation(text)])  # fmt: skip
def test_a_placeholder_in_text_is_refused(chat: ChatTokenizer, ask: Any) -> None:
    with pytest.raises(GenerationError, match=r"the prompt has \d images and \d placeholders of images in its text"):
        ask(chat, "1 <|image_pad|> 2")


@pytest.mark.parametrize("data", [b"no image", b""])
def test_a_file_that_is_no_image_is_refused(chat: ChatTokenizer, data: bytes) -> None:
    with pytest.raises(GenerationError, match="an image of the prompt can't be read"):
        chat.encode(question(data))


def test_an_image_that_is_too_long_for_the_processor_is_refused(chat: ChatTokenizer) -> None:
    with pytest.raises(GenerationError, match="300 x 1 pixels, a ratio above 200"):
        chat.encode(question(png(1, 300)))


def test_a_model_that_reads_no_images_refuses_them(tiny: Path) -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = TEMPLATE
    chat = ChatTokenizer(tokenizer, 0, ModelConfig(path=str(tiny)))
    with pytest.raises(GenerationError, match="the prompt has images, and the model reads none; give one of type"):
        chat.encode(question(png(20, 24)))


def test_a_prompt_that_its_images_make_too_long_is_found(path: str) -> None:
    chat = ChatTokenizer(load_tokenizer(path), 24, ModelConfig(path=path))
    tasks = [Task(str(i), tuple(question(*(png(*size) for size in sizes), text="1"))) for i, sizes in
             enumerate([SIZES[:1], SIZES[2:3]])]  # fmt: skip
    lengths = [len(chat.encode(task.prompt)) for task in tasks]
    assert lengths[0] < 24 <= lengths[1]
    assert find_overlong_prompts(tasks, chat, 24) == {1: f"{lengths[1]} tokens"}


def test_a_data_uri_that_is_none_is_refused(chat: ChatTokenizer) -> None:
    messages = question(png(20, 24))
    for wrong in ({"type": "image"}, {"type": "image", "image": "/etc/passwd"}, {"type": "image", "image": 3},
                  {"type": "image", "image": "data:image/png;base64,???"}):  # fmt: skip
        messages[0]["content"][0] = wrong
        with pytest.raises(GenerationError, match="data URI"):
            chat.encode(messages)


def test_a_shown_prompt_has_one_placeholder_for_each_image(chat: ChatTokenizer) -> None:
    shown = chat.decode_prompt(chat.encode(question(png(40, 16), png(20, 24), text="1 + 2 =")))
    mark = "<|vision_start|><|image_pad|><|vision_end|>"
    assert shown == f"u<pad> {mark}{mark}1 + 2 =<eos>a<pad> "  # the tokenizer has no colon


def test_a_recorded_question_has_no_data_of_images() -> None:
    assert content_text(question(png(20, 24), text="how many?")[0]["content"]) == "[image] how many?"
    assert content_text("how many?") == "how many?" and content_text(None) == ""


@pytest.mark.parametrize("images", [False, True])
def test_episode_workers_do_not_import_torch(images: bool, path: str, tiny: Path) -> None:
    """Its import takes seconds and 300 MB in each of them."""
    chat = ChatTokenizer(
        load_tokenizer(path if images else str(tiny)), 99, ModelConfig(path=path if images else str(tiny))
    )
    asked = question(png(20, 24)) if images else "1 + 2 ="
    script = (
        "import pickle, sys\nchat, asked = pickle.load(sys.stdin.buffer)\n"
        "ids, images = chat.encode(asked), chat.images(asked)\nprint(len(ids), len(images), 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], input=pickle.dumps((chat, asked)), capture_output=True, check=True
    )
    assert done.stdout.split() == [str(len(chat.encode(asked))).encode(), b"1" if images else b"0", b"False"]
