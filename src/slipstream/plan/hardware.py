"""GPU kinds, and rates: shares of the data sheet that kernels reach, and times of a host or of a measured run.

Sources: NVIDIA's data sheets for bandwidth and dense bfloat16 operations (H100 2023, H200 2024, A100 2021, B200 2025,
L40S and L4 2023, A10 2021, H20 2024, GeForce RTX 4090 2022). Memory is what CUDA reports as total, which is less than
the data sheet says. NVLink is per direction; GPUs without it use PCIe.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from slipstream.config.schema import ConfigError

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU: memory in bytes, memory bandwidth and link in bytes/s, dense bfloat16 operations/s."""

    name: str
    memory: float
    bandwidth: float
    operations: float
    link: float


def _gpu(name: str, gib: float, tb_s: float, tflops: float, link_gb_s: float) -> Gpu:
    return Gpu(name, gib * GIB, tb_s * 1e12, tflops * 1e12, link_gb_s * 1e9)


GPUS = {gpu.name: gpu for gpu in (
    _gpu("h100", 79.2, 3.35, 989, 450), _gpu("h100-pcie", 79.1, 2.0, 756, 64), _gpu("h200", 139.8, 4.8, 989, 450),
    _gpu("h20", 95.1, 4.0, 148, 450), _gpu("b200", 178.4, 8.0, 2250, 900), _gpu("a100", 79.2, 2.039, 312, 300),
    _gpu("a100-40gb", 39.4, 1.555, 312, 300), _gpu("l40s", 44.4, 0.864, 362, 32), _gpu("l4", 22.0, 0.3, 121, 32),
    _gpu("a10", 22.0, 0.6, 125, 32), _gpu("rtx4090", 23.5, 1.008, 165, 32),
)}  # fmt: skip


def kind_of(name: str) -> Gpu | None:
    """The GPU kind that CUDA names so; None if it is not in the table."""
    words = re.split(r"[^a-z0-9]+", name.lower().replace("rtx 4090", "rtx4090"))
    found = max((kind for kind in GPUS if kind.partition("-")[0] in words), key=len, default=None)
    if found and "-" in found and not set(found.split("-")) <= set(words):
        found = found.partition("-")[0]
    return GPUS[found] if found else None


def find_gpu(name: str) -> Gpu:
    """The GPU kind of this name, which may be CUDA's. Raises `ConfigError`."""
    key = name.lower().replace("_", "-").removeprefix("nvidia-")
    if found := GPUS.get(key) or kind_of(key):
        return found
    close = difflib.get_close_matches(key, GPUS, 1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    raise ConfigError(f"--gpu {name}: unknown kind of GPU{hint}; known are {', '.join(GPUS)}")


@dataclass(frozen=True)
class Cluster:
    """`gpus` GPUs of one kind on hosts of `per_node`, with a network of `network` bytes/s between two hosts."""

    gpu: Gpu
    gpus: int
    per_node: int = 8
    network: float = 50e9  # 400 Gbit/s


@dataclass(frozen=True)
class Rates:
    """Shares of the data sheet's rates that programs reach, and the times that do not depend on the GPU.

    Defaults were fitted to measurements on H200s: decoding and the host's time to vLLM 0.25 with a 1.7 B shape and at
    most 256 sequences (`benchmarks/results/vllm_core_batches_h200.json` and whole runs), training and activations to
    `trainer_h200.json`, publishes to `publish_h200x1.json` and `end_to_end_h200x2.json`.
    """

    bandwidth: float = 0.80  # of decoding
    prefill: float = 0.50  # of operations
    train: float = 0.50  # of operations, with wide layers; narrow ones reach less
    narrow: float = 950.0  # hidden size at which training reaches 63% of that
    experts: float = 0.70  # of the training rate of dense layers
    link: float = 0.70
    host_step_s: float = 2.2e-3  # of an engine: scheduling, sampling and replies
    host_pair_s: float = 1e-8  # times the square of the number of sequences
    step_overhead_s: float = 0.06  # between two steps of the trainer: records, checksums, the start of a publish
    all_reduce_s: float = 15e-6  # latency of one between the GPUs of an engine
    decode_fixed_s: float = 0.0  # of a step with n sequences, fixed + n * sequence, if measured instead of computed
    decode_sequence_s: float = 0.0
    decode_reference: tuple[int, float] = (1, 0.0)  # tensor parallel size and mean context of that measurement
    train_token_s: float = 0.0  # per token and rank, if measured
    train_fixed_s: float = 0.0
    engine_tokens_per_s: float = 0.0  # of one engine at any load, if given

    @property
    def measured_decode(self) -> bool:
        """Whether decode steps, with all that an engine does in them, were measured."""
        return bool(self.decode_fixed_s or self.decode_sequence_s)
