"""Stalls of the controller's event loop, and growth of its memory, with simulated engines and trainer.

    python benchmarks/controller.py [--steps 200] [--rollouts 512] [--tokens 8192] [--json FILE]
    python benchmarks/controller.py --engines 256 --in-flight 4096 --rollouts 64 --rate 205 --steps 1000 --runtime ray

A whole run with the real loop, recorder, checkpoints and workers. Engines and trainer are simulated (simulated.py).
Without a rate, engines answer at once, so completions arrive as fast as they can be sent, in larger bursts than from
real engines. With a rate, each completion takes as long as its tokens at this rate per sequence. A timer on the loop
is due every millisecond; a stall is its delay. Each stall is attributed to the concurrent phases of the controller's
work. In a stall the loop's thread runs, waits for a processor (as Linux counts it), or waits otherwise: mostly for the
interpreter lock, whose owner may be waiting for a processor. A separate process that only sleeps measures the stalls of
the machine. SIGTERM ends the run early, with the figures of the steps until then.

The simulated processes represent GPUs, so they run only while a processor is idle: on a host with few cores they would
otherwise compete with the controller, and the stalls would be those of the scheduler.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import contextlib
import functools
import gc
import json
import math
import multiprocessing
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from simulated import RATE, VOCABULARY, Idle
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from work import at_least_one, conditions, save_model

from slipstream import run
from slipstream.config.loading import load_config
from slipstream.controller import checkpoints, evaluation, finish, rollouts, setup
from slipstream.controller import weight_publisher as publish
from slipstream.environments.base import Policy, Task
from slipstream.observe import recorder
from slipstream.runtime import process
from slipstream.runtime.messages import MessageStream
from slipstream.runtime.worker_process import WorkerProcess

BEAT = 0.001  # seconds between two beats of the timer
PARTS = ("running", "waiting for a processor", "waiting otherwise")  # of a stall, of the loop's thread
BARS = {
    "p99_ms": 20.0,
    "max_ms": 100.0,
    "growth": 1.1,
    "cores": 1.0,
}  # of the longest stall of each step; of the memory
PROMPT = 200  # words
GROUP, HELD_OUT = 8, 64


class Essays:
    """Long prompts, and a reward of random noise."""

    def __init__(self) -> None:
        draw = random.Random(0)
        texts = [" ".join(words(draw, PROMPT)) for _ in range(1000)]
        self.train = [Task(str(i), text) for i, text in enumerate(texts)]
        self.test = self.train[:HELD_OUT]
        self._draw = draw

    async def rollout(self, task: Task, policy: Policy) -> float:
        await policy.sample(task.prompt)
        return self._draw.random()


def words(draw: random.Random, count: int) -> list[str]:
    return ["".join(draw.choice("etaoinshrdlu") for _ in range(draw.randint(2, 9))) for _ in range(count)]


def save_tokenizer(path: Path) -> None:
    """A byte-level BPE tokenizer, so that decoding costs as much as with a real one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    alphabet, draw = pre_tokenizers.ByteLevel.alphabet(), random.Random(0)
    kind = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator((" ".join(words(draw, 200)) for _ in range(300)), kind)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)


class Spans:
    """Start and end of many intervals, in 16 bytes each, since they are in the memory that is measured."""

    def __init__(self) -> None:
        self.starts, self.ends = array("d"), array("d")

    def add(self, start: float, end: float) -> None:
        self.starts.append(start)
        self.ends.append(end)

    def __iter__(self) -> Iterator[tuple[float, float]]:
        return zip(self.starts, self.ends, strict=True)


