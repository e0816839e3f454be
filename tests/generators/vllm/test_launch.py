"""The error for a user if vLLM does not start, from messages of vLLM 0.25; messages of its processes are in the log."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from slipstream.config.schema import ConfigError
from slipstream.generators.vllm import launch
from slipstream.generators.vllm.launch import (
    MIN_CPU_CACHE_BYTES,
    OWN_PROCESS,
    cause,
    cpu_arguments,
    start_vllm,
    validate_head_size,
    validate_mamba,
)
from slipstream.generators.vllm.preload import ENVIRONMENT
from tests.conftest import build_model

CORE = "(EngineCore pid=4242) ERROR 07-01 12:00:00 [core.py:1231] "
FULL = (
    "Free memory on device cuda:0 (10.52/139.8 GiB) on startup is less than desired GPU memory utilization (0.85, "
    "118.83 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
)
LARGE = (
    "CUDA out of memory. Tried to allocate 2.32 GiB. GPU 0 has a total capacity of 139.80 GiB of which 1.20 GiB is "
    "free. Process 4242 has 138.60 GiB memory in use. Of the allocated memory 137.90 GiB is allocated by PyTorch, and "
    "12.00 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
NO_CACHE = (
    "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine "
    "(this flag also controls CPU memory reservation on the CPU backend, despite its name)."
)
LONG = (
    "To serve at least one request with the model's max seq len (40960), (4.38 GiB KV cache is needed, which is larger "
    "than the available KV cache memory (1.2 GiB). Based on the available memory, the estimated maximum model length "
    "is 11216. Try increasing `gpu_memory_utilization` (which also controls CPU memory on the CPU backend) or "
    "decreasing `max_model_len` when initializing the engine."
)
FULL_HOST = (
    "Available memory on node 0 (15.11/23.34 GiB) on startup is less than desired CPU memory utilization (0.9, "
    "21.0 GiB). On the CPU backend, the `--gpu-memory-utilization` flag controls the fraction of CPU memory reserved "
    "(despite its name). To resolve: decrease `--gpu-memory-utilization` or reduce CPU memory used by other processes."
)
SMALL_SHARE = (
    "Available memory on node 0 (15.11/23.34 GiB) on kv cache allocation is less than requested memory for kv "
    "(-0.62/0.23 GiB). Reduce CPU memory used by other processes."
)
CASES = {
    "full host": (f"ValueError: {FULL_HOST}", "15.11/23.34 GiB", "lower generator.gpu_memory_utilization"),
    "small share": (f"ValueError: {SMALL_SHARE}", "-0.62/0.23 GiB", "give generator.gpu_memory_utilization a share"),
    "full": (f"ValueError: {FULL}", "10.52/139.8 GiB", "lower generator.gpu_memory_utilization"),
    "large": (
        f"torch.OutOfMemoryError: {LARGE}",
        "Tried to allocate 2.32 GiB",
        "lower generator.gpu_memory_utilization or",
    ),
    "no cache": (
        f"ValueError: {NO_CACHE}",
        "No available memory for the cache",
        "raise generator.gpu_memory_utilization",
    ),
    "long": (
        f"ValueError: {LONG}",
        "max seq len (40960)",
        "raise generator.gpu_memory_utilization, or lower generator.max_model_len",
    ),
}
SUMMARY = RuntimeError(
    "Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}"
)


def log_of(failure: str, before: str = "") -> str:
    """A start that failed in a process of its own, as vLLM logs it."""
    lines = [
        "EngineCore failed to start.",
        "Traceback (most recent call last):",
        '  File "/vllm/v1/engine/core.py", line 1205, in run_engine_core',
        "    raise ValueError(",
        failure,
    ]
    summary = f"Traceback (most recent call last):\n  ...\nRuntimeError: {SUMMARY}\n"
    return before + "".join(f"{CORE}{line}\n" for line in lines) + summary


def test_the_cpu_cache_size_is_the_option_or_fits_the_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sequence = 2 * 3 * 2 * 8 * 4  # bytes a token: keys and values, layers, heads, width, float32
    build_model(max_position_embeddings=2_000_000).config.save_pretrained(tmp_path)
    model = str(tmp_path), torch.float32
    assert "kv_cache_memory_bytes" not in cpu_arguments(*model, 0, 0.3)
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**22}.__getitem__)
    for context, room in ((0, 2_000_000 * sequence), (512, 512 * sequence)):
        assert cpu_arguments(*model, context, 0.0)["kv_cache_memory_bytes"] == MIN_CPU_CACHE_BYTES + room
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**18}.__getitem__)
    assert cpu_arguments(*model, 0, 0.0)["kv_cache_memory_bytes"] == MIN_CPU_CACHE_BYTES + 2**28


@pytest.mark.parametrize("case", CASES)
def test_too_little_memory_is_an_error_of_one_line_that_names_the_option(case: str, tmp_path: Path) -> None:
    failure, said, remedy = CASES[case]
    log, last = tmp_path / "generator_0.log", f"{CORE}ValueError: of the start before this\n"
    warned = "WARNING 07-01 12:00:00 [registry.py:1] ImportError: no flash_attn_3\n"
    log.write_text(last + log_of(failure, warned))
    in_one_process = ValueError(failure.partition(": ")[2])
    for line in (
        cause("generator", SUMMARY, log, len(last)),
        cause("generator", in_one_process, log, 0),
        cause("generator", in_one_process, None, 0),
    ):
        assert said in line and f"; {remedy}" in line and "\n" not in line
        assert "before this" not in line and "flash_attn" not in line and len(line) < 600
    assert f"(log: {log})" in cause("generator", SUMMARY, log, len(last))


def test_errors_of_a_teacher_name_its_options() -> None:
    out_of_memory = RuntimeError(CASES["large"][0])
    options = (
        "lower teacher.gpu_memory_utilization or max_num_seqs in teacher.engine_args, "
        ".* tensor_parallel_size in teacher.engine_args$"
    )
    assert re.search(options, cause("teacher", out_of_memory, None, 0))
    assert "generator." not in cause("teacher", RuntimeError(CASES["full"][0]), None, 0)


def test_a_used_port_is_named(tmp_path: Path) -> None:
    """Workers of an engine connect at a port that vLLM picks; torch reports that it is used."""
    taken = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(RuntimeError) as raised:
        TCPStore("127.0.0.1", taken.port, is_master=True, wait_for_workers=False)
    log = tmp_path / "generator_0.log"
    log.write_text(log_of(f"torch.distributed.DistNetworkError: {raised.value}"))
    for line in (cause("generator", raised.value, log, 0), cause("generator", SUMMARY, log, 0)):
        assert f"port: {taken.port}" in line and "address already in use" in line and "; another program" in line


def test_unknown_errors_are_reported_unchanged(tmp_path: Path) -> None:
    log = tmp_path / "generator_0.log"
    log.write_text(log_of("ValueError: this shape is not known"))
    assert cause("generator", SUMMARY, log, 0) == f"ValueError: this shape is not known (log: {log})"


def test_head_sizes_without_a_vllm_kernel_are_refused(tmp_path: Path) -> None:
    build_model(head_dim=16).save_pretrained(tmp_path)
    for supported in ([16, 32], []):
        validate_head_size(str(tmp_path), supported)
    with pytest.raises(ConfigError, match=r"head dimension of 16, and vLLM on a CPU supports 32, 64; use a GPU"):
        validate_head_size(str(tmp_path), [32, 64])


def test_mamba_models_without_a_vllm_kernel_are_refused(tmp_path: Path) -> None:
    transformers.MambaConfig(num_hidden_layers=2).save_pretrained(tmp_path)
    validate_mamba(str(tmp_path), has_kernel=True)
    with pytest.raises(ConfigError, match=r"is a mamba, and vLLM on a CPU has no kernel for .* layers; use a GPU"):
        validate_mamba(str(tmp_path), has_kernel=False)
    transformers.Mamba2Config(num_hidden_layers=2).save_pretrained(tmp_path)
    validate_mamba(str(tmp_path), has_kernel=False)


def test_the_cache_of_a_model_without_positions_or_attention_is_small(tmp_path: Path) -> None:
    transformers.MambaConfig(num_hidden_layers=2).save_pretrained(tmp_path)
    assert cpu_arguments(str(tmp_path), torch.float32, 0, 0.0)["kv_cache_memory_bytes"] == MIN_CPU_CACHE_BYTES


def test_models_that_vllm_serves_no_adapters_for_are_refused_with_the_alternatives() -> None:
    told = cause("generator", ValueError("When using LoRA, vocab size must be <= 258048"), None, 0)
    assert told.endswith('<= 258048; train all weights (lora.rank = 0), or set generator.engine = "torch"')
    told = cause("generator", ValueError("BloomForCausalLM does not support LoRA yet."), None, 0)
    assert told.endswith("LoRA yet.; train all weights (lora.rank = 0), or give another model")


@pytest.mark.parametrize(
    ("gpu", "given", "engine_args", "forked"),
    [
        (True, {}, {}, True),
        (True, {OWN_PROCESS: "0"}, {}, False),
        (True, {}, {"numa_bind": True}, False),
        (False, {}, {}, False),
        (False, {OWN_PROCESS: "1"}, {}, False),
    ],
)
def test_the_core_of_vllm_is_forked_only_if_it_has_a_process_on_a_gpu(
    gpu: bool, given: dict[str, str], engine_args: dict[str, bool], forked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not if an option of vLLM needs a process that is spawned. The user's variables come first."""
    pytest.importorskip("vllm")
    for name in (*ENVIRONMENT, OWN_PROCESS, "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "")  # so that the variable is restored
        monkeypatch.delenv(name)
    for name, value in {"VLLM_CACHE_ROOT": "/caches", **given}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    forks = list[str]()
    monkeypatch.setattr(launch, "fork_core", lambda: forks.append("core"))
    start_vllm("generator", lambda: None, None, engine_args)
    assert bool(forks) == forked
    assert os.environ.get(OWN_PROCESS) == given.get(OWN_PROCESS, None if gpu else "0")
    assert os.environ.get("TRITON_CACHE_DIR") == ("/caches/triton" if gpu else None)


FORKED = """
import multiprocessing, os, sys
from multiprocessing import forkserver
from slipstream.generators.vllm.compat import _CoreContext
forkserver.ensure_running()
os.environ["GIVEN"] = "later"
os.environ.pop("TAKEN")
os.environ["SLIPSTREAM_LOG"] = os.environ["LATER_LOG"]
core = _CoreContext().Process(target=os.system, args=("echo $GIVEN $TAKEN >&2",))
core.start()
core.join()
"""


def test_a_forked_core_has_the_environment_and_the_log_of_the_engine(tmp_path: Path) -> None:
    """And not those of the fork server, which was started before."""
    environment = os.environ | {"GIVEN": "at first", "TAKEN": "at first", "LATER_LOG": str(tmp_path / "log")}
    found = subprocess.run([sys.executable, "-c", FORKED], env=environment, capture_output=True, text=True, check=True)
    assert (tmp_path / "log").read_text().split() == ["later"]
    assert not found.stderr


WITHOUT_CUDA = """
import multiprocessing, sys
from slipstream.generators.vllm import compat, preload
preload.CORE_MODULES = sys.argv[1:]
preload.start_core_server()
print(type(compat._core_context(lambda: multiprocessing.get_context("spawn"))).__name__)
"""


@pytest.mark.parametrize(("imported", "context"), [("innocent", "_CoreContext"), ("initializes", "SpawnContext")])
def test_a_core_is_spawned_if_an_import_has_initialized_cuda(imported: str, context: str, tmp_path: Path) -> None:
    """CUDA does not work in processes that are forked later; a stand-in says so, as torch does on hosts with GPUs."""
    (tmp_path / "innocent.py").write_text("import torch")
    (tmp_path / "initializes.py").write_text("import torch\ntorch.cuda._is_in_bad_fork = lambda: True")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", WITHOUT_CUDA, imported]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.split() == [context]
    assert ("can't be forked" in found.stderr) == (imported == "initializes")
