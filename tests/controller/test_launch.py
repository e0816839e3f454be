"""The start of trainer and engines, and their shares of a GPU."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from slipstream.config.loading import load_config
from slipstream.config.schema import ConfigError
from slipstream.controller import engine_restart as restart
from slipstream.controller.launch import Cluster
from slipstream.generators.vllm.launch import engine_arguments, share_in_turns, shared_cache_bytes
from slipstream.runtime.placement import Placement
from tests.processes import module_for_processes

SERVICES = """
import os
import time
from pathlib import Path

def write(event):
    with (Path(__file__).parent / "events").open("a") as file:
        file.write(f"{event} {os.environ['CUDA_VISIBLE_DEVICES']} {os.getpid()}\\n")

class Stub:
    def __init__(self, *arguments):
        write("starts")
        time.sleep(0.3)
        write("started")
    def __getattr__(self, name):
        if name == "run" or name.startswith("_"):
            raise AttributeError(name)
        async def answer(*arguments):
            if name == "offload":
                write(name)
            if name == "export":
                arguments[0].mkdir(parents=True)
            return {"tokens": 0, "busy_s": 0}
        return answer
    def close(self):
        write("ended")
"""


def test_engines_that_restart_on_one_gpu_start_after_all_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.runtime.runtime.gpus_here", lambda: 1)
    monkeypatch.setattr(restart, "save_tokenizer", lambda path, target: None)
    flags = ["--generator.engine=shared:Stub", "--trainer.kind=shared:Stub", "--generator.replicas=2",
             "--sync.link=checkpoint", "--sync.restart=true", "--sync.in_flight=retry"]  # fmt: skip
    config = load_config(None, ["--model.path=m", "--environment.name=e", *flags])

    async def main() -> None:
        pools = await Cluster.start(config, tmp_path / "run")
        try:
            await pools.link.publish(1)
        finally:
            await pools.close()

    with module_for_processes("shared", SERVICES, tmp_path / "shared", monkeypatch) as folder:
        asyncio.run(main())
        lines = [line.split() for line in (folder / "events").read_text().splitlines()]
    events, gpus, _ = zip(*lines, strict=True)
    assert set(gpus) == {"0"}
    assert [len(list(group)) for _, group in itertools.groupby(events, lambda event: event == "ended")] == [6, 2, 4, 3]


def test_colocated_engines_start_after_the_trainer_has_left_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.runtime.runtime.gpus_here", lambda: 1)
    flags = ["--generator.engine=shared:Stub", "--trainer.kind=shared:Stub", "--sync.placement=colocated",
             "--sync.link=shared", "--sync.in_flight=retry"]  # fmt: skip
    config = load_config(None, ["--model.path=m", "--environment.name=e", *flags])

    async def main() -> None:
        await (await Cluster.start(config, tmp_path / "run")).close()

    with module_for_processes("shared", SERVICES, tmp_path / "shared", monkeypatch) as folder:
        asyncio.run(main())
        lines = [line.split() for line in (folder / "events").read_text().splitlines()]
    (*events, _, _), processes = [line[0] for line in lines], [line[2] for line in lines]
    assert events == ["starts", "started", "offload", "starts", "started"]
    assert processes[0] == processes[1] == processes[2] != processes[3] == processes[4]


@pytest.mark.parametrize(
    ("placement", "share"),
    [
        (Placement(((0,),), (1,)), 0.85),
        (Placement(((0,),), (0,)), 0.4),
        (Placement(((0,), (0,)), ()), 0.4),
        (Placement(((0,), (0,)), (0,)), 0.267),
        (Placement(((0, 1), (1, 2)), (3,)), 0.4),
        (Placement(((),), ()), 0.85),
    ],
)
def test_engines_share_a_gpu_out(
    placement: Placement, share: float, patient: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config: Any = load_config(None, [f"--model.path={patient}", "--environment.name=e", "--generator.engine=vllm"])
    assert engine_arguments(config, placement.sharers(placement.generators[0]))["gpu_memory_utilization"] == share


def test_the_cache_of_an_engine_beside_others_is_its_share_without_weights_and_activations(patient: Path) -> None:
    flags = ["--generator.engine=vllm", "--model.dtype=bfloat16", f"--model.path={patient}", "--environment.name=e"]
    config: Any = load_config(None, flags)
    weights = sum(2 * p.numel() for p in AutoModelForCausalLM.from_pretrained(patient).parameters())
    gib = 2**30
    assert shared_cache_bytes(config, 0.4, 80 * gib) == pytest.approx(26 * gib - weights, abs=1)
    assert shared_cache_bytes(config, 0.4, 10 * gib) == pytest.approx(3 * gib - weights, abs=1)
    two: Any = load_config(None, [*flags, "--generator.tensor_parallel_size=2"])
    assert shared_cache_bytes(two, 0.4, 80 * gib) == pytest.approx(26 * gib - weights / 2, abs=1)
    half: Any = load_config(None, [*flags, "--generator.engine_args.quantization=fp8_per_channel"])
    quantized = shared_cache_bytes(half, 0.4, 80 * gib)
    model = AutoModelForCausalLM.from_pretrained(patient)
    matrices = [p for name, p in model.named_parameters() if p.dim() > 1 and "embed" not in name and "head" not in name]
    assert quantized == pytest.approx(26 * gib - weights + sum(p.numel() for p in matrices), abs=1)
    adapters: Any = load_config(None, [*flags, "--lora.rank=16", "--sync.link=lora", "--loop.max_lag=1"])
    slots = 2 * 4 * 16 * sum(sum(p.shape) for p in matrices)
    assert shared_cache_bytes(adapters, 0.4, 80 * gib) == pytest.approx(26 * gib - weights - slots, abs=1)
    with pytest.raises(ConfigError, match=r"share of its GPU is 0.0 GB; .* raise generator.gpu_memory_utilization"):
        shared_cache_bytes(config, 0.4, weights)


def test_an_engine_in_turns_takes_what_its_sequences_can_fill(patient: Path) -> None:
    """Weights, keys and values of all sequences at full length, and what vLLM needs besides; at most 0.85."""
    flags = [
        "--generator.engine=vllm",
        "--sync.placement=colocated",
        "--sync.in_flight=retry",
        "--model.dtype=bfloat16",
    ]
    flags += [f"--model.path={patient}", "--environment.name=e", "--generator.max_num_seqs=100"]

    def share(*more: str, gib: int = 80) -> float:
        return share_in_turns(load_config(None, [*flags, *more]), gib * 2**30)

    shape = AutoConfig.from_pretrained(patient)
    token = 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim * 2
    context = 40 * 2**30 // (100 * token)  # whose keys and values fill half of the GPU
    wanted = (1.1 * 40 + 6) / 80
    assert share(f"--generator.max_model_len={context}") == pytest.approx(wanted, abs=2e-3)
    assert share(f"--generator.max_model_len={context}", gib=160) == pytest.approx(wanted / 2, abs=2e-3)
    assert share(f"--generator.max_model_len={2 * context}") == 0.85
    assert share(f"--generator.max_model_len={context}", "--generator.gpu_memory_utilization=0.9") == 0.9
