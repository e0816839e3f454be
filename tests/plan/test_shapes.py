"""Shapes of models against the sizes that their publishers give."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.config.schema import ConfigError
from slipstream.plan.shapes import find_shape, from_config


@pytest.mark.parametrize(
    ("name", "billions"),
    [("0.6B", 0.596), ("7B", 7.616), ("8B", 8.191), ("32B", 32.764), ("70B", 70.554), ("30B-A3B", 30.532)],
)
def test_known_shapes_have_the_published_number_of_parameters(name: str, billions: float) -> None:
    assert find_shape(name).parameters / 1e9 == pytest.approx(billions, rel=1e-3)


@pytest.mark.parametrize("size", ["120M", "1B", "13B", "100B", "1000B"])
def test_other_sizes_are_scaled(size: str) -> None:
    shape = find_shape(size)
    assert shape.parameters == pytest.approx(float(size[:-1]) * {"M": 1e6, "B": 1e9}[size[-1]], rel=0.15)
    assert shape.heads % shape.kv_heads == 0


def test_a_mixture_multiplies_by_its_active_experts_only() -> None:
    mixture = find_shape("30B-A3B")
    assert mixture.matrix_parameters + mixture.embedding == pytest.approx(3.0e9, rel=0.05)
    one, many = (mixture.decode_weight_bytes(sequences) / mixture.weight_bytes for sequences in (1, 64))
    assert one < 0.15 and many > 0.9


def test_config_json_of_a_directory(tmp_path: Path) -> None:
    text = {
        "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 100, "tie_word_embeddings": True, "max_position_embeddings": 512,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text}))
    shape = find_shape(str(tmp_path))
    assert (shape.head_dim, shape.context, shape.kv_bytes) == (16, 512, 2 * 2 * 2 * 2 * 16)
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64}))
    with pytest.raises(ConfigError, match="has no num_attention_heads"):
        find_shape(str(tmp_path))
    for heads in (0, None, -4, "many"):
        (tmp_path / "config.json").write_text(json.dumps(text | {"num_attention_heads": heads}))
        with pytest.raises(ConfigError, match=r"config\.json can't be read"):
            find_shape(str(tmp_path))


def test_a_mixture_of_one_width_has_experts_of_that_width() -> None:
    mixtral = {
        "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2,
    }  # fmt: skip
    found = from_config(mixtral, "8x7B")
    assert found.expert_intermediate == 14336
    assert found.parameters == pytest.approx(46.7e9, rel=0.01)
