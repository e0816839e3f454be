"""Tiny models that read images, with processor and tokenizer, and images for them."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

from slipstream.model.images import ORIENTATION
from tests.conftest import build_tokenizer

PATCH = 4  # pixels; a token is of two by two patches
SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}: {% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{% if p['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}<eos>{% endfor %}"
    "{% if add_generation_prompt %}a: {% endif %}"
)
COMMON: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 256, "eos_token_id": 1, "pad_token_id": 0,
    "bos_token_id": None, "tie_word_embeddings": True,
}  # fmt: skip
TOWER: dict[str, Any] = {"hidden_size": 32, "num_heads": 2, "patch_size": PATCH, "spatial_merge_size": 2}
ROPE = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # class prefix: changes of the text part, and vision tower
    "Qwen2VL": ({}, {"depth": 2, "embed_dim": 32, "mlp_ratio": 2} | TOWER | {"hidden_size": 64}),
    "Qwen2_5_VL": ({}, TOWER | {
        "depth": 2, "intermediate_size": 48, "out_hidden_size": 64, "window_size": 16, "fullatt_block_indexes": [1],
    }),
    "Qwen3VL": ({"head_dim": 32, "rope_parameters": ROPE | {"mrope_interleaved": True}}, TOWER | {
        "depth": 3, "intermediate_size": 48, "out_hidden_size": 64, "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    }),
}  # fmt: skip


def tokenizer() -> Any:
    found = build_tokenizer()
    found.add_special_tokens({"additional_special_tokens": [*SPECIAL]})
    found.chat_template = TEMPLATE
    return found


def save_vision_model(path: Path, kind: str, scale: float = 4.0) -> None:
    """A model of the transformers classes `kind`, with random matrices times `scale`."""
    tokens = tokenizer()
    start, end, image, video = tokens.convert_tokens_to_ids([*SPECIAL])
    changes, tower = KINDS[kind]
    model_class = getattr(transformers, f"{kind}ForConditionalGeneration")
    config = model_class.config_class(
        vision_config=tower, text_config={"vocab_size": len(tokens), "rope_parameters": ROPE} | COMMON | changes,
        vision_start_token_id=start, vision_end_token_id=end, image_token_id=image, video_token_id=video,
        tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
    model.save_pretrained(path)
    shared = {"patch_size": PATCH, "temporal_patch_size": 2, "merge_size": 2}
    size = {"shortest_edge": 64, "longest_edge": 1024}
    images = transformers.Qwen2VLImageProcessor(size=size, **shared)
    processor_class = transformers.Qwen3VLProcessor if kind == "Qwen3VL" else transformers.Qwen2VLProcessor
    videos = transformers.Qwen3VLVideoProcessor if kind == "Qwen3VL" else transformers.Qwen2VLVideoProcessor
    processor_class(images, tokens, videos(**shared), chat_template=TEMPLATE).save_pretrained(path)
    tokens.save_pretrained(path)


def png(height: int, width: int, seed: int = 0, orientation: int = 1) -> bytes:
    """An encoded image of random pixels, with this orientation in its EXIF data."""
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    Image.fromarray(pixels).save(buffer, "PNG", **({"exif": exif} if orientation > 1 else {}))
    return buffer.getvalue()


def question(*images: bytes, text: str = "1 + 2 =") -> list[dict[str, Any]]:
    """Chat messages with these images before a text."""
    uris = [f"data:image/png;base64,{base64.b64encode(image).decode()}" for image in images]
    parts = [{"type": "image", "image": uri} for uri in uris]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
