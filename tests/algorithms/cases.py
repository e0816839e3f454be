"""Sequences of sampled tokens as plain lists, their tensors, and derivatives by finite differences.

The references in these tests are written from the papers, one sequence at a time, in Python's own float64. What a paper
holds fixed (a weight, a mask) a reference computes from `frozen`, what it differentiates from `x`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from slipstream.algorithms.tokens import Tokens


@dataclass(frozen=True)
class Case:
    """Sequences, token by token: log-probabilities, advantages and lags."""

    logprobs: list[list[float]]
    behaviour: list[list[float]]
    advantages: list[list[float]]
    lag: list[list[int]]
    proximal: list[list[float]]

    def tokens(self, dtype: torch.dtype = torch.float64) -> Tokens:
        def flat(rows: list[list[float]]) -> torch.Tensor:
            return torch.tensor([v for row in rows for v in row], dtype=dtype)

        index = [i for i, row in enumerate(self.logprobs) for _ in row]
        return Tokens(
            flat(self.logprobs).requires_grad_(),
            flat(self.behaviour),
            flat(self.advantages),
            torch.tensor(index, dtype=torch.long),
            torch.tensor([v for row in self.lag for v in row], dtype=torch.long),
            flat(self.proximal),
        )

    @property
    def sequences(self) -> list[tuple[list[float], ...]]:
        return list(zip(self.logprobs, self.behaviour, self.advantages, self.lag, self.proximal, strict=True))


@st.composite
def cases(draw: st.DrawFn, one_advantage: bool = False) -> Case:
    logprob = st.floats(-4, -0.05).map(lambda v: round(v, 6))
    move = st.floats(-1.5, 1.5).map(lambda v: round(v, 6))
    number = st.sampled_from([-2.0, -1.0, -0.25, 0.0, 0.5, 1.0, 3.0])
    parts: list[list[list[float]]] = [[], [], [], [], []]
    for size in draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)):
        row = [draw(logprob) for _ in range(size)]
        near = [min(-0.001, v + draw(move)) for v in row]
        same = draw(number)
        given = [same if one_advantage else draw(number) for _ in range(size)]
        lags = [draw(st.integers(0, 5)) for _ in range(size)]
        for part, values in zip(parts, (row, near, given, lags, [v + draw(move) / 3 for v in row]), strict=True):
            part.append(values)
    return Case(*parts)  # type: ignore[arg-type]


Reference = Callable[[list[list[float]]], list[list[float]]]


def slopes(value: Callable[[list[list[float]]], float], at: list[list[float]]) -> list[tuple[float, float, float]]:
    """Left, central and right derivative of `value` by each token's log-probability."""
    step, found = 1e-6, []
    middle = value(at)
    for i, row in enumerate(at):
        for j in range(len(row)):
            up = [[v + step * ((a, b) == (i, j)) for b, v in enumerate(r)] for a, r in enumerate(at)]
            down = [[v - step * ((a, b) == (i, j)) for b, v in enumerate(r)] for a, r in enumerate(at)]
            above, below = value(up), value(down)
            found.append(((middle - below) / step, (above - below) / (2 * step), (above - middle) / step))
    return found


def assert_slopes(got: Sequence[float], wanted: list[tuple[float, float, float]]) -> None:
    """Each slope is the derivative, to 1e-6; at a kink it lies between those of the two sides."""
    assert len(got) == len(wanted)
    for slope, (left, central, right) in zip(got, wanted, strict=True):
        if abs(left - right) < 1e-4 * max(1, abs(central)):
            assert abs(slope - central) <= 1e-6 * max(1, abs(central))
        else:
            assert min(left, right) - 1e-4 <= slope <= max(left, right) + 1e-4
