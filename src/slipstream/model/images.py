"""Images in prompts: the placeholder tokens that stand for them, their positions, and the inputs of the vision tower.

For models of `IMAGE_TYPES`. Their tokenizers write one placeholder for an image; the model reads a row of placeholders
for each row of merged patches. `expand` and `collapse` convert between the two. This module imports torch only to
process images, since reward workers import it.
"""

from __future__ import annotations

import importlib.util
import io
from array import array
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.config.schema import ConfigError
from slipstream.errors import UserError
from slipstream.rollout import Image, int32_array

if TYPE_CHECKING:
    from torch import Tensor

IMAGE_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")  # `model_type` of models whose prompts may hold images
CACHED_IMAGES = 16  # processed ones, of up to 24 MB for a megapixel


class InvalidImages(UserError):
    """Images that do not fit the placeholders of a prompt, or that can't be read."""


class ImageProcessor:
    """The image processor and the placeholder of the model that a Hugging Face `config` describes."""

    def __init__(self, config: Any) -> None:
        """Raises `ConfigError` without the libraries for images."""
        if missing := [name for name in ("PIL", "torchvision") if importlib.util.find_spec(name) is None]:
            found = f"a {config.model_type} reads images, and {missing[0]} is not installed"
            raise ConfigError(f"{found}: pip install 'slipstream-rl[images]'")
        from transformers import AutoImageProcessor

        self.placeholder: int = config.image_token_id
        self._processor = AutoImageProcessor.from_pretrained(config.name_or_path, trust_remote_code=False)
        self._process = lru_cache(CACHED_IMAGES)(self._inputs_of_image)

    def read(self, data: bytes) -> Image:
        """The image of an encoded file, of which only the header is read. Raises `InvalidImages`."""
        from PIL import Image as Pil
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

        own = self._processor
        side = own.patch_size * own.merge_size  # pixels of a token
        limits = {"min_pixels": own.size["shortest_edge"], "max_pixels": own.size["longest_edge"]}
        try:
            width, height = Pil.open(io.BytesIO(data)).size
            rows, columns = (pixels // side for pixels in smart_resize(height, width, side, **limits))
        except (OSError, ValueError, Pil.DecompressionBombError) as error:  # or of a side 200 times the other
            raise InvalidImages(f"an image of the prompt can't be read: {' '.join(str(error).split())}") from None
        return Image(data, rows, columns)

    def inputs(self, images: Sequence[Image]) -> dict[str, Tensor]:
        """Arguments of the model's forward method for these images, in the order of their placeholders."""
        import torch

        each = [self._process(image.data) for image in images]
        return {name: torch.cat([inputs[name] for inputs in each]) for name in (each[0] if each else ())}

    def _inputs_of_image(self, data: bytes) -> dict[str, Tensor]:
        found = self._processor(images=[decode_image(data)], return_tensors="pt")
        return {name: found[name] for name in ("pixel_values", "image_grid_thw")}


@cache
def image_processor(path: str) -> ImageProcessor | None:
    """The image processor of the model at `path`, or of the adapter's base; None if the model reads no images."""
    from slipstream.model.inspection import model_config  # imports torch

    config = model_config(path)
    return ImageProcessor(config) if getattr(config, "model_type", "") in IMAGE_TYPES else None


@lru_cache(CACHED_IMAGES)
def decode_image(data: bytes) -> Any:
    """The PIL image of an encoded file, in RGB. Raises `OSError` or `ValueError`."""
    from PIL import Image as Pil

    try:
        return Pil.open(io.BytesIO(data)).convert("RGB")
    except Pil.DecompressionBombError as error:
        raise ValueError(str(error)) from None


def expand(token_ids: Sequence[int], images: Sequence[Image], placeholder: int) -> array[int]:
    """Token ids with one placeholder for each token of an image, from ids with one for each image.

    Raises `InvalidImages` for another number of placeholders than images.
    """
    found, left = int32_array(()), iter(images)
    if (count := sum(token == placeholder for token in token_ids)) != len(images):
        raise InvalidImages(f"the prompt has {len(images)} images and {count} placeholders of images in its text")
    for token in token_ids:
        found.extend([token] * (next(left).tokens if token == placeholder else 1))
    return found


def collapse(token_ids: Sequence[int], images: Sequence[Image], placeholder: int) -> list[int]:
    """The reverse of `expand`. Raises `InvalidImages`."""
    if sum(token == placeholder for token in token_ids) != sum(image.tokens for image in images):
        raise InvalidImages(f"the prompt holds other placeholders than those of its {len(images)} images")
    found, at = list[int](), 0
    for start, image in zip(image_starts(token_ids, images, placeholder), images, strict=True):
        found += [*token_ids[at:start], placeholder]
        at = start + image.tokens
    return [*found, *token_ids[at:]]


def image_starts(token_ids: Sequence[int], images: Sequence[Image], placeholder: int) -> list[int]:
    """Index of the first placeholder of each image, of which `token_ids` hold one for each token of the images.

    Later placeholders are the policy's own tokens. Raises `InvalidImages` if there are fewer.
    """
    starts, at = list[int](), 0
    indices = np.flatnonzero(np.asarray(token_ids) == placeholder)
    for image in images:
        own = indices[at : (at := at + image.tokens)]
        if len(own) < image.tokens or own[-1] - own[0] >= image.tokens:
            raise InvalidImages(f"the prompt does not hold the {image.tokens} placeholders of each of its images")
        starts.append(int(own[0]))
    return starts


def image_positions(token_ids: Sequence[int], images: Sequence[Image], placeholder: int) -> Any:
    """Positions of multimodal rotary embeddings (Wang et al. 2024, arXiv:2409.12191): time, row, column; [3, tokens].

    A text token has three equal positions. The tokens of an image begin at the next position, and differ by their row
    and column; the position after the image is that of its longer side.
    """
    positions, at, position = np.empty((3, len(token_ids)), dtype=np.int64), 0, 0
    for start, image in zip(image_starts(token_ids, images, placeholder), images, strict=True):
        end = start + image.tokens
        positions[:, at:start] = np.arange(position, position := position + start - at)
        positions[0, start:end] = position
        positions[1:, start:end] = position + np.indices((image.rows, image.columns)).reshape(2, -1)
        at, position = end, position + max(image.rows, image.columns)
    positions[:, at:] = np.arange(position, position + len(token_ids) - at)
    return positions
