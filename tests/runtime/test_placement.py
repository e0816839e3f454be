"""Who gets which GPU, on hosts of any size."""

from __future__ import annotations

import pytest

from slipstream.config import Config, ConfigError, load_config
from slipstream.runtime.placement import place, visible


def config_of(*flags: str) -> Config:
    return load_config(None, ["--model.path=m", "--environment.name=e", "--generator.kind=vllm", *flags])


@pytest.mark.parametrize(
    ("flags", "gpus", "generators", "trainer"),
    [
        ([], 0, ((),), ()),
        ([], 1, ((0,),), (0,)),
        ([], 2, ((0,),), (1,)),
        (["--generator.count=3"], 4, ((0,), (1,), (2,)), (3,)),
        (["--generator.tensor_parallel=2"], 4, ((0, 1),), (2,)),
        (["--generator.count=2", "--generator.tensor_parallel=2"], 8, ((0, 1), (2, 3)), (4,)),
        (["--trainer.ranks=4", "--generator.count=2"], 8, ((0,), (1,)), (2, 3, 4, 5)),
        (["--trainer.ranks=2"], 0, ((),), ()),
        (["--trainer.ranks=2", "--generator.device=cuda:0", "--trainer.device=cuda:0"], 2, ((0,),), (0, 1)),
        (["--trainer.device=cpu"], 2, ((0,),), ()),
        (["--generator.device=cuda:1", "--trainer.device=cuda:0"], 2, ((1,),), (0,)),
        (["--generator.device=cuda:0", "--trainer.device=cuda:0"], 2, ((0,),), (0,)),
        (["--sync.link=single_copy", "--model.dtype=bfloat16"], 4, ((0,),), (0,)),
        (
            [
                "--sync.link=single_copy",
                "--model.dtype=bfloat16",
                "--generator.tensor_parallel=2",
                "--trainer.ranks=2",
                "--trainer.parallel=tensor",
            ],
            2,
            ((0, 1),),
            (0, 1),
        ),
    ],
)
def test_places(flags: list[str], gpus: int, generators: tuple[tuple[int, ...], ...], trainer: tuple[int, ...]) -> None:
    placement = place(config_of(*flags), gpus)
    assert (placement.generators, placement.trainer) == (generators, trainer)
    assert placement.shared == any(g in trainer for each in generators for g in each)


@pytest.mark.parametrize(
    ("flags", "gpus", "said"),
    [
        (["--generator.count=2"], 2, "need 3 GPUs, but there are 2"),
        (["--generator.tensor_parallel=2"], 1, "tensor_parallel = 2, but there are 1 GPUs"),
        (["--sync.link=single_copy", "--model.dtype=bfloat16"], 0, "needs a GPU"),
        (["--trainer.ranks=4"], 4, "trainer.ranks = 4 need 5 GPUs, but there are 4"),
        (["--trainer.ranks=2"], 1, "trainer.ranks = 2, but there are 1 GPUs"),
        (["--sync.link=nccl"], 1, "can't connect a GPU with itself"),
    ],
)
def test_too_few_are_refused(flags: list[str], gpus: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        place(config_of(*flags), gpus)


def test_a_process_sees_its_own_of_those_that_this_one_may_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible((1, 2)) == {"CUDA_VISIBLE_DEVICES": "1,2"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7")
    assert visible((1, 2)) == {"CUDA_VISIBLE_DEVICES": "5,7"}
    assert visible(()) == {"CUDA_VISIBLE_DEVICES": ""}
