"""Assignment of GPUs and CPU threads to processes, on hosts of any size."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from slipstream.config.loading import load_config
from slipstream.config.schema import Config, ConfigError
from slipstream.runtime import placement
from slipstream.runtime.placement import Network, gpus_of_engine, idle_options, place, resolve_auto, threads, visible

SINGLE_COPY = ["--sync.link=single_copy", "--model.dtype=bfloat16"]
STAGES = ["--generator.engine_args.pipeline_parallel_size=2"]
SERVER = ["--generator.servers=['http://far:1']", "--sync.link=checkpoint"]
LOCAL = ["--generator.servers=['http://localhost:1', 'http://localhost:2']", "--sync.link=nccl"]
QUANTIZED = ["--generator.engine=vllm", "--generator.engine_args.quantization=fp8_per_channel"]
IN_TURNS = ["--sync.placement=colocated", "--sync.in_flight=retry"]


def config_of(*flags: str) -> Config:
    return load_config(None, ["--model.path=m", "--environment.name=e", "--generator.engine=vllm", *flags])


@pytest.mark.parametrize(
    "kind",
    [transformers.BloomConfig, transformers.FalconH1Config, transformers.GPT2Config, transformers.GPTNeoXConfig],
)
def test_engines_are_restarted_if_no_link_can_write_their_layout(
    tmp_path: Path, kind: type[transformers.PretrainedConfig]
) -> None:
    kind().save_pretrained(tmp_path)
    sync = resolve_auto(config_of(f"--model.path={tmp_path}")).sync
    assert (sync.link, sync.restart, sync.in_flight) == ("checkpoint", True, "retry")
    for others in (["--generator.engine=torch"], ["--sync.link=shared"], ["--lora.rank=4"]):
        assert not resolve_auto(config_of(f"--model.path={tmp_path}", *others)).sync.restart
    transformers.LlamaConfig().save_pretrained(tmp_path)
    assert resolve_auto(config_of(f"--model.path={tmp_path}")).sync.link == "shared"


@pytest.mark.parametrize(
    ("flags", "gpus", "generators", "trainer"),
    [
        ([], 0, ((),), ()),
        ([], 1, ((0,),), (0,)),
        ([], 2, ((0,),), (1,)),
        (["--generator.replicas=3"], 4, ((0,), (1,), (2,)), (3,)),
        (["--generator.tensor_parallel_size=2"], 4, ((0, 1),), (2,)),
        (["--generator.replicas=2", "--generator.tensor_parallel_size=2"], 8, ((0, 1), (2, 3)), (4,)),
        ([*STAGES, "--generator.replicas=2"], 8, ((0, 1), (2, 3)), (4,)),
        ([*STAGES, "--generator.tensor_parallel_size=2"], 8, ((0, 1, 2, 3),), (4,)),
        (STAGES, 0, ((),), ()),
        (["--trainer.ranks=4", "--generator.replicas=2"], 8, ((0,), (1,)), (2, 3, 4, 5)),
        (["--trainer.ranks=2"], 0, ((),), ()),
        (["--trainer.ranks=2", "--generator.device=cuda:0", "--trainer.device=cuda:0"], 2, ((0,),), (0, 1)),
        (["--trainer.device=cpu"], 2, ((0,),), ()),
        (["--generator.device=cuda:1", "--trainer.device=cuda:0"], 2, ((1,),), (0,)),
        (["--generator.device=cuda:0", "--trainer.device=cuda:0"], 2, ((0,),), (0,)),
        (["--sync.link=single_copy", "--model.dtype=bfloat16"], 4, ((0,),), (0,)),
        (
            [*SINGLE_COPY, "--generator.tensor_parallel_size=2", "--trainer.ranks=2", "--trainer.parallel=tensor"],
            2,
            ((0, 1),),
            (0, 1),
        ),
        (
            [*SINGLE_COPY, "--generator.replicas=2", "--trainer.ranks=2", "--trainer.parallel=ddp"],
            4,
            ((0,), (1,)),
            (0, 1),
        ),
        ([*SINGLE_COPY, "--generator.device=cuda:1"], 2, ((1,),), (1,)),
        ([*SINGLE_COPY, "--trainer.device=cuda:1"], 2, ((1,),), (1,)),
        ([*SINGLE_COPY, "--generator.device=cuda:1", "--trainer.device=cuda:1"], 2, ((1,),), (1,)),
        (["--generator.device=cuda:1"], 2, ((1,),), (0,)),
        (["--generator.device=cuda:1", "--trainer.ranks=2"], 4, ((1,),), (0, 2)),
        (["--generator.device=cpu", "--trainer.ranks=2"], 2, ((),), (0, 1)),
        (["--generator.device=cuda:1", *IN_TURNS], 2, ((1,),), (1,)),
        (["--trainer.ranks=2", "--generator.replicas=2", *IN_TURNS], 2, ((0,), (1,)), (0, 1)),
        (["--trainer.ranks=4", "--generator.tensor_parallel_size=2", *IN_TURNS], 4, ((0, 1),), (0, 1, 2, 3)),
        (["--trainer.ranks=2", "--generator.replicas=4", *IN_TURNS], 4, ((0,), (1,), (2,), (3,)), (0, 1)),
        (["--generator.replicas=2", "--generator.device=cuda:1"], 4, ((1,), (1,)), (0,)),
        (["--generator.replicas=2", "--trainer.device=cpu"], 1, ((0,), (0,)), ()),
        (SERVER, 0, (), ()),
        (SERVER, 2, (), (0,)),
        ([*SERVER, "--trainer.ranks=8"], 8, (), tuple(range(8))),
        ([*SERVER, "--trainer.device=cuda:1"], 2, (), (1,)),
        (LOCAL, 1, (), (0,)),
    ],
)
def test_generators_and_ranks_get_these_gpus(
    flags: list[str], gpus: int, generators: tuple[tuple[int, ...], ...], trainer: tuple[int, ...]
) -> None:
    found = place(config_of(*flags), gpus)
    assert (found.generators, found.trainer) == (generators, trainer)
    taken = [*trainer, *(gpu for each in generators for gpu in each)]
    assert found.shared == any(taken.count(gpu) > 1 for gpu in taken)


def test_added_engines_get_the_next_free_gpus_alone() -> None:
    planned = place(config_of("--generator.replicas=2"), 5)
    assert [gpus_of_engine(planned, number, 5) for number in range(4)] == [(0,), (1,), (3,), (4,)]
    assert [planned.sharers((gpu,)) for gpu in range(5)] == [1] * 5 and planned.sharers(()) == 1
    with pytest.raises(ConfigError, match="there are GPUs for 4 engines of 1, not for 5"):
        gpus_of_engine(planned, 4, 5)


def test_options_that_need_a_gpu_are_named_without_one() -> None:
    config = config_of("--trainer.offload_optimizer=true")
    assert idle_options(config, 0) == ["trainer.offload_optimizer"]
    assert not idle_options(config, 2) and not idle_options(config_of(), 0)


OWN_GPUS = ["--generator.device=cuda:0", "--trainer.device=cuda:1"]
ONE_GPU = ["--generator.device=cuda:1", "--trainer.device=cuda:1"]
SERVERS = ["--generator.servers=['http://localhost:1', 'http://127.0.0.1:2']"]


@pytest.mark.parametrize(
    ("flags", "gpus", "link"),
    [
        ([], 0, "shared"),
        ([], 1, "single_copy"),
        ([], 2, "nccl"),
        (["--generator.engine=torch"], 1, "shared"),
        (["--generator.engine=torch"], 2, "nccl"),
        (["--generator.engine=torch", "--lora.rank=4"], 2, "nccl"),
        (["--generator.engine=mine:Mine"], 2, "shared"),
        (["--trainer.kind=mine:Mine"], 2, "shared"),
        (["--generator.replicas=3", "--trainer.ranks=4"], 8, "nccl"),
        (["--generator.replicas=2", "--generator.device=cuda:0"], 4, "shared"),
        (["--generator.replicas=2"], 1, "shared"),
        (OWN_GPUS, 4, "nccl"),
        (ONE_GPU, 4, "single_copy"),
        (["--trainer.device=cpu"], 2, "shared"),
        (["--generator.device=cpu"], 2, "shared"),
        (["--sync.every=2"], 1, "shared"),
        (["--generator.engine_args.quantization=fp8_per_channel"], 1, "shared"),
        (["--model.dtype=float32"], 1, "shared"),
        (["--trainer.keep_compute_copy=false"], 1, "shared"),
        (["--lora.rank=4"], 1, "lora"),
        (["--lora.rank=4"], 0, "lora"),
        (["--lora.rank=4", *IN_TURNS], 1, "lora"),
        (IN_TURNS, 2, "shared"),
        (SERVERS, 0, "shared"),
        (SERVERS, 1, "shared"),
        (SERVERS, 2, "nccl"),
        ([*SERVERS, "--trainer.device=cpu"], 2, "shared"),
        (["--generator.servers=['http://far:1']"], 2, "delta"),
        (["--generator.servers=['http://far:1']", "--lora.rank=4"], 2, "lora"),
        (["--sync.restart=true", "--sync.in_flight=retry"], 2, "checkpoint"),
    ],
)
def test_auto_chooses_the_link_by_engine_adapters_and_placement(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], gpus: int, link: str
) -> None:
    monkeypatch.setattr(placement.torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(placement.torch.cuda, "device_count", lambda: gpus)
    found = resolve_auto(config_of(*flags))
    assert found.sync.link == link and found.sync.chosen.startswith(f"{link}: ")
    assert resolve_auto(found) == found, "a resumed run keeps its link"
    place(found, gpus)  # raises for links that these devices do not support


@pytest.mark.parametrize(
    ("flags", "gpus", "said"),
    [
        (["--generator.replicas=2"], 2, "need 3 GPUs, but there are 2"),
        (["--generator.tensor_parallel_size=2"], 1, "tensor_parallel_size = 2, but there are 1 GPUs"),
        (STAGES, 1, "= 1 and generator.engine_args.pipeline_parallel_size = 2, but there are 1 GPUs"),
        (STAGES, 2, "pipeline_parallel_size = 2 and trainer.ranks = 1 need 3 GPUs, but there are 2"),
        (["--sync.link=single_copy", "--model.dtype=bfloat16"], 0, "needs a GPU"),
        (
            ["--sync.link=nccl_direct", "--generator.engine=vllm"],
            0,
            '"nccl_direct" needs GPUs, and there are none',
        ),
        (["--trainer.ranks=4"], 4, "trainer.ranks = 4 need 5 GPUs, but there are 4"),
        (["--trainer.ranks=2"], 1, "trainer.ranks = 2, but there are 1 GPUs"),
        (["--sync.link=nccl"], 1, "can't connect a GPU with itself"),
        (
            ["--sync.link=nccl", "--generator.replicas=2", "--generator.device=cuda:0"],
            4,
            "can't connect a GPU with itself",
        ),
        ([*SERVER, "--trainer.ranks=9"], 8, "trainer.ranks = 9, but there are 8 GPUs"),
        (
            ["--generator.device=cuda:1", "--generator.tensor_parallel_size=2", "--trainer.device=cuda:0"],
            2,
            'generator.device = "cuda:1" with generator.tensor_parallel_size = 2 needs 3 GPUs, .* there are 2 here',
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
        ([*IN_TURNS, "--generator.replicas=2", "--generator.device=cuda:0"], 2, "puts 2 generators on the same GPU"),
    ],
)
def test_too_few_gpus_are_refused(flags: list[str], gpus: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        place(config_of(*flags), gpus)


def test_a_child_process_sees_its_subset_of_the_visible_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible((1, 2)) == {"CUDA_VISIBLE_DEVICES": "1,2"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7")
    assert visible((1, 2)) == {"CUDA_VISIBLE_DEVICES": "5,7"}
    assert visible(()) == {"CUDA_VISIBLE_DEVICES": ""}


def test_cores_are_divided_among_the_processes_of_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement.os, "sched_getaffinity", lambda _: range(12), raising=False)
    assert threads(0, config_of("--generator.replicas=2")) == 4
    assert threads(0, config_of(*LOCAL)) == 12
    assert threads(0, config_of(*LOCAL, "--trainer.ranks=2")) == 6
    assert threads(3, config_of(*LOCAL)) == 3


@pytest.mark.parametrize(
    ("network", "flags", "chosen"),
    [
        (Network(1.1e8), [], "delta: 0.88 Gbit/s between the slowest hosts, less than 10 Gbit/s"),
        (Network(2.5e9), [], "nccl: 20 Gbit/s between the slowest hosts, at least 10 Gbit/s"),
        (Network(1.1e8, rdma=True), [], "nccl: all hosts have InfiniBand or RoCE"),
        (None, [], "nccl: several hosts"),
        (Network(1.1e8), ["--lora.rank=4"], "lora: vLLM serves adapters"),
        (Network(1.1e8), IN_TURNS, "shared: engines and trainer take turns"),
        (Network(1.1e8), QUANTIZED, "nccl: engines quantize weights"),
    ],
)
def test_auto_chooses_the_link_between_hosts_by_their_network(
    network: Network | None, flags: list[str], chosen: str
) -> None:
    found = resolve_auto(config_of(*flags), 4, 2, network)
    assert found.sync.chosen == chosen and found.sync.link == chosen.partition(":")[0]
