"""The expected share of changed elements is that of AdamW on float32 masters, rounded to bfloat16."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.sync.prediction import count_exponents, expected_changed_fraction

BETA1 = 0.9
rates = st.floats(1e-8, 1e-2)
weights = st.builds(
    lambda seed, scale: scale * torch.randn(512, generator=torch.Generator().manual_seed(seed)),
    st.integers(0, 10**6), st.floats(1e-6, 1e2),
)  # fmt: skip


def simulate(masters: Tensor, rate: float, steps: int, taken: int, decay: float = 0.0, eps: float = 1e-8) -> float:
    """Share of bfloat16 values that `steps` steps of AdamW change, after `taken` steps, with gradients of noise."""
    draw = torch.Generator().manual_seed(7)
    parameter = torch.nn.Parameter(masters.clone())
    optimizer = torch.optim.AdamW([parameter], lr=rate, betas=(BETA1, 0.99), weight_decay=decay, eps=eps)
    before = parameter.detach().bfloat16()
    for step in range(taken + steps):
        if step == taken:
            before = parameter.detach().bfloat16()
        parameter.grad = torch.randn(masters.shape, generator=draw)
        optimizer.step()
    return float((parameter.detach().bfloat16() != before).float().mean())


def normal(scale: float, count: int = 200_000) -> Tensor:
    return scale * torch.randn(count, generator=torch.Generator().manual_seed(0))


def test_exponents_are_counted_as_the_weights_are_served() -> None:
    served = [torch.tensor([0.0, 1.0, -1.5, 1.999]), torch.tensor([[0.5, -2.0]]), torch.empty(0)]
    counts = count_exponents(served)
    assert {int(i): int(counts[i]) for i in counts.nonzero()} == {0: 1, 126: 1, 127: 2, 128: 2}  # 1.999 is served as 2


def test_large_tensors_and_those_of_other_layouts_and_dtypes_are_counted_whole() -> None:
    large = torch.full((2**22 + 5,), 3.0)
    transposed = torch.full((4, 6), 3.0, dtype=torch.bfloat16).T
    assert int(count_exponents([large, transposed, torch.full((2,), 3.0, dtype=torch.float64)])[128]) == 2**22 + 31


@pytest.mark.parametrize("scale", [1e-3, 0.02, 0.5])
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("rate", [1e-6, 1e-5, 1e-4])
def test_the_share_is_that_of_a_simulation(rate: float, steps: int, scale: float) -> None:
    masters = normal(scale)
    simulated = simulate(masters, rate, steps, taken=60)
    predicted = expected_changed_fraction(count_exponents([masters]), rate, steps, beta1=BETA1)
    noise = 4 * (simulated / len(masters)) ** 0.5
    assert abs(predicted - simulated) < 0.08 * simulated + noise


@pytest.mark.parametrize(("taken", "steps"), [(1, 1), (2, 1), (5, 4), (0, 4), (20, 30)])
def test_the_first_steps_are_larger(taken: int, steps: int) -> None:
    masters = normal(0.02)
    simulated = simulate(masters, 1e-5, steps, taken)
    predicted = expected_changed_fraction(count_exponents([masters]), 1e-5, steps, taken=taken, beta1=BETA1)
    assert predicted == pytest.approx(simulated, rel=0.15)


def test_the_very_first_update_has_one_size() -> None:
    """Simulated updates are all of one learning rate then, and predicted ones are normal: their mean is 0.8 of that."""
    masters = normal(0.02)
    predicted = expected_changed_fraction(count_exponents([masters]), 1e-5, taken=0, beta1=BETA1)
    assert 0.75 < predicted / simulate(masters, 1e-5, 1, taken=0) < 0.85


@pytest.mark.parametrize("taken", [0, 20, 100])
def test_masters_that_start_on_bfloat16_values_change_less_at_first(taken: int) -> None:
    masters = normal(0.02).bfloat16().float()
    predicted = expected_changed_fraction(count_exponents([masters]), 1e-6, taken=taken, beta1=BETA1)
    assert 0.5 * predicted < simulate(masters, 1e-6, 1, taken) < 0.95 * predicted


def test_weight_decay_moves_weights_that_the_gradients_move_little() -> None:
    masters = normal(0.02)
    simulated = simulate(masters, 1e-5, 4, taken=60, decay=30.0)
    counts = count_exponents([masters])
    predicted = expected_changed_fraction(counts, 1e-5, 4, weight_decay=30.0)
    assert predicted == pytest.approx(simulated, rel=0.2)
    assert predicted > 1.5 * expected_changed_fraction(counts, 1e-5, 4)


def test_damped_updates_change_fewer_elements() -> None:
    masters, eps = normal(0.02), 1.0
    simulated = simulate(masters, 1e-5, 1, taken=60, eps=eps)
    moving = 1 / (1 + eps)  # gradients have a standard deviation of 1
    predicted = expected_changed_fraction(count_exponents([masters]), 1e-5, moving=moving)
    assert predicted == pytest.approx(simulated, rel=0.15)


@given(weights=weights, rate=rates, steps=st.integers(1, 50), taken=st.integers(0, 200), beta1=st.floats(0, 0.99),
       decay=st.floats(0, 1), moving=st.floats(0, 1))  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_the_share_is_a_probability_and_grows_with_rate_and_steps(
    weights: Tensor, rate: float, steps: int, taken: int, beta1: float, decay: float, moving: float
) -> None:
    counts = count_exponents([weights])

    def share(rate: float, steps: int, moving: float = moving) -> float:
        return expected_changed_fraction(
            counts, rate, steps, taken=taken, beta1=beta1, weight_decay=decay, moving=moving
        )

    base, slack = share(rate, steps), 1e-12
    assert 0 <= base <= 1
    assert base <= share(2 * rate, steps) + slack and base <= share(rate, steps + 1) + slack
    assert base <= share(rate, steps, moving=1.0) + slack


def test_extremes() -> None:
    zeros, large = count_exponents([torch.zeros(8)]), count_exponents([torch.full((8,), 1e30)])
    assert expected_changed_fraction(zeros, 1e-6) == pytest.approx(1)  # any update changes a zero
    assert expected_changed_fraction(zeros, 1e-6, moving=0.25) == pytest.approx(0.25)
    assert expected_changed_fraction(large, 1e-2, steps=100) < 1e-20
