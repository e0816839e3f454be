"""Tokens per second of the embedded generator and of transformers' `generate`, interleaved in one run.

    python benchmarks/generation.py [--rounds 5] [--threads 2] [--json benchmarks/results/generation.json]

Two shapes of Qwen3 in float32 (about 1 M and 11 M parameters), random weights, sampling at temperature 1, the
log-probability of every sampled token computed by both. Two loads: 64 sequences of 64 tokens, and 256 sequences of
lengths uniform in 16..256 through 64 slots, which `generate` decodes in four batches, each as long as its longest.
`generate` runs with its dynamic and with its static cache (compilation off), and the faster one counts. It runs with
log-probabilities (`output_logits`) and without, to separate their cost. Prompts have 16 tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path

import torch
from transformers import GenerationConfig, Qwen3ForCausalLM
from work import build_model, conditions

from slipstream.generators.torch.engine import Engine
from slipstream.rollout import Sampling

PROMPT = 16


def ours(engine: Engine, prompts: list[list[int]], lengths: list[int]) -> float:
    began = time.perf_counter()
    for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        engine.submit(i, prompt, Sampling(max_tokens=length, seed=i))
    tokens = 0
    while engine.busy:
        tokens += sum(len(c.token_ids) for _, c in engine.step())
    assert tokens == sum(lengths)
    return tokens / (time.perf_counter() - began)


@torch.inference_mode()
def theirs(
    model: Qwen3ForCausalLM, prompts: list[list[int]], lengths: list[int], cache: str, slots: int, logprobs: bool
) -> float:
    began = time.perf_counter()
    for at in range(0, len(prompts), slots):
        ids, longest = torch.tensor(prompts[at : at + slots]), max(lengths[at : at + slots])
        config = GenerationConfig(
            max_new_tokens=longest, min_new_tokens=longest, do_sample=True, top_k=0, pad_token_id=0,
            cache_implementation=cache, output_logits=logprobs, return_dict_in_generate=True, disable_compile=True,
        )  # fmt: skip
        out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        if logprobs:
            for step, logits in enumerate(out.logits):
                logits.log_softmax(-1).gather(-1, out.sequences[:, PROMPT + step, None])
    return sum(lengths) / (time.perf_counter() - began)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--rounds", type=int, default=5)
    found.add_argument("--threads", type=int, default=2)
    found.add_argument("--json", type=Path)
    return found


def main() -> None:
    options = parser().parse_args()
    torch.set_num_threads(options.threads)
    rng = random.Random(0)
    loads = {"equal": [64] * 64, "mixed": [rng.randint(16, 256) for _ in range(256)]}
    results = []
    for shape in ("1M", "11M"):
        model, engine = build_model(shape), Engine(build_model(shape), slots=64)
        parameters = sum(p.numel() for p in model.parameters())
        for load, lengths in loads.items():
            prompts = [[rng.randrange(1000) for _ in range(PROMPT)] for _ in lengths]
            rates: dict[str, list[float]] = {}
            for _ in range(options.rounds):
                rates.setdefault("slipstream", []).append(ours(engine, prompts, lengths))
                for cache in ("dynamic", "static"):
                    for logprobs in (True, False):
                        name = f"generate {cache}{'' if logprobs else ', no log-probabilities'}"
                        rates.setdefault(name, []).append(theirs(model, prompts, lengths, cache, 64, logprobs))
            medians = {name: statistics.median(values) for name, values in rates.items()}
            best = max(medians[f"generate {cache}"] for cache in ("dynamic", "static"))
            fastest = max(value for name, value in medians.items() if name != "slipstream")
            ratio, strict = medians["slipstream"] / best, medians["slipstream"] / fastest
            results.append(
                {"shape": shape, "parameters": parameters, "load": load, "tokens_per_second": medians,
                 "ratio": ratio, "ratio_without_logprobs": strict}
            )  # fmt: skip
            print(f"{shape:>4} {load:>6}: {ratio:.2f}x ({strict:.2f}x)  ", end="")
            print("  ".join(f"{name} {value:,.0f}" for name, value in medians.items()), flush=True)
    if options.json:
        options.json.write_text(json.dumps({**conditions(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
