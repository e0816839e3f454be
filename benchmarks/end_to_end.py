"""A whole run on two GPUs: vLLM generates on one, the trainer uses the other, the weight link is `nccl`.

    python benchmarks/end_to_end.py [--shape 1.7B] [--groups 16] [--steps 20] [--spread 0.6] [--json FILE] [flags]
    python benchmarks/end_to_end.py --shape 1M --kind torch --groups 4 --completion 32 --steps 5     # on a CPU

The benchmark starts `slipstream train` and stops it after `--steps` steps or `--seconds`. All figures come from the
run's metrics and exclude the first `--warmup` steps, in which engines and kernels warm up. `busy` are shares of the
time: an engine is busy while it has sequences, the trainer during a step; its work for a publish counts as idle.
`matmul_utilisation` is that of the model's arithmetic, over the whole time and in a step.
"""

from __future__ import annotations

import argparse
import json
import operator
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

from slipstream.config.loading import dump, load_config

HERE = Path(__file__).parent
GROUP = 8
PARTS = ("changeover", "sleep", "onload", "wake_weights", "ready", "offload", "wake")  # of a turn, in `sync/PART_s`
LATER = 1000  # steps that the run is given beyond those that are measured


def configuration(options: argparse.Namespace, model: Path, directory: Path) -> list[str]:
    """The run's flags. With a spread the limit leaves room for the long completions of a log-normal."""
    gpu = torch.cuda.is_available()
    most = options.completion * (4 if options.spread else 1)
    work = f"{{prompt_tokens={options.prompt},spread={float(options.spread)}}}"
    return [
        f"--model.path={model}", f"--model.dtype={'bfloat16' if gpu else 'float32'}", f"--run.dir={directory}",
        f"--environment.name={HERE / 'work.py'}:Work", f"--environment.options={work}",
        f"--sampling.max_tokens={most}", f"--generator.engine={options.kind}", "--generator.max_num_seqs=256",
        f"--generator.max_model_len={options.prompt + most}", f"--sync.link={'nccl' if gpu else 'shared'}",
        f"--loop.groups_per_step={options.groups}", f"--loop.group_size={GROUP}", "--loop.max_lag=4",
        f"--loop.steps={options.warmup + options.steps + LATER}", "--evaluation.tasks=0", "--checkpoint.every=100000",
    ]  # fmt: skip


def run(
    config: Path, directory: Path, log: Path, steps: int, warmup: int, seconds: float
) -> tuple[list[dict[str, Any]], float]:
    """Lines of `metrics.jsonl` until the run has all steps, or until SIGTERM or `seconds` after the warm-up.

    Also returns the seconds from the command to the end of the first step.
    """
    started, first = time.monotonic(), 0.0
    with log.open("wb") as out:
        command = [sys.executable, "-m", "slipstream", "train", str(config)]
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    lines: list[dict[str, Any]] = []
    try:
        began = 0.0
        while len(lines := recorded(directory)) < warmup + steps:
            if process.poll() is not None:
                raise RuntimeError(f"the run ended with {process.returncode}:\n{log.read_text()[-6000:]}")
            if lines and not first:
                first = time.monotonic() - started
            if len(lines) >= warmup and not began:
                began = time.monotonic()
            if began and seconds and time.monotonic() - began > seconds and len(lines) > warmup:
                break
            time.sleep(0.1)
    except SystemExit:  # SIGTERM: what was measured counts
        if len(lines) <= warmup:
            raise
    finally:
        stop(process)
    return lines[: warmup + steps], first or time.monotonic() - started  # all steps between two looks


