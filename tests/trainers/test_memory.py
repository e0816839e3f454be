"""Compiled layers."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slipstream.trainers.memory import prepare_layers


class Layer(nn.Module):
    """What a program depends on in a layer of a model: the kind of layer, gradients, and whether prompts are shared."""

    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.window, self.weight = window, nn.Parameter(torch.ones(4))

    def forward(self, hidden: Tensor, key_index: Tensor | None = None) -> Tensor:
        keys = hidden if key_index is None else hidden[key_index]
        return hidden * self.weight + (keys[-self.window :] if self.window else keys).sum(0)


class Model(nn.Module):
    _no_split_modules = ("Layer",)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(None), Layer(3), Layer(None), Layer(3)])


def test_all_kinds_of_passes_stay_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the 8 programs that torch would make, each for any number of tokens; none is made twice."""
    config: Any = torch._dynamo.config
    made = 0

    def count(module: Any, inputs: Any) -> Any:
        nonlocal made
        made += 1
        return module.forward

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=count))
    model: Any = Model()
    counts = []
    with config.patch(recompile_limit=8, fail_on_recompile_limit_hit=True):
        prepare_layers(model, "none", fuse=True)
        for tokens in (5, 6, 7):
            for graded, trained, shared in product((False, True), repeat=3):
                hidden = torch.ones(tokens, 4, requires_grad=trained)
                index = torch.arange(tokens + 3) % tokens if shared else None
                with torch.set_grad_enabled(graded):
                    for layer in model.layers:
                        layer(hidden, key_index=index)
            counts.append(made)
    assert counts[0] == counts[-1] == 2 * 2**3
    torch._dynamo.reset()


class Expert(nn.Module):
    """Computes with a weight that it is handed."""

    def forward(self, weight: Tensor, tokens: Tensor) -> Tensor:
        return (tokens @ weight).sin()


class Experts(nn.Module):
    """As experts are once they are spread: no program may hold what is between a token and its expert."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))
        self.__dict__["here"] = Expert()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, tokens: Tensor) -> Tensor:
        journeys.append(len(tokens))
        return self.__dict__["here"](self.weight * 2, tokens.flip(0)).flip(0)  # type: ignore[no-any-return]


class Mixed(nn.Module):
    """A layer of a mixture."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.experts = nn.Linear(4, 4), Experts()

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(hidden).tanh()
        return hidden + self.experts(hidden)


class Mixture(nn.Module):
    _no_split_modules = ("Mixed",)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Mixed(), Mixed(), Mixed()])


journeys: list[int] = []  # of tokens to experts


@pytest.mark.parametrize(("again", "journeys_each"), [("none", 1), ("selective", 1), ("full", 2)])
def test_spread_experts_are_compiled_and_what_surrounds_them(
    monkeypatch: pytest.MonkeyPatch, again: str, journeys_each: int
) -> None:
    """Tokens travel once more only where whole layers are computed again, and layers share what is compiled."""
    graphs = 0

    def count(module: Any, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return module.forward

    def train(model: Any) -> tuple[Tensor, list[Tensor]]:
        journeys.clear()
        hidden = out = torch.linspace(-1, 1, 24).view(6, 4).requires_grad_()
        for layer in model.layers:
            out = layer(out)
        out.square().sum().backward()
        return out.detach(), [hidden.grad, *(p.grad for p in model.parameters())]  # type: ignore[list-item]

    expected, gradients = train(Mixture())
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=count))
    model: Any = Mixture()
    prepare_layers(model, again, fuse=True)
    found, computed = train(model)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(computed, gradients)
    assert len(journeys) == 3 * journeys_each
    assert 3 <= graphs <= 4  # before the experts, the experts, and behind them, for all layers, or all but the first
    made = graphs
    train(model)
    assert graphs == made
    torch._dynamo.reset()
