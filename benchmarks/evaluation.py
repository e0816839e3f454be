"""Sampled tokens per second of `slipstream eval` with vLLM, and of vLLM's own `LLM.generate` on the same requests.

    python benchmarks/evaluation.py [--shape 1.7B] [--tasks 500] [--samples 4] [--rounds 3] [--json FILE] [config flags]

Both get the prompts as text and return text. Each measurement is in a process of its own, in turn, and excludes the
start of the engine. All completions have the same length. `share` is the median of eval's rate by the rate of bare
vLLM that was measured just before it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from work import SHAPES, Work, at_least_one, conditions, save_model

from slipstream.config.loading import load_config
from slipstream.config.schema import Config
from slipstream.generators.vllm.launch import engine_arguments, start_vllm

GPU = torch.cuda.is_available()
# On a CPU both have one thread, since OpenMP's threads wait in busy loops for those that other processes delay.
ENVIRONMENT = {"VLLM_LOGGING_LEVEL": "ERROR"} | (
    {} if GPU else {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
)
OURS = (  # arguments that bare vLLM lacks
    "worker_extension_cls", "scheduler_cls", "logprobs_mode", "max_logprobs", "async_scheduling",
)  # fmt: skip


class Tasks(Work):
    """All tasks are held out."""

    def __init__(self, prompt_tokens: int = 16, tasks: int = 500) -> None:
        super().__init__(prompt_tokens, tasks)
        self.test = self.train


def configure(options: argparse.Namespace, flags: list[str]) -> Config:
    return load_config(None, [
        f"--model.path={options.model}", f"--model.dtype={'bfloat16' if GPU else 'float32'}",
        f"--environment.name={Path(__file__).resolve()}:Tasks",
        f"--environment.options={{ prompt_tokens = {options.prompt}, tasks = {options.tasks} }}",
        "--generator.engine=vllm", f"--generator.max_num_seqs={options.slots}",
        f"--generator.max_model_len={options.prompt + options.completion}",
        f"--sampling.max_tokens={options.completion}", f"--evaluation.tasks={options.tasks}",
        f"--evaluation.samples={options.samples}", "--evaluation.temperature=1.0",
        f"--generator.threads={0 if GPU else 1}", *flags,
    ])  # fmt: skip


def evaluated(config: Config) -> float:
    """Tokens per second of `slipstream eval`."""
    from slipstream.tools.evaluate import evaluate_policy

    record = evaluate_policy(config).record
    tokens = record["eval/tasks"] * record["eval/samples_per_task"] * record["eval/mean_length"]
    return float(tokens / record["eval/duration_s"])


def generated(config: Config) -> float:
    """Tokens per second of bare vLLM."""
    from vllm import LLM, SamplingParams

    arguments = {name: value for name, value in engine_arguments(config, 1).items() if name not in OURS}
    llm: Any = start_vllm("generator", lambda: LLM(**arguments), None)
    tasks = Tasks(**config.environment.options).test
    prompts = [task.prompt for task in tasks for _ in range(config.evaluation.samples)]
    sampling = SamplingParams(temperature=1.0, max_tokens=config.sampling.max_tokens, ignore_eos=True)
    began = time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    took = time.perf_counter() - began
    return sum(len(output.outputs[0].token_ids) for output in outputs) / took


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--shape", choices=SHAPES, default="1.7B" if GPU else "1M")
    found.add_argument("--model", type=Path, help="a model saved before, instead of one of this shape")
    for name, default in (
        ("tasks", 500), ("samples", 4), ("slots", 256 if GPU else 64), ("prompt", 128 if GPU else 16),
        ("completion", 512 if GPU else 64), ("rounds", 3),
    ):  # fmt: skip
        found.add_argument(f"--{name}", type=at_least_one, default=default)
    found.add_argument("--way", choices=("vllm", "eval"), help="measure one way in this process, for --json")
    found.add_argument("--json", type=Path)
    return found


def main() -> None:
    options, flags = parser().parse_known_args()
    if options.way:
        measure = evaluated if options.way == "eval" else generated
        options.json.write_text(json.dumps(measure(configure(options, flags))))
        return
    rates: dict[str, list[float]] = {"vllm": [], "eval": []}
    with tempfile.TemporaryDirectory() as folder:
        if not options.model:
            save_model(options.shape, Path(folder), torch.bfloat16 if GPU else torch.float32)
        for _ in range(options.rounds):
            for way, found in rates.items():
                told, model = Path(folder) / "rate.json", options.model or folder
                command = [sys.executable, *sys.argv, f"--way={way}", f"--model={model}", f"--json={told}"]
                subprocess.run(command, check=True, env=os.environ | ENVIRONMENT)
                found.append(json.loads(told.read_text()))
                print(f"{way}: {found[-1]:,.0f} tokens/s", flush=True)
            share = statistics.median(ours / bare for bare, ours in zip(*rates.values(), strict=True))
            print(f"eval reaches {share:.2f} of bare vLLM", flush=True)
            if options.json:
                record = {**conditions(), "results": {"share": share, **rates}}
                options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
