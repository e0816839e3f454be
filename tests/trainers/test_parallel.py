"""One trainer as one, two or four ranks: the same numbers, and checkpoints that any number of ranks can read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slipstream.trainers.parallel import connected_parts
from tests.trainers.ranks import SIZES, WAYS, Found, agree, find, resumed, tried

PLAIN = True


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Found]:
    return find(tmp_path_factory, PLAIN)


@pytest.mark.parametrize(("size", "way"), [(size, w) for size in (2, 4) for w in tried(size, PLAIN)])
def test_ranks_agree_with_one(found: dict[int, Found], way: str, size: int) -> None:
    agree(found[size][way], found[1][WAYS[way].like])


@pytest.mark.parametrize(("size", "saved"), [(size, s) for size in SIZES for s in resumed(size, PLAIN)])
def test_any_number_of_ranks_resumes_from_a_checkpoint(found: dict[int, Found], saved: str, size: int) -> None:
    agree(found[size][saved], found[1][WAYS[saved.rpartition(" ")[0]].like])


def test_exported_weights_equal_the_trained_weights(found: dict[int, Found]) -> None:
    """Export gathers weights on rank 0."""
    from transformers import AutoModelForCausalLM

    folder: Path = found[0]["folder"]
    exported = dict(AutoModelForCausalLM.from_pretrained(folder / "fsdp 2 exported").named_parameters())
    trained = found[2]["fsdp"]["parameters"]
    assert exported.keys() == trained.keys() and all(torch.equal(exported[n], trained[n]) for n in trained)


@pytest.mark.parametrize(
    ("ranks", "context", "experts"), [(6, 2, 3), (6, 3, 2), (8, 2, 4), (8, 4, 2), (8, 1, 4), (8, 2, 1)]
)
def test_ranks_that_exchange_tokens_agree_on_the_parts_of_equal_length(ranks: int, context: int, experts: int) -> None:
    """Those that share a part of the batch, and those that share experts. Without experts it is the own part."""
    found = [connected_parts(rank, context, experts) for rank in range(ranks)]
    for rank, parts in enumerate(found):
        assert rank // context in parts
        assert parts == found[rank // context * context] == found[rank // experts * experts]
        assert experts > 1 or parts == range(rank // context, rank // context + 1)
