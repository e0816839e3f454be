"""The arithmetic of a policy, against what is counted by hand."""

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

from slipstream.packed.packing import bundle, pack
from slipstream.rollout import Completion, Sample, VersionSpan, samples_of
from slipstream.trainers.speed import Operations
from tests.conftest import COMMON, build_model
from tests.trainers.test_trainer import make_trainer

SIZES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 40, "tie_word_embeddings": False,
}  # fmt: skip
ATTENTION = 16 * 32 + 2 * 16 * 16 + 32 * 16  # weights of a layer's: queries, keys and values, output


def test_a_dense_model_is_counted_as_by_hand() -> None:
    each = Operations.of(build_model(**SIZES))
    assert each.token == 6 * 2 * (ATTENTION + 3 * 16 * 24)
    assert each.predicted == 6 * 16 * 40
    assert each.pair == 12 * 2 * 4 * 8
    assert each.count(5, 2, 9) == 5 * each.token + 2 * each.predicted + 9 * each.pair


def test_a_mixture_counts_the_experts_that_a_token_uses() -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    each = Operations.of(build_model(family="qwen3_moe", **SIZES, **experts))
    assert each.token == pytest.approx(6 * 2 * (ATTENTION + 2 * 3 * 16 * 8))  # routers are too small to count


def test_linear_layers_count_by_any_name() -> None:
    """GPT-2 has a class of its own for them."""
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=4, n_inner=24))
    each = Operations.of(gpt2)
    assert each.token == 6 * 2 * (4 * 16 * 16 + 2 * 16 * 24) and each.pair == 12 * 2 * 16


def test_of_a_model_that_sees_the_text_counts() -> None:
    text = Gemma3TextConfig(**(COMMON | {"sliding_window": 7}))
    vision = SiglipVisionConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    model = Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=vision))
    text_alone = Operations.of(build_model(family="gemma3"))
    assert Operations.of(model) == text_alone


def test_frozen_weights_need_no_gradient_of_their_own() -> None:
    model = build_model(**SIZES)
    trained = Operations.of(model)
    frozen = Operations.of(model.requires_grad_(False))
    assert frozen.token == trained.token * 4 / 6 and frozen.predicted == trained.predicted * 4 / 6
    assert frozen.pair == trained.pair


def sample_of(prompt: int, drawn: int) -> Sample:
    spans = (VersionSpan(0, 0, drawn),)
    (sample,) = samples_of([Completion((5,) * prompt, (6,) * drawn, (-1.0,) * drawn, spans, "stop")])
    return sample


@pytest.mark.parametrize("share", [True, False])
def test_what_a_bundle_will_cost_is_what_its_passes_count(tiny: Path, share: bool) -> None:
    """With one copy of the prompt for many, and alone; a completion of one token has none of its own in the pass."""
    meter = make_trainer(tiny)._meter
    samples = [sample_of(*sizes) for sizes in ((4, 3), (4, 1), (4, 6), (2, 5), (7, 1))]
    bundles = bundle(samples, 100, share=share)
    assert len(bundles) == (3 if share else 5)
    costs = [meter.cost(samples, members) for members in bundles]
    for members, cost in zip(bundles, costs, strict=True):
        micro = pack(samples, [members], torch.device("cpu"))
        counted = meter._each.count(len(micro.input_ids), len(micro.predicts), micro.segments.pairs)
        assert cost == counted
    if share:  # a prompt of 4, and 2, 0 and 5 tokens behind it
        assert costs[0] == round(meter._each.count(11, 10, 10 + (2 * 4 + 3) + (5 * 4 + 15)))
