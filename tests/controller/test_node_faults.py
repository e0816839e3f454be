"""Faults of nodes, from made-up reports."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slipstream.controller.node_checks import rounds
from slipstream.controller.node_faults import Needs, bandwidth_faults, connection_faults, find_faults, several
from slipstream.controller.node_worker import Gpu, NodeReport

VERSIONS = {"Python": "3.12.1", "torch": "2.13.0", "vLLM": "0.32.0"}
GPUS = tuple(Gpu(i, "H200", 140_000, 143_000, "570.1") for i in range(2))
A = NodeReport("A", VERSIONS, GPUS, shm=2**34, memory=2**36, open_files=65536, locked_memory=-1, disk=2**40)
B = replace(A, node="B")
NEEDS = Needs("/shared/run", versions=VERSIONS)


def faults(*reports: NodeReport, needs: Needs = NEEDS) -> list[tuple[str, str]]:
    return [tuple(fault) for fault in find_faults(reports, needs)]


def test_equal_nodes_have_no_faults() -> None:
    assert faults(A, B, needs=replace(NEEDS, gpus=4, gpus_together=2, disk=2**39, vllm=True, ray=True)) == []


def test_different_versions_are_named_with_their_nodes() -> None:
    other = replace(B, versions=VERSIONS | {"torch": "2.11.0"})
    [(check, text)] = faults(A, other, replace(A, node="C"))
    assert check == "versions" and text == "nodes A and C have torch 2.13.0, node B 2.11.0; install the same"
    [(_, text)] = faults(A, replace(B, versions=VERSIONS | {"vLLM": ""}))
    assert text == "node A has vLLM 0.32.0, node B none; install the same"
    [(_, text)] = faults(A, needs=replace(NEEDS, versions=VERSIONS | {"Python": "3.11.9"}))
    assert text == "node A has Python 3.12.1, the controller 3.11.9; install the same"


def test_vllm_that_is_missing_everywhere_is_a_fault_if_it_is_the_engine() -> None:
    without = [replace(r, versions=VERSIONS | {"vLLM": ""}) for r in (A, B)]
    none = replace(NEEDS, versions={})
    assert faults(*without, needs=none) == []
    [(_, text)] = faults(*without, needs=replace(none, vllm=True))
    assert "vLLM is missing on nodes A and B" in text and "pip install" in text


@pytest.mark.parametrize(
    ("changes", "check", "parts"),
    [
        ({"directory": "is not there"}, "run directory", ("node B: /shared/run is not there", "mount")),
        ({"shm": 2**26}, "memory", ("node B: /dev/shm has 0.07 GB", "--shm-size")),
        ({"open_files": 1024}, "limits", ("node B: `ulimit -n` is 1024", "4096")),
        ({"infiniband": True, "locked_memory": 2**16}, "limits", ("`ulimit -l` is 64 kB", "InfiniBand")),
        ({"resolution": "its name 'b' can't be resolved (x)"}, "host names", ("node B: its name", "/etc/hosts")),
        ({"gpu_error": "no devices"}, "GPUs", ("node B: nvidia-smi fails (no devices)", "driver")),
        ({"ray_gpus": 8}, "GPUs", ("Ray schedules 8 GPUs, but nvidia-smi finds 2",)),
        ({"gpus": (replace(GPUS[0], driver="550.2"),)}, "GPUs", ("driver differs: A 570.1 and B 550.2",)),
        ({"model": "model.path = 'x': no such directory"}, "model files", ("node B: model.path = 'x'",)),
        ({"files": {"a": 1}}, "model files", ("node B: model files are missing or differ (b)",)),
    ],
)
def test_a_fault_of_one_node_names_it_and_its_remedy(
    changes: dict[str, object], check: str, parts: tuple[str, ...]
) -> None:
    whole = replace(A, files={"a": 1, "b": 2}) if "files" in changes else A
    [(found, text)] = faults(whole, replace(B, **changes))  # type: ignore[arg-type]
    assert found == check and all(part in text for part in parts)


def test_a_cpu_build_of_torch_on_a_node_with_gpus_is_a_fault() -> None:
    versions = VERSIONS | {"torch": "2.13.0+cpu"}
    [(check, text)] = faults(replace(A, versions=versions), needs=replace(NEEDS, versions=versions))
    assert check == "GPUs" and "no CUDA" in text


def test_gpus_that_others_use_and_engines_larger_than_a_node_are_faults() -> None:
    used = replace(B, gpus=tuple(replace(gpu, free=1000) for gpu in GPUS))
    assert faults(A, used, needs=replace(NEEDS, gpus=2)) == []
    [(_, text)] = faults(A, used, needs=replace(NEEDS, gpus=3))
    assert "needs 3 GPUs, but only 2 have half of their memory free" in text
    [(_, text)] = faults(A, B, needs=replace(NEEDS, gpus_together=4, engine_size="generator.tensor_parallel_size = 4"))
    assert "generator.tensor_parallel_size = 4, but a node has at most 2 GPUs" in text


def test_gpus_that_only_ray_counts_are_enough() -> None:
    other_vendor = replace(A, gpus=(), ray_gpus=8)
    assert faults(other_vendor, needs=replace(NEEDS, gpus=8, gpus_together=8)) == []


def test_a_small_machine_without_gpus_needs_little() -> None:
    small = replace(A, gpus=(), shm=2**26, open_files=1024)
    assert faults(small) == []
    assert {check for check, _ in faults(replace(small, open_files=256), needs=replace(NEEDS, vllm=True))} == {
        "memory", "limits",
    }  # fmt: skip


def test_checkpoints_and_weights_need_space() -> None:
    [(check, text)] = faults(A, needs=replace(NEEDS, disk=2**41))
    assert check == "run directory" and "checkpoints take about 2199.0" in text and "checkpoint.keep" in text
    [(check, text)] = faults(A, needs=replace(NEEDS, memory=2**37))
    assert check == "memory" and "137.4 GB" in text


def test_a_pair_without_a_connection_is_one_line() -> None:
    errors = {("A", "B"): "timed out", ("B", "A"): "refused", ("A", "C"): "", ("C", "A"): "no route"}
    texts = [fault.text for fault in connection_faults(errors)]
    assert len(texts) == 2
    assert texts[0].startswith("nodes A and B can't connect to each other (timed out)")
    assert texts[1].startswith("node C can't connect to node A (no route)")


def test_a_slow_link_is_a_fault_if_a_publish_would_exceed_its_limit() -> None:
    rates = {("A", "B"): 1e8, ("A", "C"): 1e6}
    [fault] = bandwidth_faults(rates, NEEDS)
    assert fault.text.startswith("nodes A and C: 0.01 Gbit/s")
    slow, _ = bandwidth_faults(rates, replace(NEEDS, published=7 * 10**9))
    assert "nodes A and B: 0.80 Gbit/s, so a publish takes 70 s, and the limit is 60 s" in slow.text


@pytest.mark.parametrize("count", range(2, 9))
def test_rounds_hold_every_pair_once_and_no_rank_twice_in_a_round(count: int) -> None:
    plan = list(rounds(count))
    pairs = [pair for found in plan for pair in found]
    assert len(pairs) == len(set(pairs)) == count * (count - 1) // 2
    assert all(len({rank for pair in found for rank in pair}) == 2 * len(found) for found in plan)


def test_many_names_are_shortened() -> None:
    assert several(["A"]) == "node A" and several(list("ABCDEF")) == "nodes A, B, C, D and 2 more"
