"""Experts by grouped matrix products compute what transformers' own loop over experts does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.model import experts
from slipstream.model.policy import PackedPolicy
from tests.conftest import build_model, run_kernel_cases


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


def test_experts_of_other_ranks_add_nothing() -> None:
    """Outputs and gradients of the first two of four experts, with choices of the others, equal those of a loop."""
    found = []
    for own in (False, True):
        torch.manual_seed(0)
        layer: Any = build_model("qwen3_moe").model.layers[0].mlp.experts
        layer.num_experts, layer._is_expert_parallel = 2, True
        for name, p in [*layer.named_parameters()]:
            setattr(layer, name, torch.nn.Parameter(p.detach()[:2].clone()))
        tokens = torch.randn(5, layer.hidden_dim, requires_grad=True)
        weights = torch.rand(5, 2, requires_grad=True)
        chosen = torch.tensor([[0, 2], [2, 2], [1, 0], [2, 1], [2, 0]])  # 2 is of another rank
        out = experts.grouped_experts(layer, tokens, chosen, weights) if own else loop(layer, tokens, chosen, weights)
        out.square().sum().backward()
        found.append([out.detach(), tokens.grad, weights.grad, *(p.grad for p in layer.parameters())])
    for plain, grouped in zip(*found, strict=True):
        torch.testing.assert_close(grouped, plain)


def loop(layer: Any, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    rows = []
    for token, its, weighs in zip(tokens, chosen, weights, strict=True):
        row = 0 * token
        for expert, weight in zip(its.tolist(), weighs, strict=True):
            if expert < layer.num_experts:
                inner = layer._apply_gate(token @ layer.gate_up_proj[expert].T)
                row = row + weight * (inner @ layer.down_proj[expert].T)
        rows.append(row)
    return torch.stack(rows)


def test_kernels_of_the_gate_equal_float64() -> None:
    run_kernel_cases(Path(__file__).with_name("expert_cases.py"))


def test_compiled_code_knows_the_number_of_experts_of_a_token() -> None:
    """Sums over them are unrolled then."""
    layer = build_model("qwen3_moe").model.layers[0].mlp.experts
    summed: list[Any] = []

    def note(module: Any, inputs: Any) -> Any:
        summed.extend(n.args[0].meta["example_value"] for n in module.graph.nodes if n.target == "sum")
        return module.forward

    torch._dynamo.reset()
    compiled = torch.compile(experts.grouped_experts, backend=note, dynamic=True)
    compiled(layer, torch.randn(5, layer.hidden_dim), torch.tensor([[0, 2]] * 5), torch.rand(5, 2))
    torch._dynamo.reset()
    assert [[type(size) for size in rows.shape[:2]] for rows in summed] == [[torch.SymInt, int]]
