"""Who gets which GPU, on hosts of any size."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from slipstream.config import Config, ConfigError, load_config
from slipstream.runtime import placement
from slipstream.runtime.placement import place, settled, threads, visible

SINGLE_COPY = ["--sync.link=single_copy", "--model.dtype=bfloat16"]
SERVER = ["--generator.servers=['http://far:1']", "--sync.link=checkpoint"]
LOCAL = ["--generator.servers=['http://localhost:1', 'http://localhost:2']", "--sync.link=nccl"]
IN_TURNS = ["--sync.placement=colocated", "--sync.interruption=retry"]


def config_of(*flags: str) -> Config:
    return load_config(None, ["--model.path=m", "--environment.name=e", "--generator.kind=vllm", *flags])


@pytest.mark.parametrize("kind", [transformers.GPT2Config, transformers.FalconH1Config])
def test_engines_are_restarted_where_no_link_can_write_their_layout(
    tmp_path: Path, kind: type[transformers.PretrainedConfig]
) -> None:
    kind().save_pretrained(tmp_path)
    sync = settled(config_of(f"--model.path={tmp_path}")).sync
    assert (sync.link, sync.restart, sync.interruption) == ("checkpoint", True, "retry")
    for others in (["--generator.kind=torch"], ["--sync.link=shared"], ["--lora.rank=4"]):
        assert not settled(config_of(f"--model.path={tmp_path}", *others)).sync.restart
    transformers.LlamaConfig().save_pretrained(tmp_path)
    assert settled(config_of(f"--model.path={tmp_path}")).sync.link == "shared"


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
            [*SINGLE_COPY, "--generator.tensor_parallel=2", "--trainer.ranks=2", "--trainer.parallel=tensor"],
            2,
            ((0, 1),),
            (0, 1),
        ),
        ([*SINGLE_COPY, "--generator.device=cuda:1"], 2, ((1,),), (1,)),
        ([*SINGLE_COPY, "--trainer.device=cuda:1"], 2, ((1,),), (1,)),
        ([*SINGLE_COPY, "--generator.device=cuda:1", "--trainer.device=cuda:1"], 2, ((1,),), (1,)),
        (["--generator.device=cuda:1"], 2, ((1,),), (0,)),
        (["--generator.device=cuda:1", "--trainer.ranks=2"], 4, ((1,),), (0, 2)),
        (["--generator.device=cpu", "--trainer.ranks=2"], 2, ((),), (0, 1)),
        (["--generator.device=cuda:1", *IN_TURNS], 2, ((1,),), (1,)),
        (["--generator.count=2", "--generator.device=cuda:1"], 4, ((1,), (1,)), (0,)),
        (["--generator.count=2", "--trainer.device=cpu"], 1, ((0,), (0,)), ()),
        (SERVER, 0, (), ()),
        (SERVER, 2, (), (0,)),
        ([*SERVER, "--trainer.ranks=8"], 8, (), tuple(range(8))),
        ([*SERVER, "--trainer.device=cuda:1"], 2, (), (1,)),
        (LOCAL, 1, (), (0,)),
    ],
)
def test_places(flags: list[str], gpus: int, generators: tuple[tuple[int, ...], ...], trainer: tuple[int, ...]) -> None:
    found = place(config_of(*flags), gpus)
    assert (found.generators, found.trainer) == (generators, trainer)
    taken = [*trainer, *(gpu for each in generators for gpu in each)]
    assert found.shared == any(taken.count(gpu) > 1 for gpu in taken)


OWN_GPUS = ["--generator.device=cuda:0", "--trainer.device=cuda:1"]
ONE_GPU = ["--generator.device=cuda:1", "--trainer.device=cuda:1"]
SERVERS = ["--generator.servers=['http://localhost:1', 'http://127.0.0.1:2']"]


@pytest.mark.parametrize(
    ("flags", "gpus", "link"),
    [
        ([], 0, "shared"),
        ([], 1, "single_copy"),
        ([], 2, "nccl"),
        (["--generator.kind=torch"], 1, "shared"),
        (["--generator.kind=torch"], 2, "nccl"),
        (["--generator.kind=torch", "--lora.rank=4"], 2, "nccl"),
        (["--generator.kind=mine:Mine"], 2, "shared"),
        (["--trainer.kind=mine:Mine"], 2, "shared"),
        (["--generator.count=3", "--trainer.ranks=4"], 8, "nccl"),
        (["--generator.count=2", "--generator.device=cuda:0"], 4, "shared"),
        (["--generator.count=2"], 1, "shared"),
        (OWN_GPUS, 4, "nccl"),
        (ONE_GPU, 4, "single_copy"),
        (["--trainer.device=cpu"], 2, "shared"),
        (["--generator.device=cpu"], 2, "shared"),
        (["--sync.every=2"], 1, "shared"),
        (["--model.dtype=float32"], 1, "shared"),
        (["--trainer.compute_copy=false"], 1, "shared"),
        (["--lora.rank=4"], 1, "lora"),
        (["--lora.rank=4"], 0, "lora"),
        (["--lora.rank=4", *IN_TURNS], 1, "lora"),
        (IN_TURNS, 2, "shared"),
        (SERVERS, 0, "shared"),
        (SERVERS, 1, "shared"),
        (SERVERS, 2, "nccl"),
        ([*SERVERS, "--trainer.device=cpu"], 2, "shared"),
        (["--generator.servers=['http://far:1']"], 2, "checkpoint"),
        (["--sync.restart=true", "--sync.interruption=retry"], 2, "checkpoint"),
    ],
)
def test_auto_chooses_the_link_by_engine_adapters_and_placement(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], gpus: int, link: str
) -> None:
    monkeypatch.setattr(placement.torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(placement.torch.cuda, "device_count", lambda: gpus)
    found = settled(config_of(*flags))
    assert found.sync.link == link
    assert settled(found) == found, "a resumed run keeps its link"
    place(found, gpus)  # which refuses links that the devices can't have


@pytest.mark.parametrize(
    ("flags", "gpus", "said"),
    [
        (["--generator.count=2"], 2, "need 3 GPUs, but there are 2"),
        (["--generator.tensor_parallel=2"], 1, "tensor_parallel = 2, but there are 1 GPUs"),
        (["--sync.link=single_copy", "--model.dtype=bfloat16"], 0, "needs a GPU"),
        (
            ["--sync.link=nccl_direct", "--generator.kind=vllm"],
            0,
            '"nccl_direct" needs GPUs, and there are none',
        ),
        (["--trainer.ranks=4"], 4, "trainer.ranks = 4 need 5 GPUs, but there are 4"),
        (["--trainer.ranks=2"], 1, "trainer.ranks = 2, but there are 1 GPUs"),
        (["--sync.link=nccl"], 1, "can't connect a GPU with itself"),
        (
            ["--sync.link=nccl", "--generator.count=2", "--generator.device=cuda:0"],
            4,
            "can't connect a GPU with itself",
        ),
        ([*SERVER, "--trainer.ranks=9"], 8, "trainer.ranks = 9, but there are 8 GPUs"),
        (
            ["--generator.device=cuda:1", "--generator.tensor_parallel=2", "--trainer.device=cuda:0"],
            2,
            'generator.device = "cuda:1" with generator.tensor_parallel = 2 needs 3 GPUs, .* there are 2 here',
        ),
        (
            ["--trainer.device=cuda:1", "--trainer.ranks=2"],
            2,
            'trainer.device = "cuda:1" with trainer.ranks = 2 needs 3',
        ),
        (["--generator.device=cuda:0", "--trainer.ranks=2"], 2, "need 3 GPUs, but there are 2"),
        (["--generator.device=cuda:0"], 0, "needs 1 GPUs, .* there are 0"),
        ([*SINGLE_COPY, "--generator.device=cuda:1"], 1, "needs 2 GPUs, .* there are 1 here"),
        ([*SINGLE_COPY, "--generator.device=cpu"], 1, "needs a GPU"),
        ([*SINGLE_COPY, "--generator.device=cuda:1", "--trainer.device=cuda:0"], 2, "on the same GPUs"),
        ([*SINGLE_COPY, "--generator.device=cuda:0", "--trainer.device=cpu"], 2, "on the same GPUs"),
        ([*IN_TURNS, "--generator.count=2", "--generator.device=cuda:0"], 2, "puts 2 generators on the same GPU"),
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


def test_cores_are_shared_with_generators_of_this_host_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement.os, "sched_getaffinity", lambda _: range(12), raising=False)
    assert threads(0, config_of("--generator.count=2")) == 4
    assert threads(0, config_of(*LOCAL)) == 12
    assert threads(0, config_of(*LOCAL, "--trainer.ranks=2")) == 6
    assert threads(3, config_of(*LOCAL)) == 3


def test_cores_are_those_of_a_host_where_torchrun_has_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement.os, "sched_getaffinity", lambda _: range(12), raising=False)
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert threads(0, config_of("--generator.count=2", "--trainer.ranks=6")) == 3
    monkeypatch.setenv("GROUP_RANK", "1")
    assert threads(0, config_of("--generator.count=2", "--trainer.ranks=6")) == 6
