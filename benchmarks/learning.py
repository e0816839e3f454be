"""Learning of a pretrained model at lag 0 and 4: held-out accuracy before and after, and wall time.

    python benchmarks/learning.py models/SmolLM2-135M-Instruct [--tasks sums categories] [--lags 0 4] [--seeds 0 1 2]
        [--gpus 0 1] [--jobs 6] [--json FILE] [option of the run ...]

Two tasks that SmolLM2-135M-Instruct solves about half the time: sums of two one-digit numbers, asked in four ways, and
whether a word names an animal, a fruit or a vehicle, asked with these in each order. Held out are 25 of 100 pairs of
digits, and 24 of 96 words. Each run is a process of its own, with generator and trainer on one GPU. `--jobs` runs share
the GPUs, which lengthens wall times: compare those with as many runs at a time. Runs that FILE holds are not repeated,
so an invocation that was stopped goes on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import Queue
from typing import Any

from work import at_least_one, conditions

import slipstream

PHRASES = ("What is {a} + {b}?", "Add {a} and {b}.", "{a} plus {b} is", "Calculate {a} + {b}.")
WORDS = {
    "animal": "dog cat horse cow pig sheep goat lion tiger bear wolf fox deer rabbit mouse elephant giraffe monkey "
    "zebra camel eagle owl duck goose chicken shark whale dolphin frog snake turtle penguin",
    "fruit": "apple banana orange grape pear peach plum cherry mango lemon lime kiwi pineapple strawberry blueberry "
    "raspberry blackberry apricot melon papaya fig watermelon grapefruit coconut avocado pomegranate guava nectarine "
    "tangerine cranberry quince olive",
    "vehicle": "car bus truck train bicycle motorcycle airplane helicopter boat ship tram tractor submarine van "
    "scooter ferry taxi ambulance jeep yacht canoe sled wagon rocket limousine minivan kayak bulldozer jet trolley "
    "moped sailboat",
}
FLAGS = {
    "environment.prompt": "prompt", "environment.answer": "answer", "sampling.max_tokens": 32, "loop.steps": 50,
    "loop.groups_per_step": 16, "loop.group_size": 8, "generator.max_num_seqs": 256, "trainer.learning_rate": 1e-5,
    "trainer.warmup_steps": 5, "evaluation.tasks": 200, "evaluation.every": 25, "checkpoint.every": 1000,
    "trainer.compile": "false",  # it takes longer than the steps that it would speed up
}  # fmt: skip
BARS = {"gain": 0.25, "lag_difference": 0.03}  # of held-out accuracy: at least, at most


def sums() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    pairs = list(itertools.product(range(10), repeat=2))
    random.Random(0).shuffle(pairs)
    asked = [[{"prompt": p.format(a=a, b=b), "answer": str(a + b)} for p in PHRASES] for a, b in pairs]
    return [row for rows in asked[25:] for row in rows], [row for rows in asked[:25] for row in rows]


def categories() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    train: list[dict[str, str]] = []
    test: list[dict[str, str]] = []
    for category, words in WORDS.items():
        for number, word in enumerate(random.Random(0).sample(words.split(), 32)):
            for order in itertools.permutations(map(with_article, WORDS)):
                prompt = f"Is {with_article(word)} {order[0]}, {order[1]} or {order[2]}?"
                (test if number < 8 else train).append({"prompt": prompt, "answer": category})
    return train, random.Random(0).sample(test, len(test))  # so that any number of them has all categories


def with_article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


LAST_CATEGORY = "{ exact = { extract = '(?i)\\b(animal|fruit|vehicle)\\b', ignore_case = true } }"
TASKS = {"sums": (sums, '"math"'), "categories": (categories, LAST_CATEGORY)}


def write_tasks(name: str, directory: Path) -> Path:
    """Write the dataset and a configuration that names it; return the configuration's path."""
    make, reward = TASKS[name]
    for part, tasks in zip(("train", "test"), make(), strict=True):
        (directory / f"{name}_{part}.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    lines = [
        "[environment]",
        f'dataset = "{directory}/{name}_train.jsonl"',
        f'test = "{directory}/{name}_test.jsonl"',
        f"reward = {reward}",
    ]
    (config := directory / f"{name}.toml").write_text("\n".join(lines) + "\n")
    return config


