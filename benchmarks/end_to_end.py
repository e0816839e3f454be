"""A whole run on two GPUs: vLLM generates on one, the trainer learns on the other, weights go over `nccl`.

    python benchmarks/end_to_end.py [--shape 1.7B] [--groups 16] [--steps 20] [--spread 0.6] [--json FILE] [flags]
    python benchmarks/end_to_end.py --shape 1M --kind torch --groups 4 --completion 32 --steps 5     # on a CPU

It is `slipstream train` in a process of its own, which is stopped once its record has the steps asked for, or the
seconds. All figures come from that record and leave out the first `--warmup` steps, in which engines and kernels warm
up. `busy` are shares of the time: an engine is busy while it has sequences, the trainer while it takes a step; what it
does for a publish counts as idle. `utilisation` is that of the model's arithmetic, over all the time and in a step.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from work import at_least_one, conditions, save_model

from slipstream.config import dump, load_config

HERE = Path(__file__).parent
GROUP = 8
LATER = 1000  # steps that the run is given beyond those that are measured


def configuration(options: argparse.Namespace, model: Path, directory: Path) -> list[str]:
    """The run's flags. With a spread the limit leaves room for the long completions of a log-normal."""
    gpu = torch.cuda.is_available()
    most = options.completion * (4 if options.spread else 1)
    work = f"{{prompt_tokens={options.prompt},spread={float(options.spread)}}}"
    return [
        f"--model.path={model}", f"--model.dtype={'bfloat16' if gpu else 'float32'}", f"--run.dir={directory}",
        f"--environment.name={HERE / 'work.py'}:Work", f"--environment.options={work}",
        f"--sampling.max_tokens={most}", f"--generator.kind={options.kind}", "--generator.slots=256",
        f"--generator.context={options.prompt + most}", f"--sync.link={'nccl' if gpu else 'shared'}",
        f"--loop.groups_per_step={options.groups}", f"--loop.group_size={GROUP}", "--loop.max_lag=4",
        f"--loop.steps={options.warmup + options.steps + LATER}", "--evaluation.tasks=0", "--checkpoint.every=100000",
    ]  # fmt: skip


def run(config: Path, directory: Path, log: Path, steps: int, warmup: int, seconds: float) -> list[dict[str, Any]]:
    """The lines that the run recorded until it had had all steps, or so many seconds after the first ones."""
    with log.open("wb") as out:
        command = [sys.executable, "-m", "slipstream", "train", str(config)]
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    try:
        began = 0.0
        while len(lines := recorded(directory)) < warmup + steps:
            if process.poll() is not None:
                raise RuntimeError(f"the run ended with {process.returncode}:\n{log.read_text()[-6000:]}")
            if len(lines) >= warmup and not began:
                began = time.monotonic()
            if began and seconds and time.monotonic() - began > seconds and len(lines) > warmup:
                break
            time.sleep(0.1)
    finally:
        stop(process)
    return lines[: warmup + steps]


