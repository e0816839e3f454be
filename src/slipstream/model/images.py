"""Images in prompts: the placeholder tokens that stand for them, their positions, and the inputs of the vision tower.

For models of `IMAGE_TYPES`. Their tokenizers write one placeholder for an image; the model reads a row of placeholders
for each row of merged patches. `expand` and `collapse` convert between the two. Only `ImageProcessor` and its function
import torch: reward and episode workers import this module, and use `ImageTokenSpec`.
"""

from __future__ import annotations

import importlib.util
import io
import math
from array import array
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from slipstream.config.schema import ConfigError
from slipstream.errors import UserError
from slipstream.rollout import Image, int32_array

if TYPE_CHECKING:
    from torch import Tensor

IMAGE_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")  # `model_type` of models whose prompts may hold images
DECODED_IMAGES = 4  # kept, for the rollouts of a group: a megapixel takes 3 MB, and 24 MB once it is processed
MAX_PIXELS = 50_000_000
MAX_RATIO = 200  # of the longer side to the other
ORIENTATION, FIRST_TURNED = 0x0112, 5  # the EXIF tag, and the first of its values that swap height and width


class InvalidImages(UserError):
    """Images that do not fit the placeholders of a prompt, or that can't be read."""


def reads_images(config: Any) -> bool:
    """Whether prompts for the model of a Hugging Face `config` may hold images; false for None."""
    return getattr(config, "model_type", "") in IMAGE_TYPES


class ImageTokenSpec(NamedTuple):
    """A model's placeholder id, the pixels of a token's side, and the limits of an image's pixels after resizing."""

    placeholder: int
    side: int
    min_pixels: int
    max_pixels: int

    def read(self, data: bytes) -> Image:
        """The image of an encoded file, of which only the header is read. Raises `InvalidImages`."""
        from PIL import Image as Pil

        try:
            found = Pil.open(io.BytesIO(data))
            width, height = found.size
            turned = _orientation(found) >= FIRST_TURNED
        except Exception as error:  # Pillow raises anything for damaged files
            raise _unreadable(error) from None
        if width * height > MAX_PIXELS:
            raise InvalidImages(f"an image of the prompt has {width} x {height} pixels; {MAX_PIXELS} are the limit")
        rows, columns = self._resize(*((width, height) if turned else (height, width)))
        return Image(data, rows, columns)

    def _resize(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tokens: `smart_resize` of the processor of Qwen2-VL (Wang et al. 2024, arXiv:2409.12191).

        Both sides become multiples of a token's, and the area is within the limits with about the same aspect ratio.
        """
        if max(height, width) > MAX_RATIO * min(height, width):
            raise InvalidImages(f"an image of the prompt has {width} x {height} pixels, a ratio above {MAX_RATIO}")
        sides = [round(pixels / self.side) for pixels in (height, width)]
        if sides[0] * sides[1] * self.side**2 > self.max_pixels:
            scale = math.sqrt(height * width / self.max_pixels)
            sides = [max(1, math.floor(pixels / scale / self.side)) for pixels in (height, width)]
        elif sides[0] * sides[1] * self.side**2 < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (height * width))
            sides = [math.ceil(pixels * scale / self.side) for pixels in (height, width)]
        return sides[0], sides[1]


class ImageProcessor:
    """The image processor and the `tokens` of the model that a Hugging Face `config` describes."""

    def __init__(self, config: Any) -> None:
        """Raises `ConfigError` without the libraries for images."""
        if missing := [name for name in ("PIL", "torchvision") if importlib.util.find_spec(name) is None]:
            found = f"a {config.model_type} reads images, and {missing[0]} is not installed"
            raise ConfigError(f"{found}: pip install 'slipstream-rl[images]'")
        from transformers import AutoImageProcessor

        own = self._processor = AutoImageProcessor.from_pretrained(config.name_or_path, trust_remote_code=False)
        limits = own.size["shortest_edge"], own.size["longest_edge"]
        self.token_spec = ImageTokenSpec(config.image_token_id, own.patch_size * own.merge_size, *limits)
        self._process = lru_cache(DECODED_IMAGES)(self._inputs_of_image)

    @property
    def placeholder(self) -> int:
        return self.token_spec.placeholder

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
    return ImageProcessor(config) if reads_images(config) else None


@lru_cache(DECODED_IMAGES)
def decode_image(data: bytes) -> Any:
    """The PIL image of an encoded file as cameras and browsers show it: turned by its EXIF orientation, transparency on
    white, 16-bit gray in 8 bits. Raises `InvalidImages`."""
    from PIL import Image as Pil
    from PIL import ImageOps

    try:
        image: Any = Pil.open(io.BytesIO(data))
        image = ImageOps.exif_transpose(image) if _orientation(image) > 1 else image
        if image.mode.startswith("I"):
            image = image.point(lambda value: value / 256).convert("L")
        if image.has_transparency_data:
            white = Pil.new("RGBA", image.size, "white")
            image = Pil.alpha_composite(white, image.convert("RGBA"))
        decoded = image.convert("RGB")
        decoded.info.clear()  # vLLM would turn it again
        return decoded
    except Exception as error:  # Pillow raises anything for damaged files
        raise _unreadable(error) from None


def _orientation(image: Any) -> int:
    """The EXIF orientation in the header of an image; 1 is upright. A PNG may have it behind the pixels, too."""
    in_header = image.format != "PNG" or "exif" in image.info
    return int(image.getexif().get(ORIENTATION, 1)) if in_header else 1


def _unreadable(error: Exception) -> InvalidImages:
    reason = " ".join(str(error).split()) or type(error).__name__
    return InvalidImages(f"an image of the prompt can't be read: {reason}")


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
