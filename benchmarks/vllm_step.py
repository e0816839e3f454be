"""What a decode step of a vLLM engine spends its time on: the GPU's busy time, its kernels, and the host's time.

    python benchmarks/vllm_step.py [--shape 1.7B] [--slots 256] [--json FILE] [config flags]

vLLM's core runs in this process, so that one profiler sees both. All slots decode; prompts have 128 tokens, and
completions about 230 when the first steps are measured. The profiler slows the host down, but not kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from work import conditions, mixed_prompt, save_model, vllm_config

from slipstream.config.schema import Config
from slipstream.generators.vllm.engine import VllmEngine
from slipstream.rollout import Sampling

GPU = torch.cuda.is_available()
PROMPT, WARM_UP = 128, 150  # tokens, steps
NAME, SHOWN = 110, 30  # characters of a kernel's name; kernels in the record


def configure(options: argparse.Namespace, model: str, flags: list[str]) -> Config:
    return vllm_config(model, options.slots, PROMPT, options.completion, flags)


def synchronize() -> None:
    if GPU:
        torch.cuda.synchronize()


def timed(engine: VllmEngine, steps: int) -> dict[str, float]:
    """Milliseconds of a step, and of processor time in it."""
    synchronize()
    began, processor = time.perf_counter(), time.process_time()
    for _ in range(steps):
        engine.step()
    synchronize()
    wall, used = time.perf_counter() - began, time.process_time() - processor
    return {"step_ms": wall / steps * 1e3, "processor_ms": used / steps * 1e3}


def profiled(engine: VllmEngine, steps: int) -> dict[str, Any]:
    """Milliseconds that the device is busy in a step, and of its kernels, longest first."""
    with profile(activities=[ProfilerActivity.CUDA if GPU else ProfilerActivity.CPU]) as found:
        for _ in range(steps):
            engine.step()
        synchronize()
    events = [event for event in found.events() if str(event.device_type).endswith("CUDA" if GPU else "CPU")]
    kernels, busy, end = defaultdict[str, float](float), 0.0, 0.0
    for span, name in sorted(((event.time_range.start, event.time_range.end), event.name) for event in events):
        kernels[name[:NAME]] += (span[1] - span[0]) / steps / 1e3
        busy += max(0.0, span[1] - max(span[0], end))
        end = max(end, span[1])
    longest = sorted(kernels.items(), key=lambda kernel: -kernel[1])[:SHOWN]
    return {"busy_ms": busy / steps / 1e3, "kernels": len(events) / steps, "kernels_ms": dict(longest)}


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--shape", default="1.7B")
    found.add_argument("--slots", type=int, default=256)
    found.add_argument("--completion", type=int, default=640)
    found.add_argument("--json", type=Path)
    return found


def main() -> None:
    options, flags = parser().parse_known_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    found: dict[str, Any] = conditions()
    with tempfile.TemporaryDirectory() as folder:
        save_model(options.shape, Path(folder), torch.bfloat16 if GPU else torch.float32)
        engine = VllmEngine(configure(options, folder, flags))
        for i in range(options.slots):
            sampling = Sampling(max_tokens=options.completion, ignore_eos=True)
            engine.submit(i, mixed_prompt(options.shape, PROMPT, i), sampling)
        for _ in range(WARM_UP):
            engine.step()
        found |= {**timed(engine, 80), **profiled(engine, 30)}
    print(json.dumps({name: found[name] for name in ("step_ms", "processor_ms", "busy_ms", "kernels")}), flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