def recorded(directory: Path) -> list[dict[str, Any]]:
    path = directory / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the run without the checkpoint and the export that a first signal asks for; its processes end with it."""
    for _ in range(2):
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            time.sleep(1)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def describe(lines: list[dict[str, Any]], warmup: int, directory: Path) -> dict[str, Any]:
    """The figures of the steps after the first ones."""
    before, timed = lines[warmup - 1], lines[warmup:]
    seconds = timed[-1]["window_seconds"] - before["window_seconds"]
    grown = {name: timed[-1][name] - before[name] for name in timed[-1] if name.endswith("_busy_seconds")}
    trained = sum(line["tokens"] for line in timed)
    everything = trained + sum(prompt_tokens(directory / f"rollouts/step_{line['step']:06d}.parquet") for line in timed)
    training = sum(line["step_seconds"] for line in timed)
    holds = [line["hold_ms"] for line in timed]
    known = [line for line in timed if line["utilisation"] is not None]
    return {
        "steps": len(timed),
        "seconds": seconds,
        "trained_tokens_per_s": trained / seconds,
        "tokens_per_s": everything / seconds,
        "tokens_a_step": trained / len(timed),
        "generated_tokens_per_s": (timed[-1]["tokens_generated"] - before["tokens_generated"]) / seconds,
        "busy": {name.removesuffix("_busy_seconds"): spent / seconds for name, spent in grown.items()},
        "lag_mean": sum(line["lag_mean"] * line["tokens"] for line in timed) / trained,
        "lag_max": max(line["lag_max"] for line in timed),
        "hold_ms": {"median": statistics.median(holds), "max": max(holds)},
        "step_s": statistics.median(line["step_seconds"] for line in timed),
        "wait_s": statistics.median(line["wait_seconds"] for line in timed),
        "utilisation_in_step": statistics.median(line["utilisation"] for line in known) if known else None,
        "utilisation": sum(line["utilisation"] * line["step_seconds"] for line in known) / seconds if known else None,
        "trainer_memory_gb": max(line["memory_gb"] for line in timed),
        "mismatch_kl": statistics.median(line["mismatch_kl"] for line in timed),
        "dropped_stale": timed[-1]["rollouts"]["dropped_stale"] - before["rollouts"]["dropped_stale"],
        "publish_and_rest_s": (seconds - training - sum(line["wait_seconds"] for line in timed)) / len(timed),
    }


def prompt_tokens(path: Path) -> int:
    """Of all completions of a step, as a trainer without shared prompts would see them."""
    lengths = pc.list_value_length(pq.read_table(path, columns=["prompt_ids"])["prompt_ids"])
    return int(pc.sum(lengths).as_py())


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--shape", default="1.7B")
    found.add_argument("--model", type=Path, help="a model saved before, instead of one of this shape")
    found.add_argument("--kind", default="vllm")
    found.add_argument("--groups", type=int, default=16)
    found.add_argument("--prompt", type=int, default=128)
    found.add_argument("--completion", type=int, default=512, help="tokens, or their median with a spread")
    found.add_argument("--spread", type=float, default=0.0, help="of the logarithm of the lengths; 0: all are equal")
    found.add_argument("--warmup", type=at_least_one, default=8)
    found.add_argument("--steps", type=int, default=20)
    found.add_argument("--seconds", type=float, default=0.0, help="end after so many, even before all steps")
    found.add_argument("--log", type=Path, help="keep what the run and its processes print")
    found.add_argument("--json", type=Path)
    return found


def main() -> None:
    options, flags = parser().parse_known_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))  # not without ending what it started
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        model, directory = options.model or Path(temporary) / "model", Path(temporary) / "run"
        if not model.exists():
            save_model(options.shape, model, torch.bfloat16 if torch.cuda.is_available() else torch.float32)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        log, config = Path(temporary) / "log", Path(temporary) / "run.toml"
        flags = [*configuration(options, model, directory), *flags]
        config.write_text(dump(load_config(None, flags)))
        try:
            lines = run(config, directory, log, options.steps, options.warmup, options.seconds)
        finally:
            if options.log:
                parts = [log, *sorted((directory / "logs").glob("*"))]
                options.log.write_text("\n".join(f"== {p.name}\n{p.read_text()}" for p in parts if p.exists()))
        found = describe(lines, options.warmup, directory)
    keep = ("step", "window_seconds", "tokens", "step_seconds", "wait_seconds", "hold_ms", "lag_mean", "utilisation",
            "memory_gb", "generator_busy_seconds", "trainer_busy_seconds", "ready", "running")  # fmt: skip
    each = [{name: line[name] for name in keep} for line in lines]
    result = {**conditions(), "shape": options.shape, "flags": flags, **found, "each": each}
    print(json.dumps({k: v for k, v in result.items() if k not in ("each", "flags")}, indent=1), flush=True)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
