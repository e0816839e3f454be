"""How long the controller's event loop stands still, and whether its memory grows: engines and trainer cost nothing.

    python benchmarks/controller.py [--steps 200] [--rollouts 512] [--tokens 8192] [--json FILE]

A whole run: the real loop, recorder, checkpoints and actors. The engines and the trainer are processes that answer at
once, so completions arrive as fast as they can be sent, in bursts that real engines never reach. A timer on the loop is
due every millisecond; a stall is the time by which it comes late. Each stall is charged to what went on in the
controller meanwhile. A process that only sleeps measures the same of the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import contextlib
import functools
import gc
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from work import at_least_one, conditions, save_model

from slipstream import actor, run
from slipstream.actor import Actor
from slipstream.config import load_config
from slipstream.environments.base import Policy, Task
from slipstream.observe import recorder
from slipstream.rollout import Completion, StepStats, VersionSpan
from slipstream.runtime import local, publish

BEAT = 0.001  # seconds between two beats of the timer
BARS = {"p99_ms": 20.0, "max_ms": 100.0, "growth": 1.1}  # of the longest stall of each step; of the memory
VOCABULARY, PROMPT = 4096, 200  # tokens in all; words of a prompt
GROUP, ENGINES, HELD_OUT = 8, 2, 64
HERE = Path(__file__).stem


class Engine:
    """Answers each request at once, with as many random tokens as it asks for."""

    busy = False

    def __init__(self, *_: Any) -> None:
        draw = random.Random(os.getpid())
        self._tokens = [draw.randrange(VOCABULARY) for _ in range(4 * 8192)]
        self._logprobs = [-draw.random() for _ in self._tokens]
        self._draw, self._version, self._count = draw, 0, 0

    def handle(self, method: str, arguments: tuple[Any, ...], reply: Callable[[Any], None]) -> None:
        if method == "generate":
            return reply(self._complete(*arguments[1:]))
        if method == "swap":
            (self._version,) = arguments
        answers: dict[str, Any] = {"swap": (0.0, self._stats()), "stats": self._stats(), "drawn": 0}
        return reply(answers.get(method))

    def _complete(self, prompt: Any, sampling: Any) -> Completion:
        count = sampling.max_tokens
        first = self._draw.randrange(len(self._tokens) - count + 1)
        self._count += count
        spans = (VersionSpan(self._version, 0, count),)
        tokens, logprobs = (tuple(all_[first : first + count]) for all_ in (self._tokens, self._logprobs))
        return Completion(prompt, tokens, logprobs, spans, "length", sampling.temperature)

    def _stats(self) -> dict[str, float]:
        return {"tokens": self._count, "wasted": 0, "busy": 0.0}

    def tick(self) -> None: ...

    def close(self) -> None: ...


class Student:
    """A trainer that learns nothing, at once."""

    busy = False

    def __init__(self, *_: Any) -> None:
        self._steps = 0

    def handle(self, method: str, arguments: tuple[Any, ...], reply: Callable[[Any], None]) -> None:
        found = getattr(self, method, None)
        reply(found(*arguments) if found else None)

    def open_link(self, receivers: int) -> dict[str, Any]:
        return {"shapes": {"weight": [1]}, "receivers": receivers}

    def stage(self, version: int) -> dict[str, Any]:
        return {"version": version}

    def score(self, completions: Any) -> list[list[float]]:
        return [list(c.logprobs) for c in completions]

    def step(self, batch: Any) -> StepStats:
        self._steps += 1
        numbers = dict.fromkeys(StepStats.__slots__, 0.0) | {"step": self._steps, "tokens": batch.tokens}
        return StepStats(**numbers)

    def save(self, path: Path, *_: Any) -> None:
        path.mkdir()
        (path / "weights").write_bytes(bytes(2**20))

    def tick(self) -> None: ...

    def close(self) -> None: ...


class Idle:
    """What stands for a reward's process: it is started and killed."""

    busy = False

    def handle(self, method: str, arguments: tuple[Any, ...], reply: Callable[[Any], None]) -> None:
        reply(None)

    def tick(self) -> None: ...

    def close(self) -> None: ...


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
    """A byte-level BPE: a completion's text costs what it costs with a real one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    alphabet, draw = pre_tokenizers.ByteLevel.alphabet(), random.Random(0)
    kind = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator((" ".join(words(draw, 200)) for _ in range(300)), kind)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)


class Watch:
    """Stalls of the loop, and when each phase of the controller's work began and ended, in seconds since the start."""

    def __init__(self) -> None:
        self.stalls: list[tuple[float, float]] = []  # from when the timer was due to when it came
        self.phases: dict[str, list[tuple[float, float]]] = {}
        self.memory: list[float] = []  # GB at each step
        self.steps: list[float] = []  # when each ended
        self._collecting = 0.0

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.phases.setdefault(name, []).append((began, time.perf_counter()))

    def around(self, owner: Any, method: str, name: str) -> None:
        """Let each call of this function or coroutine be a phase."""
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

    def beat(self, due: float) -> None:
        now = time.perf_counter()
        self.stalls.append((due, now))
        asyncio.get_running_loop().call_later(BEAT, self.beat, now + BEAT)

    def collected(self, phase: str, _: Any) -> None:
        if phase == "start":
            self._collecting = time.perf_counter()
        else:
            self.phases.setdefault("garbage collection", []).append((self._collecting, time.perf_counter()))

    def stepped(self) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.memory.append(pages * os.sysconf("SC_PAGE_SIZE") / 1e9)
        self.steps.append(time.perf_counter())

    def longest(self, spans: list[tuple[float, float]]) -> list[float]:
        """The longest stall, in ms, that overlaps with each of these spans."""
        begins = [due for due, _ in self.stalls]
        found = []
        for began, ended in spans:
            first = max(0, bisect.bisect_left(begins, began) - 1)
            within = self.stalls[first : bisect.bisect_right(begins, ended)]
            found.append(max((1000 * (came - due) for due, came in within if came > began), default=0.0))
        return found


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def described(values: list[float]) -> dict[str, float]:
    figures = {"p50_ms": quantile(values, 0.5), "p99_ms": quantile(values, 0.99), "max_ms": max(values, default=0.0)}
    return {"count": len(values)} | {name: round(figure, 2) for name, figure in figures.items()}


