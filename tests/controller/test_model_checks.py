"""Checks of models that need options or models that the corpus of user errors lacks."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from slipstream.config.loading import load_config
from slipstream.config.schema import ConfigError
from slipstream.controller.setup import validate_models
from tests.conftest import save_model


def validate(path: Path, *flags: str) -> None:
    options = [f"--model.path={path}", "--environment.name=addition", "--sampling.max_tokens=64"]
    validate_models(load_config(None, [*options, *flags]))


@pytest.mark.parametrize(("size", "divides"), [(1, True), (2, True), (4, True), (3, False), (8, False)])
def test_ranks_of_an_engine_share_4_heads_and_2_of_keys(tiny: Path, size: int, divides: bool) -> None:
    said = (
        rf"tensor_parallel_size = {size} can't share 4 attention heads and 2 heads of keys and values; give a divisor"
    )
    with nullcontext() if divides else pytest.raises(ConfigError, match=said):
        validate(tiny, "--generator.engine=vllm", f"--generator.tensor_parallel_size={size}")


def test_a_pipeline_stage_has_a_layer(tiny: Path) -> None:
    flags = ["--generator.engine=vllm", "--generator.engine_args.pipeline_parallel_size"]
    validate(tiny, *flags, "3")
    with pytest.raises(
        ConfigError, match="pipeline_parallel_size = 4, but the model has 3 layers; give at most as many"
    ):
        validate(tiny, *flags, "4")


@pytest.mark.parametrize(("size", "divides"), [(2, True), (4, True), (3, False)])
def test_ranks_of_the_trainer_share_4_experts(tmp_path: Path, size: int, divides: bool) -> None:
    save_model(tmp_path, family="qwen3_moe")
    with nullcontext() if divides else pytest.raises(ConfigError, match="can't share out 4 experts; give a divisor"):
        validate(tmp_path, f"--trainer.ranks={size}", f"--trainer.expert_parallel={size}")


def test_only_one_option_adapts_experts(tmp_path: Path) -> None:
    save_model(tmp_path, family="qwen3_moe")
    validate(tmp_path, "--lora.rank=4", '--lora.targets=["q_proj"]')
    with pytest.raises(ConfigError, match=r"'up_proj'\] adapts experts; set lora.experts = true for all of them, or"):
        validate(tmp_path, "--lora.rank=4", '--lora.targets=["gate_proj", "up_proj"]')


def test_vllm_serves_no_adapter_of_an_embedding(tmp_path: Path) -> None:
    save_model(tmp_path, tie_word_embeddings=False)
    adapted = "--lora.rank=4", '--lora.targets=["q_proj", "embed_tokens"]'
    validate(tmp_path, *adapted)
    with pytest.raises(ConfigError, match=r"lora.targets = .* adapts the embedding, which vLLM can't serve; name"):
        validate(tmp_path, *adapted, "--generator.engine=vllm")


@pytest.mark.parametrize(("size", "remedy"), [(2, ""), (4, ""), (3, "give 1$"), (8, "give 1 or 2 or 4$")])
def test_ranks_of_the_trainer_share_4_heads_and_2_of_keys(tiny: Path, size: int, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy) if remedy else nullcontext():
        validate(tiny, f"--trainer.ranks={size}", f"--trainer.context_parallel={size}")


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_moe", "mixtral", "olmoe"])
def test_models_of_all_families_are_accepted(tmp_path: Path, family: str) -> None:
    save_model(tmp_path, family=family)
    validate(tmp_path)
    validate(tmp_path, "--lora.rank=2", "--algorithm.kl_coef=0.1", f"--algorithm.reference={tmp_path}")