def recorded(directory: Path) -> list[dict[str, Any]]:
    path = directory / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the run and its processes by two signals, without a last checkpoint and export."""
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
    """Metrics of the steps after the warm-up."""
    before, timed = lines[warmup - 1], lines[warmup:]
    seconds = timed[-1]["time/window_s"] - before["time/window_s"]
    busy = {"generator": "gen/busy_s", "trainer": "train/busy_s"}
    trained = sum(line["train/tokens"] for line in timed)
    everything = trained + sum(prompt_tokens(directory / f"rollouts/step_{line['step']:06d}.parquet") for line in timed)
    steps = [line["time/step_s"] for line in timed]
    pauses = [line["sync/pause_ms"] for line in timed]
    rates = [rate for line in timed if (rate := line["train/matmul_utilisation"]) is not None]
    return {
        "steps": len(timed),
        "seconds": seconds,
        "trained_tokens_per_s": trained / seconds,
        "tokens_per_s": everything / seconds,
        "tokens_a_step": trained / len(timed),
        "generated_tokens_per_s": (timed[-1]["gen/total_tokens"] - before["gen/total_tokens"]) / seconds,
        "busy": {side: (timed[-1][name] - before[name]) / seconds for side, name in busy.items()},
        "lag_mean": sum(line["lag/mean"] * line["train/tokens"] for line in timed) / trained,
        "lag_max": max(line["lag/max"] for line in timed),
        "pause_ms": {"median": statistics.median(pauses), "max": max(pauses)},
        "step_s": statistics.median(steps),
        "wait_s": statistics.median(line["time/batch_wait_s"] for line in timed),
        "matmul_utilisation_in_step": statistics.median(rates) if rates else None,
        "matmul_utilisation": sum(map(operator.mul, rates, steps)) / seconds if rates else None,
        "trainer_memory_gb": max(line["train/max_memory_gb"] for line in timed),
        "mismatch_kl": statistics.median(line["policy/mismatch_kl"] for line in timed),
        "dropped_stale": timed[-1]["rollout/dropped_stale"] - before["rollout/dropped_stale"],
        **{f"{p}_s": statistics.median(v[n] for v in timed) for p in PARTS if (n := f"sync/{p}_s") in lines[-1]},
        "publish_and_rest_s": (seconds - sum(steps) - sum(line["time/batch_wait_s"] for line in timed)) / len(timed),
    }


def prompt_tokens(path: Path) -> int:
    """Prompt tokens of all completions of a step, as counted by a trainer without shared prompts."""
    lengths = pc.list_value_length(pq.read_table(path, columns=["prompt_ids"])["prompt_ids"])
    return int(pc.sum(lengths).as_py())


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--shape", default="1.7B")
    found.add_argument("--model", type=Path, help="a model saved before, instead of one of this shape")
    found.add_argument("--kind", default="vllm")
    found.add_argument("--groups", type=int, default=16)
    found.add_argument("--prompt", type=int, default=128)
    found.add_argument("--completion", type=int, default=512, help="tokens, or their median with --spread")
    found.add_argument(
        "--spread", type=float, default=0.0, help="standard deviation of the logarithm of the lengths; 0: equal lengths"
    )
    found.add_argument("--warmup", type=at_least_one, default=8)
    found.add_argument("--steps", type=int, default=20)
    found.add_argument("--seconds", type=float, default=0.0, help="end after this time, even before all steps")
    found.add_argument("--log", type=Path, help="write the output of the run and its processes")
    found.add_argument("--json", type=Path)
    return found


def main() -> None:
    options, flags = parser().parse_known_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))  # so that child processes end, too
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
            lines, first = run(config, directory, log, options.steps, options.warmup, options.seconds)
        finally:
            if options.log:
                parts = [log, *sorted((directory / "logs").glob("*"))]
                options.log.write_text("\n".join(f"== {p.name}\n{p.read_text()}" for p in parts if p.exists()))
        found = describe(lines, options.warmup, directory)
    keep = (
        "step", "time/window_s", "train/tokens", "time/step_s", "time/batch_wait_s", "sync/pause_ms", "lag/mean",
        "train/matmul_utilisation", "train/max_memory_gb", "gen/busy_s", "train/busy_s", "buffer/groups_ready",
        "buffer/groups_in_flight",
    )  # fmt: skip
    each = [{name: line[name] for name in keep} for line in lines]
    result = {**conditions(), "shape": options.shape, "flags": flags, "first_step_s": first, **found, "each": each}
    print(json.dumps({k: v for k, v in result.items() if k not in ("each", "flags")}, indent=1), flush=True)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
