"""Imports vLLM in the process of an engine, and in the one that vLLM's core is forked from, before the engine is built.

This module imports nothing slow, so that both processes import at the same time.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
from collections.abc import Mapping
from importlib.util import find_spec
from multiprocessing import forkserver
from pathlib import Path

ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # CUDA does not work in a process that is forked after it was initialized
}
OWN_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"  # of the engine core
CORE_MODULES = ["vllm.v1.engine.core", "vllm.v1.worker.gpu_worker"]  # imported before the core is forked
GPU_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/dev/kfd"))  # of NVIDIA, of NVIDIA in WSL, and of AMD


def preload() -> None:
    """Import vLLM, here and in the fork server of its core on a host with GPUs. Uses no GPU."""
    if not find_spec("vllm"):
        return
    set_environment({})
    if any(map(Path.exists, GPU_DEVICES)) and os.environ.get(OWN_PROCESS) != "0":
        start_core_server()
    importlib.import_module("slipstream.generators.vllm.engine")
    importlib.import_module("vllm.v1.engine.llm_engine")


def set_environment(variables: Mapping[str, str]) -> None:
    """Set variables of vLLM that the user has not set: these, and those of any engine."""
    for name, value in (ENVIRONMENT | dict(variables)).items():
        os.environ.setdefault(name, value)


def start_core_server() -> None:
    """Start a fork server that imports vLLM, unless it runs."""
    multiprocessing.set_forkserver_preload(CORE_MODULES)
    forkserver.ensure_running()
