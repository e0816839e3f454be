"""Experts by grouped matrix products compute what transformers' own loop over experts does."""

from __future__ import annotations

import pytest
import torch

from slipstream.model import experts
from slipstream.model.policy import PackedPolicy
from tests.conftest import build_model


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe"])
def test_outputs_and_gradients_equal_those_of_a_loop_over_experts(family: str) -> None:
    ids = torch.arange(1, 30)[None]
    found = []
    for own in (False, True):
        model = build_model(family)
        if own:
            PackedPolicy(model)
            assert model.config._experts_implementation == experts.NAME
            model.set_attn_implementation("eager")
        else:
            model.set_attn_implementation("eager")
            model.set_experts_implementation("eager")
        logits = model(ids).logits
        logits.square().mean().backward()
        found.append([logits.detach(), *(p.grad for p in model.parameters())])
    for plain, grouped in zip(*found, strict=True):
        torch.testing.assert_close(grouped, plain, rtol=1e-4, atol=1e-5 * float(plain.abs().max()))


def test_an_expert_without_tokens_has_no_gradient() -> None:
    model = build_model("qwen3_moe")
    PackedPolicy(model)
    layer = model.model.layers[0].mlp.experts
    tokens = torch.randn(5, layer.hidden_dim, requires_grad=True)
    chosen = torch.tensor([[0, 2], [2, 3], [0, 3], [3, 2], [2, 0]])
    layer(tokens, chosen, torch.full((5, 2), 0.5)).sum().backward()
    used = layer.down_proj.grad.flatten(1).abs().sum(1) > 0
    assert used.tolist() == [True, False, True, True]
    assert tokens.grad is not None and tokens.grad.abs().sum() > 0
