"""The cost of a publish by each link that the planner considers."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.plan.costs import PublishCost, changed_fraction, publish_cost
from slipstream.plan.hardware import Cluster, Rates, find_gpu
from slipstream.plan.shapes import BF16, find_shape
from tests.plan.cases import work

SHAPE = find_shape("7B")
SLOW = 125e6  # bytes/s: 1 Gbit/s


def cost(network: float, **options: Any) -> PublishCost:
    """Of a publish from one node of 8 GPUs to another."""
    cluster = Cluster(find_gpu("h100"), 16, per_node=8, network=network)
    return publish_cost(SHAPE, cluster, Rates(), work(**options), "disaggregated", 1, 16)


def test_a_slow_network_gets_what_changed() -> None:
    dense = BF16 * SHAPE.parameters / SLOW
    often, seldom, fast = (
        cost(SLOW, learning_rate=rate, every=every) for rate, every in ((1e-6, 1), (1e-6, 16), (1e-3, 16))
    )
    assert [each.link for each in (often, seldom, fast)] == ["delta"] * 3
    assert often.transfer < 0.02 * dense
    assert seldom.transfer > 3 * often.transfer  # more steps change more elements
    assert fast.transfer == pytest.approx(dense)  # all of them


def test_a_fast_network_gets_all_weights() -> None:
    found = cost(50e9)
    assert found.link == "nccl" and found.transfer >= BF16 * SHAPE.parameters / 50e9


def test_predicted_changes_grow_with_rate_and_steps() -> None:
    rates, steps = (1e-7, 1e-6, 1e-5, 1e-4), (1, 4, 16)
    table = [[changed_fraction(rate, n) for n in steps] for rate in rates]
    assert all(row == sorted(row) for row in table)
    assert all(list(column) == sorted(column) for column in zip(*table, strict=True))
    assert table[0][0] > 0 and table[-1][-1] <= 1