def measure(run: Path, command: list[str | Path], gpus: Queue[str]) -> dict[str, Any]:
    """Held-out accuracy before and after and at each evaluation's step, and seconds of the run."""
    gpu = gpus.get()
    try:
        began = time.perf_counter()
        environment = os.environ | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})
        with run.with_suffix(".log").open("w") as log:
            status = subprocess.run(command, env=environment, check=False, stdout=log, stderr=log).returncode
        if status:
            raise RuntimeError(run.with_suffix(".log").read_text()[-2000:])
        seconds = time.perf_counter() - began
    finally:
        gpus.put(gpu)
    loaded = slipstream.load_run(run)
    accuracies = {int(evaluation["step"]): round(evaluation["eval/score"], 4) for evaluation in loaded.evaluations}
    values = [*accuracies.values()]
    return {"before": values[0], "after": values[-1], "seconds": round(seconds, 1), "accuracies": accuracies}


def commands(
    options: argparse.Namespace, flags: list[str], directory: Path
) -> Iterator[tuple[dict[str, Any], Path, list[str | Path]]]:
    """Of each run its task, lag and seed, its directory, and its command."""
    for name in options.tasks:
        config = write_tasks(name, directory)
        for seed, lag in itertools.product(options.seeds, options.lags):
            run = directory / f"{name}_lag{lag}_seed{seed}"
            fixed = {"model.path": options.model, "run.dir": run, "loop.max_lag": lag, "loop.seed": seed} | FLAGS
            command: list[str | Path] = [sys.executable, "-m", "slipstream", "train", config]
            command += [*(f"--{option}={value}" for option, value in fixed.items()), *flags]
            yield {"task": name, "max_lag": lag, "seed": seed}, run, command


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("model", type=Path)
    found.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    found.add_argument("--lags", nargs="+", type=int, default=[0, 4])
    found.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    found.add_argument("--gpus", nargs="+", default=[""], help="numbers of the GPUs to use; none on a CPU")
    found.add_argument("--jobs", type=at_least_one, default=1, help="runs at a time")
    found.add_argument("--json", type=Path)
    return found


def main() -> None:
    options, flags = parser().parse_known_args()
    gpus: Queue[str] = Queue()
    for _, gpu in zip(range(options.jobs), itertools.cycle(options.gpus), strict=False):
        gpus.put(gpu)
    runs = json.loads(options.json.read_text())["runs"] if options.json and options.json.exists() else []
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(options.jobs) as pool:
        waiting = {}
        for key, run, command in commands(options, flags, Path(temporary)):
            if not any(key.items() <= known.items() for known in runs):
                waiting[pool.submit(measure, run, command, gpus)] = key
        for future in as_completed(waiting):
            if future.exception():
                print(f"{waiting[future]} failed: {future.exception()}", file=sys.stderr, flush=True)
                continue
            runs.append(waiting[future] | future.result())
            print(json.dumps(runs[-1]), flush=True)
            if options.json:
                record = {**conditions(), "flags": FLAGS, "bars": BARS, "summary": summarize(runs), "runs": runs}
                options.json.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(summarize(runs), indent=1))
    sys.exit(any(future.exception() for future in waiting))


def summarize(runs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Means over seeds for each task and lag."""
    found: dict[str, dict[str, Any]] = {}
    for name, lag in dict.fromkeys((run["task"], run["max_lag"]) for run in runs):
        same = [run for run in runs if (run["task"], run["max_lag"]) == (name, lag)]
        means = {key: round(statistics.mean(run[key] for run in same), 4) for key in ("before", "after", "seconds")}
        found.setdefault(name, {})[f"lag {lag}"] = means | {"gain": round(means["after"] - means["before"], 4)}
    return found


if __name__ == "__main__":
    main()
