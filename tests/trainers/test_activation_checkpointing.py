"""Activation checkpointing and compiled layers."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.trainers.activation_checkpointing import prepare_layers


class Layer(nn.Module):
    """A layer with the properties that compiled code depends on: layer class, gradients, shared prompts."""

    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.window, self.weight, self.epsilon = window, nn.Parameter(torch.ones(4)), 1e-6

    def forward(self, hidden: Tensor, key_index: Tensor | None = None) -> Tensor:
        keys = hidden if key_index is None else hidden[key_index]
        return hidden * self.weight + self.epsilon + (keys[-self.window :] if self.window else keys).sum(0)


class Model(nn.Module):
    _no_split_modules = ("Layer",)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(None), Layer(3), Layer(None), Layer(3)])


def test_all_kinds_of_passes_stay_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """More compiled variants than torch's default limit of 8; each is compiled once, for any number of tokens.

    Numbers of a layer are constants: none is a tensor on the CPU.
    """
    config: Any = torch._dynamo.config
    made = 0

    def count(module: Any, inputs: Any, **options: Any) -> Any:
        nonlocal made
        made += 1
        assert all(value.ndim for value in inputs if isinstance(value, Tensor))
        return module.forward

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=count))
    model: Any = Model()
    counts = []
    with config.patch(recompile_limit=8, fail_on_recompile_limit_hit=True):
        prepare_layers(model, "none", compiled=True)
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
    """An expert that computes with a weight given to its forward method."""

    def forward(self, weight: Tensor, tokens: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            computed.append(len(tokens))
        return (tokens @ weight).sin()


class Experts(nn.Module):
    """A module as `shard_experts` leaves it: the dispatch is outside of compiled code."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))
        self.__dict__["local_experts"] = Expert()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, tokens: Tensor) -> Tensor:
        journeys.append(len(tokens))
        return self.__dict__["local_experts"](self.weight * 2, tokens.flip(0)).flip(0)  # type: ignore[no-any-return]


class Attention(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            computed.append(len(hidden))
        return super().forward(hidden).tanh()


class Mixed(nn.Module):
    """A layer of a mixture."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.experts = Attention(4, 4), Experts()

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(hidden)
        return hidden + self.experts(hidden)


class Mixture(nn.Module):
    _no_split_modules = ("Mixed",)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Mixed(), Mixed(), Mixed()])

    def train_once(self) -> tuple[Tensor, list[Tensor]]:
        """Output and all gradients."""
        self.zero_grad()
        journeys.clear()
        computed.clear()
        hidden = torch.linspace(-1, 1, 24).view(6, 4).requires_grad_()
        out = 1 * hidden  # what a layer gets
        for layer in self.layers:
            out = layer(out)
        out.square().sum().backward()
        return out.detach(), [hidden.grad, *(p.grad for p in self.parameters())]  # type: ignore[list-item]


journeys: list[int] = []  # of tokens to experts
computed: list[int] = []  # passes through experts and attention outside of programs
HOW = [("none", 1, 1), ("selective", 1, 2), ("full", 2, 2)]  # journeys and passes of each layer


@pytest.mark.parametrize(("again", "travels", "passes"), HOW)
def test_dispatch_is_repeated_only_with_full_recomputation(again: str, travels: int, passes: int) -> None:
    expected = Mixture().train_once()
    model = Mixture()
    prepare_layers(model, again, compiled=False)
    torch.testing.assert_close(model.train_once(), expected)
    assert (len(journeys), len(computed)) == (3 * travels, 3 * 2 * passes)


@pytest.mark.parametrize(("again", "travels", "passes"), HOW)
def test_local_experts_and_surrounding_modules_are_compiled(
    monkeypatch: pytest.MonkeyPatch, again: str, travels: int, passes: int
) -> None:
    programs: list[str] = []

    def note(module: Any, inputs: Any, **options: Any) -> Any:
        parts = [module, *(m for m in module.modules() if isinstance(m, torch.fx.GraphModule))]
        programs.append(" ".join({str(node.target) for part in parts for node in part.graph.nodes}))
        return module.forward

    torch._dynamo.reset()
    expected = Mixture().train_once()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=note))
    model = Mixture()
    prepare_layers(model, again, compiled=True)
    torch.testing.assert_close(model.train_once(), expected)
    assert len(journeys) == 3 * travels
    assert not computed  # all of it in programs
    holds = {name: sum(name in program for program in programs) for name in ("tanh", "sin")}
    assert holds == {"tanh": 1, "sin": 1}  # one for all layers
    assert ("checkpoint" in " ".join(programs)) == (again == "selective")  # where it is within programs
    made = len(programs)
    model.train_once()
    assert len(programs) == made
    torch._dynamo.reset()


class Adapted(nn.Module):
    """A frozen linear layer with an adapter, and a nonlinear function of the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(64, 256, False), nn.Linear(64, 4, False), nn.Linear(4, 256, False)
        self.back = nn.Linear(256, 64, False)
        self.base.requires_grad_(False)

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.as_tensor(self.back(torch.tanh(self.base(hidden) + self.up(self.down(hidden)))))


class Products(TorchDispatchMode):
    """Shapes of the second factor of each matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "aten.mm" in str(func):
            self.shapes.append(tuple(args[1].shape))
        return func(*args, **(kwargs or {}))


def test_outputs_of_adapters_are_computed_again() -> None:
    def gradients(again: str) -> tuple[list[Tensor | None], list[tuple[int, ...]]]:
        torch.manual_seed(0)
        layer = Adapted()
        model = nn.Module()
        model.layers, model._no_split_modules = nn.ModuleList([layer]), ("Adapted",)  # type: ignore[assignment]
        prepare_layers(model, again, compiled=False)
        out = layer(torch.linspace(-1, 1, 640).view(10, 64)).square().sum()
        with Products() as products:
            out.backward()
        return [p.grad for p in layer.parameters()], products.shapes

    (wanted, plain), (found, selective) = gradients("none"), gradients("selective")
    torch.testing.assert_close(found, wanted)
    assert sorted(selective) == sorted([*plain, (4, 256)])