class Watch:
    """Stalls of the loop, and start and end of each phase of the controller's work, in seconds since the start."""

    def __init__(self) -> None:
        self.stalls = Spans()  # due time and actual time of the timer
        self.parts = {part: array("d") for part in PARTS}  # seconds of each stall
        self.phases: dict[str, Spans] = defaultdict(Spans)
        self.memory: list[float] = []  # GB at each step
        self.steps: list[float] = []  # the end of each
        self.busy: list[float] = []  # processor seconds of all threads at each step
        self.in_flight: list[int] = []  # groups at each step
        self._collecting = 0.0

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.phases[name].add(began, time.perf_counter())

    def around(self, owner: Any, method: str, name: str) -> None:
        """Measure each call of this function or coroutine as a phase."""
        wrapped = getattr(owner, method)
        if asyncio.iscoroutinefunction(wrapped):

            async def timed(*args: Any, **kwargs: Any) -> Any:
                with self.phase(name):
                    return await wrapped(*args, **kwargs)
        else:

            def timed(*args: Any, **kwargs: Any) -> Any:
                with self.phase(name):
                    return wrapped(*args, **kwargs)

        setattr(owner, method, functools.wraps(wrapped)(timed))

    def start(self) -> None:
        """Start the timer. Linux counts how long this thread ran, and how long it waited for a processor."""
        self._times = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        self._ran, self._waited = self._thread_times()
        asyncio.get_running_loop().call_later(BEAT, self.beat, time.perf_counter() + BEAT)

    def _thread_times(self) -> tuple[float, float]:
        ran, waited, _ = map(int, os.pread(self._times, 100, 0).split())
        return ran / 1e9, waited / 1e9

    def beat(self, due: float) -> None:
        now = time.perf_counter()
        ran, waited = self._thread_times()
        self.stalls.add(due, now)
        waiting = min(now - due, waited - self._waited)
        running = min(now - due - waiting, ran - self._ran)
        for part, seconds in zip(PARTS, (running, waiting, now - due - running - waiting), strict=True):
            self.parts[part].append(seconds)
        self._ran, self._waited = ran, waited
        asyncio.get_running_loop().call_later(BEAT, self.beat, time.perf_counter() + BEAT)

    def collected(self, phase: str, _: Any) -> None:
        if phase == "start":
            self._collecting = time.perf_counter()
        else:
            self.phases["garbage collection"].add(self._collecting, time.perf_counter())

    def stepped(self, groups: int) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.memory.append(pages * os.sysconf("SC_PAGE_SIZE") / 1e9)
        self.steps.append(time.perf_counter())
        self.busy.append(time.process_time())
        self.in_flight.append(groups)

    def settled(self, values: list[Any]) -> list[Any]:
        """Values of the steps after the first quarter, in which buffers and engines fill."""
        return values[len(values) // 4 :]

    def median_in_flight(self) -> int:
        return round(statistics.median(self.settled(self.in_flight)))

    def longest(self, spans: Iterable[tuple[float, float]], *parts: str) -> list[float]:
        """The longest stall, in ms, that overlaps with each of these spans; with `parts`, the largest sum of them."""
        begins, whole = self.stalls.starts, [came - due for due, came in self.stalls]
        seconds = list(map(sum, zip(*(self.parts[part] for part in parts), strict=True))) if parts else whole
        found = []
        for began, ended in spans:
            within = range(max(0, bisect.bisect_left(begins, began) - 1), bisect.bisect_right(begins, ended))
            found.append(max((1000 * seconds[i] for i in within if self.stalls.ends[i] > began), default=0.0))
        return found


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def described(values: list[float]) -> dict[str, float]:
    figures = {"p50_ms": quantile(values, 0.5), "p99_ms": quantile(values, 0.99), "max_ms": max(values, default=0.0)}
    return {"count": len(values)} | {name: round(figure, 2) for name, figure in figures.items()}


def machine(late: Any, over: Any) -> None:
    """Delays of a timer in an otherwise idle process, in ms."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which `timeout` sends to the whole process group
    found = []
    while not over.is_set():
        due = time.perf_counter() + BEAT
        time.sleep(BEAT)
        found.append(1000 * (time.perf_counter() - due))
    late.put(found)


async def disturb(every: float) -> None:
    """Start and kill a process at regular intervals, as a run sometimes does."""
    while True:
        worker = WorkerProcess("scorer")
        await worker.start(Idle, "simulated:Idle")
        worker.kill()
        await asyncio.sleep(every)


def watch_all(watch: Watch) -> None:
    """Measure the phases of a run, and start the timer with its first step."""
    for owner, method, name in (
        (checkpoints, "save_checkpoint", "checkpoint"), (finish, "save_checkpoint", "checkpoint"),
        *((module, "evaluate_served_policy", "evaluation") for module in (setup, evaluation, finish)),
        (run, "record_step", "metrics"), (run, "build_batch", "batch: advantages"),
        (publish.WeightPublisher, "publish", "publish"), (recorder.Recorder, "_write_step", "record (thread)"),
        (WorkerProcess, "kill", "kill"), (process, "process_group_alive", "/proc scan (thread)"),
        (MessageStream, "data_received", "messages received (thread)"), (rollouts, "play_group", "group"),
    ):  # fmt: skip
        watch.around(owner, method, name)
    start, record = run.start, run.record_step

    async def started(context: Any) -> None:
        await start(context)
        context.disturbing = asyncio.ensure_future(disturb(2.0))
        watch.start()

    def recorded(context: Any, *arguments: Any) -> None:
        record(context, *arguments)
        watch.stepped(context.state.running)

    vars(run).update(start=started, record_step=recorded)
    gc.callbacks.append(watch.collected)


def flags(options: argparse.Namespace, model: Path) -> list[str]:
    in_flight = options.in_flight or 2 * options.rollouts
    chosen = {
        "model.path": model, "environment.name": f"{__file__}:Essays", "run.dir": model.parent / "run",
        "runtime.kind": options.runtime, "runtime.start_timeout": 600, "loop.steps": options.steps,
        "loop.group_size": GROUP, "loop.groups_per_step": options.rollouts // GROUP,
        "loop.max_lag": max(1, in_flight // options.rollouts - 1),
        "sampling.max_tokens": options.tokens, "generator.engine": "simulated:Engine",
        "generator.replicas": options.engines, "generator.max_model_len": 0,
        "generator.max_num_seqs": max(64, math.ceil(in_flight / options.engines)), "trainer.kind": "simulated:Student",
        "checkpoint.every": 10, "checkpoint.keep": 1, "evaluation.tasks": HELD_OUT,
        "evaluation.every": max(25, options.steps // 10), "sync.verify": "off",
    }  # fmt: skip
    return [f"--{name}={value}" for name, value in chosen.items()]


def measure(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    save_model("11M", scratch / "model", context=2 * options.tokens)
    save_tokenizer(scratch / "model")
    watch = Watch()
    watch_all(watch)
    late, over = multiprocessing.SimpleQueue(), multiprocessing.Event()
    other = multiprocessing.Process(target=machine, args=(late, over), daemon=True)
    other.start()
    began = time.perf_counter()
    try:
        run.train(load_config(None, flags(options, scratch / "model")), quiet=True)
    finally:
        over.set()
    elapsed = time.perf_counter() - began
    alone = late.get()
    steps = list(zip(watch.steps, watch.steps[1:], strict=False))
    settled, walls, busy = watch.settled(watch.memory), watch.settled(watch.steps), watch.settled(watch.busy)
    half, seconds = len(settled) // 2, max(walls[-1] - walls[0], 1e-9)
    return {
        "steps": len(watch.steps), "rollouts": options.rollouts, "tokens": options.tokens, "engines": options.engines,
        "runtime": options.runtime, "seconds": round(elapsed, 1), "cores": round((busy[-1] - busy[0]) / seconds, 3),
        "steps_per_s": round((len(walls) - 1) / seconds, 3), "rollouts_in_flight": GROUP * watch.median_in_flight(),
        "step": described(watch.longest(steps)),
        "step_parts": {part: described(watch.longest(steps, part)) for part in PARTS},
        "step_with_a_processor": described(watch.longest(steps, PARTS[0], PARTS[2])),
        "beat": described([1000 * (came - due) for due, came in watch.stalls]),
        "machine": described(alone),
        "phases": {name: described(watch.longest(spans)) for name, spans in sorted(watch.phases.items())},
        "memory_gb": [round(value, 3) for value in watch.memory],
        "growth": round(max(settled[half:]) / max(settled[:half] or settled), 3),
    }  # fmt: skip


def table(found: dict[str, Any]) -> str:
    rows = [("longest stall while", "count", "p50 ms", "p99 ms", "max ms")]
    named = {
        "each step": found["step"],
        **{f"  {part}": figures for part, figures in found["step_parts"].items()},
        "  all but the processor's": found["step_with_a_processor"],
        "each beat": found["beat"],
        "(the machine alone)": found["machine"],
    }
    for name, figures in (named | found["phases"]).items():
        rows.append((name, str(figures["count"]), *(f"{figures[f'{q}_ms']:.1f}" for q in ("p50", "p99", "max"))))
    lines = [f"{name:28}{count:>8}{p50:>10}{p99:>10}{most:>10}" for name, count, p50, p99, most in rows]
    memory = found["memory_gb"]
    lines.append(
        f"the controller uses {found['cores']:.2f} cores at {found['steps_per_s']:.2f} steps/s, with "
        f"{found['rollouts_in_flight']} rollouts in flight on {found['engines']} engines"
    )
    return "\n".join([*lines, f"memory: {memory[0]:.2f} GB at first, {max(memory):.2f} at most, {memory[-1]:.2f} last"])


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=at_least_one, default=200)
    parser.add_argument("--rollouts", type=at_least_one, default=512)
    parser.add_argument("--tokens", type=at_least_one, default=8192)
    parser.add_argument("--engines", type=at_least_one, default=2)
    parser.add_argument("--in-flight", type=int, default=0, help="rollouts that are admitted; 0: those of two steps")
    parser.add_argument("--rate", type=float, default=0.0, help="tokens/s of each sequence; 0: engines answer at once")
    parser.add_argument("--runtime", choices=("local", "ray"), default="local")
    parser.add_argument("--json", type=Path)
    return parser


def main() -> None:
    options = parser().parse_args()
    if options.rate:
        os.environ[RATE] = str(options.rate)
    with tempfile.TemporaryDirectory() as temporary:
        found = measure(options, Path(temporary))
    print(table(found))
    if options.json:
        record = {"command": " ".join(["python", *sys.argv]), **conditions(), "bars": BARS, **found}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
