"""FLOPs of a policy, compared with counts by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    SiglipVisionConfig,
)

from slipstream.model.packing import group_by_prefix, pack
from slipstream.rollout import Completion, Sample, VersionSpan, build_samples
from slipstream.trainers.flops import FlopsModel
from tests.conftest import COMMON, build_model
from tests.trainers.test_trainer import make_trainer

SIZES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 40, "tie_word_embeddings": False,
}  # fmt: skip
ATTENTION = 16 * 32 + 2 * 16 * 16 + 32 * 16  # weights of a layer's: queries, keys and values, output


def test_flops_of_a_dense_model_equal_a_count_by_hand() -> None:
    each = FlopsModel.of(build_model(**SIZES))
    assert each.token == 6 * 2 * (ATTENTION + 3 * 16 * 24)
    assert each.predicted == 6 * 16 * 40
    assert each.pair == 12 * 2 * 4 * 8
    assert each.flops(5, 2, 9) == 5 * each.token + 2 * each.predicted + 9 * each.pair


def test_a_mixture_counts_the_experts_that_a_token_uses() -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    each = FlopsModel.of(build_model(family="qwen3_moe", **SIZES, **experts))
    assert each.token == pytest.approx(6 * 2 * (ATTENTION + 2 * 3 * 16 * 8))  # routers are too small to count


def test_conv1d_layers_count_as_linear_layers() -> None:
    """GPT-2's linear layers are Conv1D modules."""
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=4, n_inner=24))
    each = FlopsModel.of(gpt2)
    assert each.token == 6 * 2 * (4 * 16 * 16 + 2 * 16 * 24) and each.pair == 12 * 2 * 16


def test_only_the_text_part_of_a_vision_model_counts() -> None:
    text = Gemma3TextConfig(**(COMMON | {"sliding_window": 7}))
    vision = SiglipVisionConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    model = Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=vision))
    text_alone = FlopsModel.of(build_model(family="gemma3"))
    assert FlopsModel.of(model) == text_alone


def test_frozen_weights_count_without_weight_gradients() -> None:
    model = build_model(**SIZES)
    trained = FlopsModel.of(model)
    frozen = FlopsModel.of(model.requires_grad_(False))
    assert frozen.token == trained.token * 4 / 6 and frozen.predicted == trained.predicted * 4 / 6
    assert frozen.pair == trained.pair


def sample_of(prompt: int, drawn: int) -> Sample:
    spans = (VersionSpan(0, 0, drawn),)
    (sample,) = build_samples([Completion((5,) * prompt, (6,) * drawn, (-1.0,) * drawn, spans, "stop")])
    return sample


@pytest.mark.parametrize("share", [True, False])
def test_predicted_cost_of_a_prefix_group_equals_its_counted_flops(tiny: Path, share: bool) -> None:
    """With and without shared prompts, and for a completion of one token, which adds no token to the pass."""
    meter = make_trainer(tiny)._meter
    samples = [sample_of(*sizes) for sizes in ((4, 3), (4, 1), (4, 6), (2, 5), (7, 1))]
    prefix_groups = group_by_prefix(samples, 100, share=share)
    assert len(prefix_groups) == (3 if share else 5)
    costs = [meter.cost(samples, members) for members in prefix_groups]
    for members, cost in zip(prefix_groups, costs, strict=True):
        micro = pack(samples, [members], torch.device("cpu"))
        counted = meter._each.flops(len(micro.input_ids), len(micro.predicts), micro.segments.pairs)
        assert cost == counted
    if share:  # a prompt of 4, and 2, 0 and 5 tokens behind it
        assert costs[0] == round(meter._each.flops(11, 10, 10 + (2 * 4 + 3) + (5 * 4 + 15)))
