"""The costs of a publish by each link that the planner considers, and of an engine's adapters."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.plan.costs import EngineCost, PublishCost, changed_fraction, publish_cost
from slipstream.plan.hardware import Cluster, Rates, find_gpu
from slipstream.plan.shapes import BF16, find_shape
from tests.plan.cases import work

SHAPE = find_shape("7B")
RESULTS = Path(__file__).parents[2] / "benchmarks/results"
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


@pytest.mark.parametrize("model", ["1.7B", "8B"])
def test_adapters_take_the_time_of_their_kernels(model: str) -> None:
    """To which the two constants are fitted, for 256 sequences of either size. A prefill has no launches."""
    measured = json.loads((RESULTS / "adapter_kernels_h200.json").read_text())["results"]
    shape = find_shape(model)
    layer = sum(row["us"] for row in measured if row["shape"] == model) * 1e-6
    without = EngineCost(shape, Cluster(find_gpu("h200"), 1), Rates(), 1)
    found = replace(without, adapters=True)
    added = found.step(256, 1e5) - without.step(256, 1e5)
    assert added == pytest.approx(shape.layers * layer, rel=0.02)
    assert 0.5 * added < found.prefill(256) - without.prefill(256) < added


def test_vllm_shards_one_side_of_each_adapter() -> None:
    shape = find_shape("1.7B")
    whole, sharded = 7 * 2048, 2 * 2048 + 2 * 1024 + 3 * 6144
    assert shape.adapter_width(1) == 28 * (whole + sharded) == shape.lora_parameters(1)
    assert shape.adapter_width(8) == 28 * (whole + sharded // 8)