def machine(late: Any, over: Any) -> None:
    """In a process of its own: by how much a timer comes late when nothing else is done, in ms."""
    found = []
    while not over.is_set():
        due = time.perf_counter() + BEAT
        time.sleep(BEAT)
        found.append(1000 * (time.perf_counter() - due))
    late.put(found)


async def disturb(every: float) -> None:
    """What a run does now and then: start a process and kill it."""
    while True:
        worker = Actor("scorer")
        await worker.start(f"{HERE}:Idle")
        worker.kill()
        await asyncio.sleep(every)


def watch_all(watch: Watch) -> None:
    """Measure the phases of a run, and start the timer with its first step."""
    for owner, method, name in (
        (run.Run, "_save", "checkpoint"), (run.Run, "_evaluate", "evaluation"), (run.Run, "_record", "metrics"),
        (run, "cut_batch", "batch: advantages"), (local.ProcessTrainer, "step", "batch: sent and answered"),
        (publish.WeightLink, "publish", "publish"), (recorder.Recorder, "_write_step", "record (thread)"),
        (actor.Actor, "kill", "kill"), (actor, "group_lives", "/proc scan (thread)"),
        (actor.pickle, "loads", "reply: unpickled"), (run.Run, "_play_group", "group"),
    ):  # fmt: skip
        watch.around(owner, method, name)
    start, record = run.Run._start, run.Run._record

    async def started(self: Any) -> None:
        await start(self)
        self._disturbing = asyncio.ensure_future(disturb(2.0))
        asyncio.get_running_loop().call_later(BEAT, watch.beat, time.perf_counter() + BEAT)

    def recorded(self: Any, *arguments: Any) -> None:
        record(self, *arguments)
        watch.stepped()

    run.Run._start, run.Run._record = started, recorded
    gc.callbacks.append(watch.collected)


def flags(options: argparse.Namespace, model: Path) -> list[str]:
    chosen = {
        "model.path": model, "environment.name": f"{__file__}:Essays", "run.dir": model.parent / "run",
        "loop.steps": options.steps, "loop.groups_per_step": options.rollouts // GROUP, "loop.group_size": GROUP,
        "loop.max_lag": 1, "sampling.max_tokens": options.tokens, "generator.kind": f"{HERE}:Engine",
        "generator.count": ENGINES, "trainer.kind": f"{HERE}:Student", "checkpoint.every": 10, "checkpoint.keep": 1,
        "evaluation.tasks": HELD_OUT, "evaluation.every": 25, "sync.verify": "off", "generator.context": 0,
    }  # fmt: skip
    return [f"--{name}={value}" for name, value in chosen.items()]


def measure(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    save_model("11M", scratch / "model")
    save_tokenizer(scratch / "model")
    watch = Watch()
    watch_all(watch)
    late, over = multiprocessing.SimpleQueue(), multiprocessing.Event()
    other = multiprocessing.Process(target=machine, args=(late, over), daemon=True)
    other.start()
    began = time.perf_counter()
    run.train(load_config(None, flags(options, scratch / "model")), quiet=True)
    seconds = time.perf_counter() - began
    over.set()
    alone = late.get()
    steps = list(zip(watch.steps, watch.steps[1:], strict=False))
    settled = watch.memory[len(watch.memory) // 4 :]
    half = len(settled) // 2
    return {
        "steps": options.steps, "rollouts": options.rollouts, "tokens": options.tokens, "seconds": round(seconds, 1),
        "step": described(watch.longest(steps)),
        "beat": described([1000 * (came - due) for due, came in watch.stalls]),
        "machine": described(alone),
        "phases": {name: described(watch.longest(spans)) for name, spans in sorted(watch.phases.items())},
        "memory_gb": [round(value, 3) for value in watch.memory],
        "growth": round(max(settled[half:]) / max(settled[:half] or settled), 3),
    }  # fmt: skip


def table(found: dict[str, Any]) -> str:
    rows = [("longest stall while", "count", "p50 ms", "p99 ms", "max ms")]
    named = [("each step", found["step"]), ("each beat", found["beat"]), ("(the machine alone)", found["machine"])]
    for name, figures in [*named, *found["phases"].items()]:
        rows.append((name, str(figures["count"]), *(f"{figures[f'{q}_ms']:.1f}" for q in ("p50", "p99", "max"))))
    lines = [f"{name:28}{count:>8}{p50:>10}{p99:>10}{most:>10}" for name, count, p50, p99, most in rows]
    memory = found["memory_gb"]
    return "\n".join([*lines, f"memory: {memory[0]:.2f} GB at first, {max(memory):.2f} at most, {memory[-1]:.2f} last"])


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=at_least_one, default=200)
    parser.add_argument("--rollouts", type=at_least_one, default=512)
    parser.add_argument("--tokens", type=at_least_one, default=8192)
    parser.add_argument("--json", type=Path)
    return parser


def main() -> None:
    options = parser().parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        found = measure(options, Path(temporary))
    print(table(found))
    if options.json:
        record = {"command": " ".join(["python", *sys.argv]), **conditions(), "bars": BARS, **found}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
