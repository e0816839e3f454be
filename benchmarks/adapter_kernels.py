"""Microseconds of vLLM's kernels for adapters in a layer of a decode step, with vLLM's settings and the best found.

    python benchmarks/adapter_kernels.py [--shapes 1.7B 8B] [--sequences 256] [--search SECONDS] [--json FILE]

A layer's adapters take eight kernels: a "shrink" and an "expand" for each of its four matrix products (queries, keys
and values are one, gate and up projection another). Sequences use three versions of the adapters, of which six fit. All
are replayed as CUDA graphs, so the time is that of the kernels alone. Without `--search` only vLLM's settings are
measured. Needs a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from sampler import graph_ms
from work import conditions

from slipstream.plan.shapes import SHAPES

RANK, SLOTS = 32, 6
VERSIONS = (4, 3, 1)  # eighths of the sequences by the newest versions
Settings = dict[str, Any]


def products(shape: str) -> list[tuple[str, int, list[int]]]:
    """Name, inputs and outputs of a layer's matrix products."""
    sizes = SHAPES[shape]
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    return [
        ("query, key, value", sizes.hidden, [queries, keys, keys]), ("output", queries, [sizes.hidden]),
        ("gate, up", sizes.hidden, [sizes.intermediate] * 2), ("down", sizes.intermediate, [sizes.hidden]),
    ]  # fmt: skip


def metadata(sequences: int) -> tuple[Any, ...]:
    """The kernels' arguments that say which sequence uses which version."""
    from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta

    found = LoRAKernelMeta.make(SLOTS, sequences, "cuda")
    mapping = [slot for slot, eighths in enumerate(VERSIONS) for _ in range(-(-sequences * eighths // 8))][:sequences]
    torch.manual_seed(0)
    found.prepare_tensors(torch.tensor(mapping, dtype=torch.int32)[torch.randperm(sequences)])
    return found.meta_args(sequences, False)


def shrink(sequences: int, inputs: int, slices: int, which: tuple[Any, ...]) -> Callable[[], Any]:
    from vllm.lora.ops.triton_ops.lora_shrink_op import _lora_shrink

    x = torch.randn(sequences, inputs, device="cuda", dtype=torch.bfloat16)
    a = [torch.randn(SLOTS, 1, RANK, inputs, device="cuda", dtype=torch.bfloat16) for _ in range(slices)]
    y = torch.empty(slices, sequences, RANK, device="cuda")
    return lambda: _lora_shrink(x, a, y, *which, 1.0)


def expand(sequences: int, outputs: list[int], which: tuple[Any, ...]) -> Callable[[], Any]:
    from vllm.lora.ops.triton_ops.lora_expand_op import _lora_expand

    x = torch.randn(len(outputs), sequences, RANK, device="cuda")
    b = [torch.randn(SLOTS, 1, size, RANK, device="cuda", dtype=torch.bfloat16) for size in outputs]
    y = torch.zeros(sequences, sum(outputs), device="cuda", dtype=torch.bfloat16)
    return lambda: _lora_expand(x, b, y, *which, offset_start=0, add_inputs=True)


def candidates(kernel: str, inputs: int) -> Iterator[Settings]:
    common = {"num_ctas": 1, "max_nreg": None, "num_warps": 4}
    if kernel == "shrink":
        for m, k, split in itertools.product((16, 32, 64), (64, 128, 256), (4, 8, 16)):
            if m * k <= 8192 and inputs % (k * split) == 0:
                yield common | {"block_m": m, "block_n": RANK, "block_k": k, "split_k": split, "num_stages": 3}
    else:
        for m, n in itertools.product((32, 64, 128), (64, 128, 256)):
            yield common | {"block_m": m, "block_n": n, "block_k": RANK, "num_stages": 2}


def measure(kernel: str, call: Callable[[], Any], inputs: int, end: float) -> dict[str, Any]:
    """The time with vLLM's settings, and the best one that was found before `end`."""
    found: dict[str, Any] = {"kernel": kernel, "us": 1000 * graph_ms(call)}
    best, settings = found["us"], None
    for each in candidates(kernel, inputs):
        if time.monotonic() > end:
            break
        with mock.patch(f"vllm.lora.ops.triton_ops.lora_{kernel}_op.get_lora_op_configs", lambda *_, e=each, **__: e):
            best, settings = min((best, settings), (1000 * graph_ms(call), each), key=lambda pair: pair[0])
    return found | {"best_us": best, "settings": settings} if end else found


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--shapes", nargs="+", default=["1.7B", "8B"], choices=SHAPES)
    found.add_argument("--sequences", type=int, default=256)
    found.add_argument("--search", type=float, default=0.0, metavar="SECONDS")
    found.add_argument("--json", type=Path)
    return found


def main() -> None:
    options = parser().parse_args()
    if not torch.cuda.is_available():
        parser().error("needs a GPU")
    end = time.monotonic() + options.search if options.search else 0.0
    which, results = metadata(options.sequences), []
    for shape, (product, inputs, outputs) in ((s, p) for s in options.shapes for p in products(s)):
        for kernel, call in (
            ("shrink", shrink(options.sequences, inputs, len(outputs), which)),
            ("expand", expand(options.sequences, outputs, which)),
        ):
            results.append({"shape": shape, "product": product} | measure(kernel, call, inputs, end))
            print(json.dumps(results[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps({**conditions(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
