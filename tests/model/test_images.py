"""Packed sequences with images: their log-probabilities and gradients are those of the model's own forward pass."""

from __future__ import annotations

import copy
import importlib.util
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pil

from slipstream.config.schema import ConfigError, LoraConfig, ModelConfig
from slipstream.model.images import (
    ORIENTATION,
    ImageProcessor,
    InvalidImages,
    collapse,
    decode_image,
    expand,
    image_positions,
    image_processor,
    image_starts,
)
from slipstream.model.loading import load_model
from slipstream.model.packing import group_by_prefix, pack
from slipstream.model.policy import PackedPolicy
from slipstream.rollout import Completion, Image, Sample, VersionSpan, build_samples, float32_array, int32_array
from tests.vision import KINDS, png, save_vision_model

pytest.importorskip("torchvision")
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=KINDS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("vision") / request.param
    save_vision_model(found, request.param)
    return found


def processor_of(path: Path) -> ImageProcessor:
    found = image_processor(str(path))
    assert found
    return found


def sample(processor: ImageProcessor, prompt: list[int], images: list[Image], seed: int, tokens: int = 6) -> Sample:
    """0 in the prompt stands for an image."""
    ids = expand([processor.placeholder if i == 0 else i for i in prompt], images, processor.placeholder)
    drawn = torch.randint(2, 30, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
    spans = (VersionSpan(0, 0, tokens),)
    completion = Completion(ids, drawn, float32_array([-1.0] * tokens), spans, "length", images=tuple(images))
    return build_samples([completion], 1.0)[0]


def plain_logprobs(model: Any, processor: ImageProcessor, one: Sample) -> torch.Tensor:
    ids = torch.tensor([one.token_ids])
    inputs = processor.inputs(one.images)
    types = (ids == processor.placeholder).int()
    positions, _ = model.model.get_rope_index(ids, mm_token_type_ids=types, image_grid_thw=inputs.get("image_grid_thw"))
    logits = model(input_ids=ids, position_ids=positions, use_cache=False, **inputs).logits[0, :-1].log_softmax(-1)
    own = logits.gather(-1, torch.tensor(one.token_ids[1:])[:, None])[:, 0]
    return own[[at - 1 for at in one.sampled_positions]]


@pytest.mark.parametrize("rank", [0, 2])
def test_packed_log_probabilities_and_gradients_are_those_of_a_plain_forward_pass(path: Path, rank: int) -> None:
    model = load_model(ModelConfig(path=str(path)), LoraConfig(rank=rank), device=CPU, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and ".lora_" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    plain, processor = copy.deepcopy(model), processor_of(path)
    small, tall, wide = (processor.token_spec.read(png(*size)) for size in ((20, 24), (40, 16), (16, 64)))
    assert tall.rows > tall.columns and wide.rows < wide.columns
    every = [
        sample(processor, [5, 0, 6], [small], 1),
        sample(processor, [5, 0, 6], [small], 2),
        sample(processor, [5, 0, 6], [processor.token_spec.read(png(20, 24, seed=1))], 3),  # of the same size
        sample(processor, [0, 7, 0, 6], [tall, wide], 4, tokens=1),
        sample(processor, [5, 6, 7], [], 5),
    ]
    groups = group_by_prefix(every, 10_000)
    assert groups == [[0, 1], [2], [3], [4]]
    micro = pack(every, groups, CPU, multiple=7, processor=processor)
    base = plain.get_base_model() if rank else plain
    results = PackedPolicy(model)(micro)[0], torch.cat([plain_logprobs(base, processor, every[i]) for i in micro.order])
    torch.testing.assert_close(*results, atol=2e-5, rtol=1e-5)
    for logprobs in results:
        logprobs.square().sum().backward()
    trained = [
        (n, p, q) for (n, p), q in zip(model.named_parameters(), plain.parameters(), strict=True) if p.requires_grad
    ]
    assert trained and not any("visual" in name for name, *_ in trained)
    for _, p, q in trained:
        torch.testing.assert_close(p.grad, q.grad, atol=2e-5 * q.grad.abs().max().item() + 1e-6, rtol=1e-3)


def test_a_placeholder_that_the_policy_samples_is_no_image(path: Path) -> None:
    """Its embedding is that of the token, and has a gradient."""
    processor = processor_of(path)
    one = sample(processor, [5, 0, 6], [processor.token_spec.read(png(20, 24))], 1)
    one.token_ids[one.sampled_positions[2]] = processor.placeholder
    model = load_model(ModelConfig(path=str(path)), LoraConfig(), device=CPU, dtype=torch.float32).eval()
    other = copy.deepcopy(one)
    other.token_ids[one.sampled_positions[2]] = 5
    embedding = model.get_input_embeddings().weight
    found = []
    for each in (one, other):
        with torch.no_grad():
            embedding[5] = embedding[processor.placeholder]  # now both sequences are the same to the model
        logprobs, _ = PackedPolicy(copy.deepcopy(model))(pack([each], [[0]], CPU, processor=processor))
        found.append(logprobs[3:])
    torch.testing.assert_close(*found)
    assert len(found[0]) == 3


def test_placeholders_of_images_are_expanded_and_collapsed() -> None:
    images = [Image(b"", 2, 3), Image(b"", 1, 2)]
    whole = expand([5, 42, 42, 7], images, 42)
    assert whole == int32_array([5, *[42] * 8, 7]) and image_starts(whole, images, 42) == [1, 7]
    assert collapse(whole, images, 42) == [5, 42, 42, 7]
    assert image_positions(whole, images, 42).tolist() == [
        [0, *[1] * 6, 4, 4, 6], [0, 1, 1, 1, 2, 2, 2, 4, 4, 6], [0, 1, 2, 3, 1, 2, 3, 4, 5, 6],
    ]  # fmt: skip
    with pytest.raises(InvalidImages, match="2 images and 1 placeholders"):
        expand([5, 42], images, 42)
    with pytest.raises(InvalidImages, match="other placeholders"):
        collapse([*whole, 42], images, 42)
    with pytest.raises(InvalidImages, match="placeholders of each"):
        image_starts(whole[:8], images, 42)


@pytest.mark.parametrize("read", [lambda data, tokens: tokens.read(data), lambda data, _: decode_image(data)])
def test_a_file_that_is_no_image_is_refused(path: Path, read: Any) -> None:
    with pytest.raises(InvalidImages, match="can't be read"):
        read(b"no image", processor_of(path).token_spec)


def test_a_truncated_file_is_refused_when_it_is_decoded(path: Path) -> None:
    assert processor_of(path).token_spec.read(png(200, 200)[:2000])
    with pytest.raises(InvalidImages, match="can't be read"):
        decode_image(png(200, 200)[:2000])


def test_an_image_of_too_many_pixels_is_refused(path: Path) -> None:
    buffer = io.BytesIO()
    Pil.new("1", (8000, 8000)).save(buffer, "PNG")
    with pytest.raises(InvalidImages, match="8000 x 8000 pixels"):
        processor_of(path).token_spec.read(buffer.getvalue())


def encoded(image: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG", **options)
    return buffer.getvalue()


def test_an_image_is_turned_by_its_orientation(path: Path) -> None:
    """As vLLM turns it."""
    image = Pil.open(io.BytesIO(png(16, 64)))
    exif = Pil.Exif()
    exif[ORIENTATION] = 6
    data = encoded(image, exif=exif)
    assert decode_image(data).size == (16, 64) and image.size == (64, 16)
    found = processor_of(path).token_spec.read(data)
    [[_, rows, columns]] = processor_of(path).inputs([found])["image_grid_thw"].tolist()
    assert (found.rows, found.columns) == (rows // 2, columns // 2) == (8, 2)


def test_transparency_is_white_and_deep_gray_keeps_its_range() -> None:
    clear = Pil.new("RGBA", (2, 1), (0, 0, 0, 0))
    clear.putpixel((0, 0), (255, 0, 0, 255))
    for mode in ("RGBA", "P"):
        decoded = decode_image(encoded(clear.convert(mode)))
        assert [decoded.getpixel((x, 0)) for x in (0, 1)] == [(255, 0, 0), (255, 255, 255)]
    deep = Pil.fromarray(np.array([[0, 0x8000, 0xFFFF]], dtype=np.uint16))
    assert [decode_image(encoded(deep)).getpixel((x, 0))[0] for x in range(3)] == [0, 128, 255]


@pytest.mark.parametrize("size", [(20, 24), (7, 300), (1, 150), (200, 190), (33, 31), (1000, 30), (64, 64), (5, 5)])
def test_an_image_has_the_tokens_that_the_processor_gives_it(path: Path, size: tuple[int, int]) -> None:
    processor = processor_of(path)
    found = processor.token_spec.read(png(*size))
    [[_, rows, columns]] = processor.inputs([found])["image_grid_thw"].tolist()
    assert (found.rows, found.columns) == (rows // 2, columns // 2)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torchvision" else find(name))
    with pytest.raises(ConfigError, match=r"a qwen3_vl reads images, and torchvision is not .*slipstream-rl\[images\]"):
        ImageProcessor(SimpleNamespace(model_type="qwen3_vl"))
