"""Activation checkpointing and compiled layers."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
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


class Exchanging(nn.Module):
    """A layer that exchanges its tokens in a group of one rank, as context parallelism does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, hidden: Tensor) -> Tensor:
        parts = all_to_all_single_autograd((hidden * self.weight).sin(), None, None, dist.group.WORLD)
        return torch.as_tensor((parts * self.weight).cos())


class Collectives(TorchDispatchMode):
    """Names of the collectives, in the order of their calls."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_c10d_functional" in str(func):
            self.names.append(str(func).split(".")[1])
        return func(*args, **(kwargs or {}))


def test_selective_checkpointing_repeats_no_collective() -> None:
    if not dist.is_initialized():  # another test of this process may have
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = Model()
    model.layers = nn.ModuleList([Exchanging(), Exchanging()])
    model._no_split_modules = ("Exchanging",)  # type: ignore[misc]
    prepare_layers(model, "selective", compiled=False)
    hidden = torch.ones(3, 4, requires_grad=True)
    out = model.layers[1](model.layers[0](hidden))
    with Collectives() as made:
        out.sum().backward()
    assert made.names == ["all_to_all_single", "wait_tensor"] * 2
