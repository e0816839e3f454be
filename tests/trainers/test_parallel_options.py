"""As `test_parallel`: KL references, adapters, number formats, mixtures of experts, and what generation recorded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.trainers.ranks import SIZES, WAYS, Found, agree, find, resumed, tried

PLAIN = False
IN_BFLOAT16 = ("bfloat16", "copy")  # where ranks round otherwise


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Found]:
    return find(tmp_path_factory, PLAIN)


@pytest.mark.parametrize(
    ("size", "way"), [(size, w) for size in (2, 4) for w in tried(size, PLAIN) if w not in IN_BFLOAT16]
)
def test_ranks_agree_with_one(found: dict[int, Found], way: str, size: int) -> None:
    agree(found[size][way], found[1][WAYS[way].like])


@pytest.mark.parametrize(("size", "saved"), [(size, s) for size in SIZES for s in resumed(size, PLAIN)])
def test_any_number_of_ranks_resumes_from_a_checkpoint(found: dict[int, Found], saved: str, size: int) -> None:
    agree(found[size][saved], found[1][WAYS[saved.rpartition(" ")[0]].like])


def test_training_without_a_compute_copy_gives_the_same_weights(found: dict[int, Found]) -> None:
    """In bfloat16, equal up to the order in which gradients of micro-batches are rounded and added."""
    got, wanted = found[1]["by layer"], found[1]["copy"]
    for what in ("gradients", "parameters"):
        for name, tensor in wanted[what].items():
            assert (got[what][name] - tensor).norm() <= 1e-2 * tensor.norm(), (what, name)
    assert got["steps"][0]["loss"] == pytest.approx(wanted["steps"][0]["loss"], rel=1e-3)
    agree(found[1]["by layer 1"], got)


@pytest.mark.parametrize("way", IN_BFLOAT16)
def test_ranks_agree_with_one_in_bfloat16(found: dict[int, Found], way: str) -> None:
    """The first step is also FSDP's first pass, with an adapter reference."""
    got, wanted = found[2][way], found[1][way]
    for name, tensor in wanted["gradients"].items():
        assert (got["gradients"][name] - tensor).norm() <= 0.05 * tensor.norm().clamp(min=1e-3), name
    assert got["steps"][0]["kl"] == 0 < got["steps"][1]["kl"]


def test_exported_adapters_equal_the_trained_adapters(found: dict[int, Found]) -> None:
    """Export gathers adapters only."""
    folder: Path = found[0]["folder"]
    adapters = load_file(folder / "lora 2 exported" / "adapter_model.safetensors")
    assert not (folder / "lora 2 exported" / "README.md").exists(), "a card without content"
    assert {n.replace(".weight", ".default.weight") for n in adapters} == found[2]["lora"]["parameters"].keys()


@pytest.mark.parametrize(("size", "way"), [(1, "lora"), (2, "lora"), (2, "lora ddp")])
def test_published_adapters_equal_the_trained_adapters(found: dict[int, Found], way: str, size: int) -> None:
    """By `lora`, from the ranks of FSDP and DDP."""
    trained, published = found[size][way]["parameters"], found[size][way]["published"]
    assert {n.replace(".default.", ".") for n in trained} == published.keys()
    assert all(torch.equal(published[n.replace(".default.", ".")], tensor) for n, tensor in trained.items())


def test_expert_load_is_summed_over_ranks(found: dict[int, Found]) -> None:
    for step, other in zip(found[2]["mixture"]["steps"], found[1]["mixture"]["steps"], strict=True):
        assert all(
            step[name] == other[name] for name in ("expert_max_load", "expert_load_entropy", "expert_idle_fraction")
        )
    assert found[1]["mixture"]["steps"][0]["expert_max_load"] > 0.25
