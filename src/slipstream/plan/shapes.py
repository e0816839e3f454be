"""The shape of a model: what its memory, its traffic and its operations follow from."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slipstream.config.schema import ConfigError

BF16 = 2
SIZE = re.compile(r"^(\d+(?:\.\d+)?)\s*([bm])$", re.I)


@dataclass(frozen=True)
class Shape:
    """A decoder. `experts` is 1 for a dense model; `active` experts take each token, `expert_intermediate` wide."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool = False
    experts: int = 1
    active: int = 1
    expert_intermediate: int = 0
    context: int = 32768
    matrix_bytes: int = BF16  # of a weight in the layers' matrices, as it is served

    @property
    def attention_parameters(self) -> int:
        """Of the four projections of a layer."""
        return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)

    @property
    def expert_parameters(self) -> int:
        """Of the gated MLP of one expert, or of the only one."""
        return 3 * self.hidden * (self.expert_intermediate or self.intermediate)

    @property
    def embedding(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        layer = self.attention_parameters + self.experts * self.expert_parameters + 2 * self.hidden
        router = self.hidden * self.experts if self.experts > 1 else 0
        return self.layers * (layer + router) + self.embedding * (1 if self.tied else 2)

    @property
    def matrix_parameters(self) -> int:
        """Of the layers, used by one token: without embeddings and head."""
        return self.layers * (self.attention_parameters + self.active * self.expert_parameters)

    @property
    def weight_bytes(self) -> int:
        matrices = self.layers * (self.attention_parameters + self.experts * self.expert_parameters)
        return BF16 * self.parameters - (BF16 - self.matrix_bytes) * matrices

    @property
    def kv_bytes(self) -> int:
        """Of one token in all layers, in bfloat16."""
        return 2 * BF16 * self.layers * self.kv_heads * self.head_dim

    def decode_weight_bytes(self, sequences: float) -> float:
        """Bytes of weights that a decode step of `sequences` reads on all tensor-parallel GPUs together.

        Counts the expected number of distinct experts, and neither an untied input embedding nor keys and values.
        """
        touched: float = self.experts * (1 - (1 - self.active / self.experts) ** max(sequences, 1))
        unread = self.matrix_bytes * (self.experts - touched) * self.expert_parameters * self.layers
        return self.weight_bytes - unread - (0 if self.tied else BF16 * self.embedding)

    def forward_operations(self, tokens: float, context: float, predicted: float | None = None) -> float:
        """2 a matrix weight and token, 4 a head element and attended key (PaLM, arXiv:2204.02311, appendix B)."""
        head = self.embedding * (tokens if predicted is None else predicted)
        attended = 2 * self.layers * self.heads * self.head_dim * context
        return 2 * (tokens * (self.matrix_parameters + attended) + head)

    def lora_parameters(self, rank: int) -> int:
        """Of adapters on all linear layers outside of experts."""
        return rank * self.adapter_width(1)

    def adapter_width(self, tp: int) -> int:
        """Inputs and outputs of all linear layers outside of experts, as adapters have them on each of `tp` GPUs.

        vLLM shards the other side of each adapter: the outputs of queries, keys, values, gate and up projection, and
        the inputs of the output and down projections.
        """
        whole, shared = 4 * self.hidden, 2 * self.head_dim * (self.heads + self.kv_heads)
        if self.experts == 1:
            whole, shared = whole + 3 * self.hidden, shared + 3 * self.intermediate
        return self.layers * (whole + shared // tp)


def _shape(name: str, layers: int, hidden: int, mlp: int, heads: int, kv: int, vocabulary: int = 151936,
           head_dim: int = 128, tied: bool = False, context: int = 40960, **experts: int) -> Shape:  # fmt: skip
    return Shape(name, layers, hidden, mlp, heads, kv, head_dim, vocabulary, tied, context=context, **experts)


# From `config.json` on the Hub: Qwen3 (0.6B, 1.7B, 4B, 8B, 14B, 30B-A3B, 235B-A22B), Qwen2.5 (0.5B, 1.5B, 3B, 7B, 32B,
# 72B), Llama 3.1 and 3.3 (70B, 405B), Gemma 3 (270M).
SHAPES = {shape.name: shape for shape in (
    _shape("270M", 18, 640, 2048, 4, 1, 262144, 256, True, 32768),
    _shape("0.5B", 24, 896, 4864, 14, 2, head_dim=64, tied=True, context=32768),
    _shape("0.6B", 28, 1024, 3072, 16, 8, tied=True), _shape("1.5B", 28, 1536, 8960, 12, 2, tied=True),
    _shape("1.7B", 28, 2048, 6144, 16, 8, tied=True), _shape("3B", 36, 2048, 11008, 16, 2, tied=True),
    _shape("4B", 36, 2560, 9728, 32, 8, tied=True), _shape("7B", 28, 3584, 18944, 28, 4, 152064, context=131072),
    _shape("8B", 36, 4096, 12288, 32, 8), _shape("14B", 40, 5120, 17408, 40, 8),
    _shape("32B", 64, 5120, 27648, 40, 8, 152064, context=131072),
    _shape("70B", 80, 8192, 28672, 64, 8, 128256, context=131072),
    _shape("72B", 80, 8192, 29568, 64, 8, 152064, context=131072),
    _shape("405B", 126, 16384, 53248, 128, 8, 128256, context=131072),
    _shape("30B-A3B", 48, 2048, 6144, 32, 4, experts=128, active=8, expert_intermediate=768),
    _shape("235B-A22B", 94, 4096, 12288, 64, 4, experts=128, active=8, expert_intermediate=1536),
)}  # fmt: skip
BY_NAME = {name.lower(): shape for name, shape in SHAPES.items()}
STEP = 128  # of hidden sizes


def find_shape(model: str, option: str = "--model") -> Shape:
    """The shape of a size such as "7B", of a model directory, or of a Hub name, which `option` gave.

    Raises `ConfigError`.
    """
    if model.lower() in BY_NAME:
        return BY_NAME[model.lower()]
    if found := SIZE.match(model):
        return scaled_shape(model, float(found[1]) * (1e9 if found[2].lower() == "b" else 1e6), option)
    folder = Path(model)
    if folder.is_dir():
        return read_shape(folder / "config.json", model, option)
    from slipstream.model.paths import check_path

    if "/" not in model:
        raise ConfigError(
            f"{option} {model}: no directory, no Hub name (owner/name), and no size such as 7B; known sizes are "
            f"{', '.join(SHAPES)}, and others are scaled from them"
        )
    check_path(model, option)
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return read_shape(Path(hf_hub_download(model, "config.json")), model, option)
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        found_error = str(error).partition("\n")[0]
        raise ConfigError(f"{option} {model}: its config.json can't be fetched ({found_error}); give a size") from None


def scaled_shape(name: str, parameters: float, option: str) -> Shape:
    """The known dense shape nearest in size, with depth and width scaled by the cube root of the ratio."""
    if not 1e6 <= parameters <= 1e13:
        raise ConfigError(f"{option} {name}: sizes from 1M to 10000B can be scaled")
    dense = [shape for shape in SHAPES.values() if shape.experts == 1]
    near = min(dense, key=lambda shape: abs(shape.parameters / parameters - 1))
    found, ratio = near, parameters / near.parameters
    for _ in range(8):  # embeddings grow by the width alone
        side = ratio ** (1 / 3)
        heads = max(near.kv_heads, round(near.heads * side / near.kv_heads) * near.kv_heads)
        hidden, mlp = (max(STEP, round(size * side / STEP) * STEP) for size in (near.hidden, near.intermediate))
        layers = max(1, round(near.layers * side))
        found = replace(near, name=name, layers=layers, hidden=hidden, intermediate=mlp, heads=heads)
        ratio *= parameters / found.parameters
    return found


def read_shape(path: Path, name: str, option: str) -> Shape:
    """The shape that a Hugging Face `config.json` describes. Raises `ConfigError`."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return from_config(data.get("text_config") or data, name)
    except FileNotFoundError:
        raise ConfigError(
            f"{option} {name}: it has no config.json; give a directory that a model was saved to"
        ) from None
    except (OSError, ValueError, TypeError, AttributeError, ArithmeticError) as error:
        raise ConfigError(f"{option} {name}: config.json can't be read ({error}); save the model again") from None
    except KeyError as error:
        raise ConfigError(f"{option} {name}: config.json has no {error.args[0]}; give a size such as 7B") from None


def from_config(data: Mapping[str, Any], name: str) -> Shape:
    """The shape of a decoder's configuration. Raises `KeyError`, `TypeError` or `ValueError` for bad values."""
    heads, hidden = int(data["num_attention_heads"]), int(data["hidden_size"])
    counts = (data.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
    experts = int(next((count for count in counts if count), 1))
    width = int(data["intermediate_size"])
    expert_width = int(data.get("moe_intermediate_size") or (width if experts > 1 else 0))  # Mixtral has one width
    shape = Shape(
        name, int(data["num_hidden_layers"]), hidden, width, heads,
        int(data.get("num_key_value_heads") or heads), int(data.get("head_dim") or hidden // heads),
        int(data["vocab_size"]), bool(data.get("tie_word_embeddings", data.get("model_type", "").startswith("gemma"))),
        experts, int(data.get("num_experts_per_tok") or 1), expert_width,
        int(data.get("max_position_embeddings") or 32768),
    )  # fmt: skip
    sizes = {key: value for key, value in vars(shape).items() if key not in ("name", "tied", "expert_intermediate")}
    if wrong := [key for key, value in sizes.items() if value < 1]:
        raise ValueError(f"{wrong[0]} is {sizes[wrong[0]]}, and must be 1 or more")
    return shape
