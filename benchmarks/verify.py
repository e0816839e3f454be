"""`slipstream verify` over engines, links and interruption modes, as one table.

    python benchmarks/verify.py --shape 0.6B --dtype bfloat16 vllm:nccl:recompute:1 vllm:checkpoint:recompute:1

A case is engine:link:in_flight:tensor_parallel_size, followed by further options as section.option=value, separated by
commas. All cases use one model of random weights.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
import traceback
from dataclasses import asdict
from pathlib import Path

import torch
from work import conditions, save_model

from slipstream.config.loading import load_config
from slipstream.config.schema import Config
from slipstream.tools.verify import verify


def configure(model: str, dtype: str, case: str) -> Config:
    head, *more = case.split(",")
    engine, link, interruption, tensor_parallel = head.split(":")
    return load_config(None, [
        f"--model.path={model}", f"--model.dtype={dtype}", "--environment.name=addition",
        f"--generator.engine={engine}", f"--sync.link={link}", f"--sync.in_flight={interruption}",
        f"--generator.tensor_parallel_size={tensor_parallel}", "--generator.max_model_len=1024",
        *(f"--{option}" for option in more),
    ])  # fmt: skip


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("cases", nargs="+")
    found.add_argument("--shape", default="1M")
    found.add_argument("--dtype", default="float32")
    found.add_argument("--prompts", type=int, default=32)
    found.add_argument(
        "--tokens", type=int, help="of a completion; by default lengths are tried until one outlasts the publish"
    )
    found.add_argument("--after", type=int, default=24)
    found.add_argument("--json", type=Path)
    return found


def main() -> None:
    options = parser().parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        save_model(options.shape, Path(folder), getattr(torch, options.dtype))
        for case in options.cases:
            began = time.perf_counter()
            sizes = {"prompts": options.prompts, "tokens": options.tokens, "after": options.after}
            try:
                found = asyncio.run(verify(configure(folder, options.dtype, case), **sizes))
                result = {"case": case, "exact": found.exact, **asdict(found)}
            except Exception as error:
                traceback.print_exc()
                result = {"case": case, "exact": False, "error": f"{type(error).__name__}: {error}"}
            result["seconds"] = round(time.perf_counter() - began, 1)
            print(json.dumps(result), flush=True)
            results.append(result)
            if options.json:
                options.json.write_text(json.dumps({**conditions(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
