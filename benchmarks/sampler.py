"""Milliseconds to sample a token and its log-probability for each sequence of a decode step, by vLLM and in one pass.

    python benchmarks/sampler.py [--sequences 64 256 512] [--vocabulary 151936] [--json FILE]     # needs a GPU

vLLM's kernels are those of 0.25. All start from logits in bfloat16 and are replayed as CUDA graphs, so the time is that
of the kernels alone. `error` is the largest difference of the log-probabilities in one pass from those of torch.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from work import conditions

CALLS, ROUNDS = 14, 5


def graph_ms(call: Callable[[], Any]) -> float:
    """Milliseconds of a call on the GPU, the median of rounds of a CUDA graph of several calls."""
    call()  # compiles kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    times = []
    for _ in range(ROUNDS + 1):
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        times.append(began.elapsed_time(ended) / CALLS)
    return statistics.median(times[1:])


def measure(sequences: int, vocabulary: int) -> dict[str, float]:
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
    from vllm.v1.worker.gpu.sample.logprob import compute_topk_logprobs

    from slipstream.generators.vllm.sampling_kernels import sample

    torch.manual_seed(0)
    logits = (torch.randn(sequences, vocabulary, device="cuda") * 2).bfloat16()
    states = torch.arange(sequences, device="cuda", dtype=torch.int32)
    temperatures = torch.ones(sequences, device="cuda")
    seeds, positions = torch.randint(0, 4096, (2, sequences), device="cuda")

    def vllm() -> Any:
        copied = torch.empty_like(logits, dtype=torch.float32).copy_(logits)
        tokens = gumbel_sample(copied, states, temperatures, seeds, positions, apply_temperature=False, use_fp64=False)
        return compute_topk_logprobs(copied, 0, tokens)

    def one_pass() -> tuple[Tensor, Tensor]:
        return sample(logits, states, temperatures, seeds, positions)

    found = {"vllm_ms": graph_ms(vllm), "one_pass_ms": graph_ms(one_pass)}
    tokens, logprobs = one_pass()
    exact = torch.log_softmax(logits.double(), -1).gather(1, tokens[:, None])[:, 0]
    return found | {"error": (logprobs - exact).abs().max().item()}


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--sequences", type=int, nargs="+", default=[64, 256, 512])
    found.add_argument("--vocabulary", type=int, default=151936)
    found.add_argument("--json", type=Path)
    return found


def main() -> None:
    given = parser().parse_args()
    found: dict[str, Any] = conditions() | {"results": {}}
    for sequences in given.sequences:
        found["results"][str(sequences)] = measure(sequences, given.vocabulary)
        print(sequences, json.dumps(found["results"][str(sequences)]), flush=True)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
