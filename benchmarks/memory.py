"""Peak memory and speed of trainer steps beside their estimates, for models on cards of a given memory.

    python benchmarks/memory.py [--recipes NAME ...] [--limit-s 300] [--json FILE] [config flags]
    python benchmarks/memory.py --small           # tiny models on a CPU, to test this script

Each recipe is a trainer of random weights under `trainer.memory = "auto"` for a card of that memory; torch's allocator
is limited to what such a card has beside the CUDA context. Recipes that need more GPUs, or larger ones, are left out.
A recipe takes one warm-up step and the best of two more, without compiling unless `--compile` is given, and runs in
processes of its own. Config flags are added to those of every recipe, and win over "auto".

`used_gb` is what the process holds of the GPU at its peak: the allocator's reserved memory and the CUDA context.
`allocated_gb` is what tensors took of it. `estimate_gb` is that of `slipstream plan`, by part in `parts_gb`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from trainer import make_rollouts
from work import at_least_one, build_model, conditions, model_config

from slipstream.config.loading import load_config
from slipstream.config.schema import Config
from slipstream.errors import UserError
from slipstream.model.device import current_device
from slipstream.model.loading import add_adapters
from slipstream.plan.hardware import GIB, GPUS, Cluster, Gpu
from slipstream.plan.memory import choose_memory, cost_of, free_memory
from slipstream.plan.shapes import find_shape
from slipstream.runtime.addresses import RENDEZVOUS_FILE
from slipstream.trainers.failures import explain_out_of_memory
from slipstream.trainers.trainer import Trainer

ON_GPU = torch.cuda.is_available()
CONTEXT = 0.6 * GIB  # of CUDA and its libraries, outside of torch's allocator
LONGEST = 2048  # tokens of a completion, as `make_rollouts` has them


class Recipe(NamedTuple):
    """A shape of `work.SHAPES` on `ranks` GPUs with the memory of a kind of card."""

    shape: str
    card: str
    ranks: int = 1
    flags: tuple[str, ...] = ()
    tokens: int = 32768
    lengths: tuple[int, ...] = ()  # of prompts and completions; random ones by default

    @property
    def gpu(self) -> Gpu:
        if self.card in GPUS:
            return GPUS[self.card]
        return replace(GPUS["l4"], name=self.card, memory=float(self.card) * GIB)


RECIPES = {
    "1.7B-24GB": Recipe("1.7B", "rtx4090"),
    "8B-LoRA-80GB": Recipe("8B", "h100", flags=("--lora.rank=32",)),
    "8B-LoRA-48GB": Recipe("8B", "l40s", flags=("--lora.rank=32",)),
    "8B-H200": Recipe("8B", "h200"),
    "8B-2x80GB": Recipe("8B", "h100", 2, (), 65536),
    "8B-4x48GB": Recipe("8B", "l40s", 4, (), 131072),
}
SMALL = {
    "1M": Recipe("1M", "8", 1, (), 256, (8, 16)),
    "1M-tight": Recipe("1M", "4.8", 1, (), 256, (8, 16)),
    "1M-LoRA": Recipe("1M", "8", 1, ("--lora.rank=4",), 256, (8, 16)),
    "1M-two": Recipe("1M", "4.8", 2, (), 512, (8, 16)),
}


def configure(recipe: Recipe, folder: Path, flags: list[str]) -> Config:
    """The configuration of a recipe, with its options chosen."""
    own = [f"--model.path={folder}", "--model.dtype=bfloat16", "--environment.name=addition",
           f"--sampling.max_tokens={LONGEST}", f"--trainer.ranks={recipe.ranks}", "--trainer.memory=auto",
           "--loop.steps=3", f"--loop.groups_per_step={max(1, recipe.tokens // 4096)}", *recipe.flags]  # fmt: skip
    config = load_config(None, [*own, *flags])
    return choose_memory(config, 1024, recipe.gpu) if config.trainer.memory == "auto" else config


def measure(recipe: Recipe, folder: Path, flags: list[str]) -> dict[str, Any]:
    """Steps of one rank, in its own process."""
    config, gpu = configure(recipe, folder, flags), recipe.gpu
    device = current_device()
    if ON_GPU:
        torch.cuda.set_device(device)
        share = (gpu.memory - CONTEXT) / torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), device)
    began = time.perf_counter()
    torch.set_default_dtype(torch.bfloat16)
    model = build_model(recipe.shape)
    torch.set_default_dtype(torch.float32)
    trainer = Trainer(config, add_adapters(model, config.lora) if config.lora.rank else model)
    loaded = time.perf_counter() - began
    if ON_GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    steps = [step(trainer, recipe, seed) for seed in range(3)]
    best = max(steps[1:], key=lambda each: each["tokens_per_s"])
    shape = find_shape(str(folder))
    cost = cost_of(config, shape, Cluster(gpu, recipe.ranks))
    parts = {name: size / 1e9 for name, size in cost.memory().items()}
    estimated = best["tokens"] / cost.step(best["trained_tokens"], best["packed_tokens"])
    names = ("optimizer", "master_weights", "offload_optimizer", "keep_compute_copy", "activation_checkpointing",
             "tokens_per_microbatch", "compile")  # fmt: skip
    return {
        **conditions(), "chosen": config.trainer.chosen,
        "options": {name: getattr(config.trainer, name) for name in names},
        "load_s": loaded, "first_step_s": steps[0]["seconds"], **best,
        **{name: max(each[name] for each in steps) for name in ("used_gb", "reserved_gb", "allocated_gb")},
        "estimate_gb": sum(parts.values()), "free_gb": free_memory(config, shape, 1024, gpu) / 1e9,
        "estimate_tokens_per_s": estimated, "parts_gb": parts,
    }  # fmt: skip


def step(trainer: Trainer, recipe: Recipe, seed: int) -> dict[str, Any]:
    """The figures of one step."""
    batch = make_rollouts(recipe.tokens, trainer.model.config.vocab_size, seed, recipe.lengths)
    tokens = sum(len(sample.token_ids) for sample in batch.samples())
    if ON_GPU:
        torch.cuda.synchronize()
    began = time.perf_counter()
    stats = trainer.step(batch)
    if ON_GPU:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    return {
        "seconds": seconds, "tokens": tokens, "trained_tokens": batch.tokens, "packed_tokens": stats.packed_tokens,
        "tokens_per_s": tokens / seconds, "tflops": stats.tflops, "loss": stats.loss, **peaks(stats.max_memory_gb),
    }  # fmt: skip


def peaks(allocated: float) -> dict[str, float]:
    """Peak memory of this rank's GPU in GB; zeros on a CPU."""
    if not ON_GPU:
        return {"used_gb": 0.0, "reserved_gb": 0.0, "allocated_gb": 0.0}
    free, total = torch.cuda.mem_get_info()
    context = total - free - torch.cuda.memory_reserved()
    reserved = torch.cuda.max_memory_reserved()  # `Trainer.step` has reset the peak of allocated memory alone
    return {"used_gb": (reserved + context) / 1e9, "reserved_gb": reserved / 1e9, "allocated_gb": allocated}


