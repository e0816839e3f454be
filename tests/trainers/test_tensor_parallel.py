"""Sharding plans of tensor parallelism, and models that can't be sharded. `test_parallel` compares results."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from slipstream.config.schema import ConfigError
from slipstream.trainers.tensor_parallel import _styles, plan_shards
from tests.conftest import build_model


def test_layers_follow_the_models_plan_except_embedding_and_head() -> None:
    """Some releases of transformers add the embedding to the plan of a model whose head is tied to it."""
    model: Any = build_model()
    model.config.base_model_tp_plan = model.config.base_model_tp_plan | {"embed_tokens": "embedding_rowwise"}
    styles = _styles(model)
    layer = {n.removeprefix("model.layers.1."): s for n, s in styles.items() if n.startswith("model.layers.1.")}
    assert len(styles) == len(layer) * model.config.num_hidden_layers
    assert {name for name, style in layer.items() if style == "rowwise"} == {"self_attn.o_proj", "mlp.down_proj"}
    assert {"self_attn.q_proj", "mlp.up_proj"} <= {name for name, style in layer.items() if style == "colwise"}


def test_models_that_cannot_be_sharded_are_refused_by_name() -> None:
    model: Any = build_model()
    with pytest.raises(ConfigError, match="can't share num_key_value_heads = 2 between 4 ranks; use fsdp"):
        plan_shards(model, 4)
    model.config.base_model_tp_plan = None
    with pytest.raises(ConfigError, match="needs a plan, and a qwen3 brings none along"):
        _styles(model)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 2, "vocab_size": 16}
    experts = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, num_experts_per_tok=1))
    with pytest.raises(ConfigError, match="is for dense models, and a qwen3_moe has experts; use fsdp"):
        _styles(experts)
