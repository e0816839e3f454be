"""Compiled layers."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slipstream.trainers.memory import compile_layers


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
    monkeypatch.setattr(config, "recompile_limit", 8)
    monkeypatch.setattr(config, "fail_on_recompile_limit_hit", True)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=count))
    model: Any = Model()
    compile_layers(model)
    counts = []
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