def run_rank(recipe: Recipe, folder: Path, flags: list[str]) -> None:
    """Print the figures of this rank, or the error that ended it."""
    config = configure(recipe, folder, flags)
    try:
        with explain_out_of_memory(config, "step"):
            found = measure(recipe, folder, flags)
    except UserError as error:
        found = {"error": str(error), "chosen": config.trainer.chosen}
    if os.environ["RANK"] == "0" or "error" in found:
        print("FOUND " + json.dumps(found), flush=True)
    os._exit(0)  # process groups need no end


def run_recipe(name: str, recipe: Recipe, options: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    """Start the ranks of a recipe and return the figures of rank 0, or the first error."""
    with tempfile.TemporaryDirectory() as folder:
        model_config(recipe.shape).save_pretrained(folder)
        command = [sys.executable, __file__, "--rank-of", name, "--folder", folder, *(["--small"] * options.small),
                   *(["--compile"] * options.compile), *flags]  # fmt: skip
        shared = {"WORLD_SIZE": str(recipe.ranks), RENDEZVOUS_FILE: str(Path(folder) / "ranks")}
        shared["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // recipe.ranks))
        ranks = [
            subprocess.Popen(command, env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for rank in range(recipe.ranks)
        ]  # fmt: skip
        return collect(ranks, options.recipe_s)


def collect(ranks: list[subprocess.Popen[str]], limit: float) -> dict[str, Any]:
    """The figures that ranks print. One that fails or takes too long ends the others."""
    found, deadline = dict[str, Any](), time.monotonic() + limit
    try:
        for rank in ranks:
            out, errors = rank.communicate(timeout=max(0.1, deadline - time.monotonic()))
            lines = [line.removeprefix("FOUND ") for line in out.splitlines() if line.startswith("FOUND ")]
            if rank.returncode:
                return {"error": errors[-800:]}
            found = json.loads(lines[0]) if lines and "error" not in found else found
    except subprocess.TimeoutExpired:
        return {"error": f"took longer than {limit:g} s"}
    finally:
        for rank in ranks:
            rank.kill()
    return found


def card_memory() -> float:
    """Bytes of the first GPU, 0 without one. By nvidia-smi, since a CUDA context of this process would take some."""
    if not torch.cuda.device_count():
        return 0.0
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits", "--id=0"]
    return float(subprocess.run(query, capture_output=True, text=True, check=True).stdout) * 2**20


def possible(recipes: dict[str, Recipe], named: list[str]) -> Iterator[tuple[str, Recipe]]:
    """The recipes that this machine has GPUs for; prints the others."""
    cards, memory = torch.cuda.device_count(), card_memory()
    for name, recipe in recipes.items():
        if named and name not in named:
            continue
        if cards and (recipe.ranks > cards or recipe.gpu.memory > 1.01 * memory):
            print(f"{name}: needs {recipe.ranks} GPUs of {recipe.gpu.memory / GIB:.0f} GiB, left out", flush=True)
        else:
            yield name, recipe


def line(name: str, found: dict[str, Any]) -> str:
    """The result of a recipe in one line."""
    if "error" in found:
        return f"{name}: FAILED: {found['error']} [{found.get('chosen', '')}]"
    return (
        f"{name}: used {found['used_gb']:.1f} GB (allocated {found['allocated_gb']:.1f}), estimate "
        f"{found['estimate_gb']:.1f} of {found['free_gb']:.1f}; {found['tokens_per_s']:,.0f} tokens/s, estimate "
        f"{found['estimate_tokens_per_s']:,.0f}; load {found['load_s']:.0f} s, steps {found['first_step_s']:.1f} and "
        f"{found['seconds']:.1f} s; {found['chosen'] or found['options']}"
    )


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--recipes", nargs="+", default=[], choices=[*RECIPES, *SMALL])
    made.add_argument("--small", action="store_true")
    made.add_argument("--compile", action="store_true")
    made.add_argument("--limit-s", type=at_least_one, default=300, help="seconds after which no recipe is started")
    made.add_argument("--recipe-s", type=at_least_one, default=90, help="most seconds of a recipe")
    made.add_argument("--json", type=Path)
    made.add_argument("--rank-of", help=argparse.SUPPRESS)
    made.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return made


def main() -> None:
    options, flags = parser().parse_known_args()
    recipes, began = SMALL if options.small else RECIPES, time.monotonic()
    if options.rank_of:
        run_rank(
            recipes[options.rank_of], options.folder, [*flags, f"--trainer.compile={str(options.compile).lower()}"]
        )
    results = []
    for name, recipe in possible(recipes, options.recipes):
        if time.monotonic() - began > options.limit_s:
            print(f"{name}: not started after {options.limit_s} s", flush=True)
            continue
        started = time.monotonic()
        found = run_recipe(name, recipe, options, flags)
        own = {"recipe": name, "card": recipe.gpu.name, "ranks": recipe.ranks, "wall_s": time.monotonic() - started}
        results.append(found | own | {"command": " ".join(["python", *sys.argv])})
        print(line(name, found), flush=True)
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
